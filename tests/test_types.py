"""What type checkers and editors know of the public names."""

import inspect

import pytest

from swin_dense import SwinBackbone, SwinV2Backbone, extract_pyramid
from swin_dense.features.pyramid import PyramidOptions
from swin_dense.models.options import BackboneOptions
from tests.conftest import ROOT, needs
from tests.processes import python

LINES = """
import numpy, torch
from swin_dense import SwinBackbone, create_backbone, extract_pyramid
backbone = create_backbone('swin_q', window_size=7)
maps: tuple[torch.Tensor, ...] = backbone(torch.rand(1, 3, 64, 64))
size: tuple[int, int] = extract_pyramid(backbone, numpy.zeros((8, 8, 3)), levels=[4]).image_size
several: int = len([pyramid.image_size for pyramid in extract_pyramid(backbone, ['a.jpg', 'b.jpg'])])
create_backbone('swin_t', windowsize=3)
SwinBackbone('t', windowsize=3)
extract_pyramid(backbone, 'photo.jpg', level=4)
extract_pyramid(backbone, 'photo.jpg').append
backbone(image=torch.rand(1, 3, 64, 64))
"""


@pytest.mark.slow
@needs('mypy')
def test_mypy_reports_wrong_options_and_no_others(tmp_path):
    (tmp_path / 'user.py').write_text(LINES.lstrip())
    # Errors in other files are not those of an installed package's user.
    options = ['--cache-dir', 'cache', '--follow-imports', 'silent', '--ignore-missing-imports']
    done = python(
        '-m',
        'mypy',
        *options,
        'user.py',
        status=1,
        cwd=tmp_path,
        MYPYPATH=str(ROOT),
    )
    errors = [line for line in done.stdout.splitlines() if 'error:' in line]
    assert {int(line.split(':')[1]) for line in errors} == {7, 8, 9, 10, 11}, done.stdout + done.stderr
    assert 'did you mean "window_size"?' in errors[0]


def test_the_declared_options_are_those_of_the_functions():
    def keywords(function):
        parameters = inspect.signature(function).parameters.values()
        return {one.name for one in parameters if one.kind is one.KEYWORD_ONLY}

    assert BackboneOptions.__annotations__.keys() == keywords(SwinBackbone) | keywords(SwinV2Backbone)
    assert PyramidOptions.__annotations__.keys() == keywords(extract_pyramid)

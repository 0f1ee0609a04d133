"""Run the code blocks of docs/elsewhere.md in order, with random weights and small data."""

import os
import re
import shutil
import sys
from importlib.util import find_spec

import pytest
import torch

from swin_dense import SwinBackbone
from tests.conftest import ROOT
from tests.processes import completed
from tests.tools.test_notebooks import compare_outputs

REQUIRED = ('torchvision', 'timm', 'segmentation_models_pytorch', 'transformers', 'peft', 'torchao')
PAGE = (ROOT / 'docs' / 'elsewhere.md').read_text()


def blocks(language):
    return re.findall(rf'^```{language}\n(.*?)^```', PAGE, re.S | re.M)


def run(place, *command):
    environment = {
        **os.environ,
        'PYTHONPATH': os.pathsep.join([str(ROOT), *sys.path]),
        'OMP_NUM_THREADS': '1',
    }
    command = [sys.executable, '-W', 'ignore', '-m', 'tests.peers.cuda_stubs', *command]
    return completed(command, cwd=place, env=environment).stdout


@pytest.fixture
def place(tmp_path):
    for package in REQUIRED:
        if find_spec(package) is None:
            pytest.skip(f'needs {package}, see the group peers of pyproject.toml')
    shutil.copytree(ROOT / 'examples', tmp_path / 'examples')
    torch.save({'model': SwinBackbone('t').state_dict()}, tmp_path / 'swin_tiny_patch4_window7_224.pth')
    return tmp_path


def test_every_block_has_a_language_that_is_tested():
    assert set(re.findall(r'^```(.+)', PAGE, re.M)) == {'python', 'py'}


@pytest.mark.slow
def test_python(place):
    program = '\n'.join(blocks('python'))
    (place / 'page.py').write_text(program)
    output = run(place, 'page.py')
    documented = re.findall(r'print\(.*\)  # (.*)', program)
    assert documented
    assert all(line in output.splitlines() for line in documented)


@pytest.mark.slow
@pytest.mark.long
def test_notebook(place):
    path = os.pathsep.join([str(ROOT), *sys.path])
    compare_outputs('torchvision_and_transformers', place, '-m', 'tests.peers.cuda_stubs', PYTHONPATH=path)


@pytest.mark.skipif(find_spec('detectron2') is None, reason='put a clone of detectron2 on PYTHONPATH')
def test_detectron2(place, monkeypatch):
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(place / 'examples')
    (program,) = (block for block in blocks('py') if block.startswith('# needs detectron2'))
    names = {}
    exec(program, names)
    assert list(names['backbone'].output_shape()) == ['res2', 'res3', 'res4', 'res5']

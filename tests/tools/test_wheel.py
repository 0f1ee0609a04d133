"""The wheel contains the recipes, tools and index, and works with torch alone and with mmengine."""

import sys
import tarfile
import zipfile

import pytest

import swin_dense
from tests.conftest import OPTIONAL_PACKAGES, ROOT
from tests.processes import completed, copy_clone, python

RECIPE = 'mask-rcnn_swin-t-p4-w7_fpn_1x_coco'


@pytest.fixture(scope='module')
def sdist(tmp_path_factory):
    """The sdist of all files that git does not ignore, made as by `python -m build` in a clean folder."""
    folder = tmp_path_factory.mktemp('wheel')
    source = copy_clone(folder / 'source')
    completed([sys.executable, '-c', "from setuptools.build_meta import build_sdist; build_sdist('..')"], cwd=source)
    (archive,) = folder.glob('*.tar.gz')
    return archive


@pytest.fixture(scope='module')
def wheel(sdist):
    folder = sdist.parent
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter='data')
    options = ['--quiet', '--no-cache-dir', '--no-deps', '--no-build-isolation', '-w', folder]
    unpacked = folder / sdist.name.removesuffix('.tar.gz')
    completed([sys.executable, '-m', 'pip', 'wheel', *options, '.'], cwd=unpacked)
    (built,) = folder.glob('*.whl')
    return built


@pytest.fixture(scope='module')
def installed(wheel, tmp_path_factory):
    folder = tmp_path_factory.mktemp('site packages')
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def run(installed, code, cwd, blocked=()):
    """Run Python with the unpacked wheel in place of the clone."""
    prepare = f"""
import sys
sys.path.insert(0, {str(installed)!r})
sys.modules.update(dict.fromkeys({[*blocked]}))
import swin_dense
assert swin_dense.__file__.startswith(sys.path[0]), swin_dense.__file__
"""
    return python('-W', 'ignore', '-c', prepare + code, cwd=cwd, PYTHONPATH='').stdout


def test_files_in_the_sdist_and_the_wheel(wheel, sdist):
    held = {name.removeprefix('swin_dense/.mim/') for name in zipfile.ZipFile(wheel).namelist()}
    paths = [*(ROOT / 'configs').rglob('*.*'), *(ROOT / 'swin_dense').rglob('*.*')]
    names = {str(path.relative_to(ROOT)) for path in paths if '__pycache__' not in path.parts}
    assert len(names) > 70
    assert names | {'model-index.yml', 'swin_dense/py.typed', 'tools/train.py', 'tools/test.py'} <= held
    others = ('tests/', 'benchmarks/', 'mmcv', 'tools/')  # a folder mmcv without mmcv could be imported
    assert {name for name in held if name.startswith(others)} == {'tools/train.py', 'tools/test.py'}
    assert not {name for name in held if '__pycache__' in name}
    assert f'-{swin_dense.__version__}-' in wheel.name
    with tarfile.open(sdist) as archive:
        names = [name.partition('/')[2] for name in archive.getnames()]
    assert 'swin_dense/__init__.py' in names
    assert [name for name in names if name.startswith('tests')] == []


ALONE = f"""
import torch
from swin_dense import SwinBackbone, create_backbone, extract_pyramid
from swin_dense.commands._main import main
print([tuple(m.shape) for m in SwinBackbone('t').eval()(torch.zeros(1, 3, 33, 64))])
assert main(['zoo', 'retinanet']) == 0
assert main(['weights', 'swin_t']) == 0
assert main(['config', {RECIPE!r}]) == 2
"""


def test_it_works_with_torch_alone_and_in_mmengine(installed, tmp_path):
    printed = run(installed, ALONE, tmp_path, OPTIONAL_PACKAGES)
    assert '(1, 768, 2, 2)' in printed
    assert 'retinanet_swin-t-p4-w7_fpn_1x_coco' in printed
    assert run(installed, WITH_MMENGINE, tmp_path).startswith('SwinDense https://download.openmmlab.com/')


WITH_MMENGINE = f"""
from mmengine.hub import get_config
config = get_config('swin_dense::mask_rcnn/{RECIPE}.py', pretrained=True)
print(config.model.backbone.type, config.model_path)
"""

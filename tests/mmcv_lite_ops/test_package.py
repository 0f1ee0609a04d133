"""The package of the operators has one file, and commands say where it is missing."""

import shutil
import subprocess
import sys
import zipfile

import pytest

from swin_dense.commands._main import main
from tests.conftest import ROOT


@pytest.fixture(scope='module')
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp('wheel')
    shutil.copytree(ROOT / 'mmcv_lite_ops', folder / 'source')  # setuptools writes into it
    options = ['--quiet', '--no-deps', '--no-build-isolation', '-w', folder]
    subprocess.run([sys.executable, '-m', 'pip', 'wheel', *options, folder / 'source'], check=True)
    (built,) = folder.glob('*.whl')
    return built


def test_the_wheel_adds_one_file_to_mmcv_lite_and_requires_nothing(wheel):
    archive = zipfile.ZipFile(wheel)
    files = [name for name in archive.namelist() if '.dist-info/' not in name]
    (metadata,) = (name for name in archive.namelist() if name.endswith('METADATA'))
    assert files == ['mmcv/_ext.py']
    assert b'Requires-Dist' not in archive.read(metadata)
    assert archive.read('mmcv/_ext.py') == (ROOT / 'mmcv_lite_ops/mmcv/_ext.py').read_bytes()


def test_commands_name_what_mmcv_lite_alone_lacks(tmp_path, monkeypatch, capsys):
    (tmp_path / 'mmcv').mkdir()
    (tmp_path / 'mmcv/__init__.py').touch()
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name == 'mmcv' or name.startswith('mmcv.')]:
        monkeypatch.delitem(sys.modules, name)
    assert main(['train', 'mask-rcnn_swin-demo_fpn', '--work-dir', str(tmp_path / 'run')]) == 2
    assert 'this mmcv has no operators: pip install ./mmcv_lite_ops' in capsys.readouterr().err
    assert not (tmp_path / 'run').exists()

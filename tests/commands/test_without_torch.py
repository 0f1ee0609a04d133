"""The lines of docs/files.md make an environment without torch, in which exported models run."""

import json
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from swin_dense import runtime
from swin_dense.commands import doctor
from tests.commands.files import write_file
from tests.conftest import ROOT, photograph

PAGE = (ROOT / 'docs' / 'files.md').read_text()


def install_lines():
    """Return the commands of the page that install what a file needs."""
    section = PAGE[PAGE.index('Without torch, install') :]
    lines = re.match(r'.*\n\n((?: {4}pip install .*\n)+)', section)[1].split('\n')
    return [line.split() for line in lines if line]


@pytest.fixture(scope='module')
def environment(tmp_path_factory):
    """Return the folder of the programs of an environment with what the page installs, and nothing else."""
    folder = tmp_path_factory.mktemp('without torch')
    clone = folder / 'clone'
    listed = subprocess.run(['git', 'ls-files', '-z', '-co', '--exclude-standard'], cwd=ROOT, capture_output=True)
    for name in filter(None, listed.stdout.decode().split('\0')):
        if (ROOT / name).is_file() and not name.startswith(('tests/', 'docs/', 'benchmarks/')):
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, clone / name)
    subprocess.run([sys.executable, '-m', 'venv', folder / 'environment'], check=True)
    programs = folder / 'environment' / 'bin'
    for line in install_lines():
        done = subprocess.run([programs / line[0], *line[1:]], cwd=clone, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return programs


def run(environment, *arguments, cwd, status=0):
    clean = {name: value for name, value in os.environ.items() if not name.startswith('PYTHON')}
    command = [environment / arguments[0], *arguments[1:]]
    done = subprocess.run(command, cwd=cwd, env=clean, capture_output=True, text=True)
    assert done.returncode == status, done.stdout + done.stderr
    return done


@pytest.mark.slow
def test_the_command_line_of_an_environment_made_by_the_page(environment, tmp_path):
    write_file(tmp_path / 'model.onnx')
    Image.fromarray(photograph(60, 90)).save(tmp_path / 'photo.jpg')
    assert 'predict ' in run(environment, 'swin-dense', '--help', cwd=tmp_path).stdout
    for name in ('predict', 'export', 'zoo', 'train'):
        assert f'usage: swin-dense {name}' in run(environment, 'swin-dense', name, '--help', cwd=tmp_path).stdout
    report = run(environment, 'swin-dense', 'doctor', cwd=tmp_path).stdout
    assert re.search(r'exported models +ok', report)
    assert report.endswith('Nothing is broken.\n')
    run(environment, 'swin-dense', 'predict', 'model.onnx', 'photo.jpg', '--out', 'found', cwd=tmp_path)
    expected = runtime.load(tmp_path / 'model.onnx').predict(tmp_path / 'photo.jpg')
    record = json.loads((tmp_path / 'found/photo.json').read_text())
    assert record == {**expected.record, 'image': 'photo.jpg'}
    np.testing.assert_array_equal(np.asarray(Image.open(tmp_path / 'found/photo.labels.png')), expected.labels)
    refused = run(environment, 'swin-dense', 'features', '.', '--out', 'x', cwd=tmp_path, status=2)
    assert 'which are not installed: pip install' in refused.stderr
    assert refused.stderr.count('\n') == 1


@pytest.mark.slow
def test_the_lines_of_python_on_the_page(environment, tmp_path):
    write_file(tmp_path / 'model.onnx')
    Image.fromarray(photograph(60, 90)).save(tmp_path / 'photo.jpg')
    code = re.search(r'^```python\n(from swin_dense import runtime\n.*?)^```', PAGE, re.S | re.M)[1]
    (tmp_path / 'page.py').write_text(f'{code}\nimport sys\nassert "torch" not in sys.modules\n')
    assert run(environment, 'python', 'page.py', cwd=tmp_path).stdout.startswith('photo.jpg')


def test_packages_that_count_as_broken_if_they_are_missing(monkeypatch, capsys):
    installed = {'torch', 'onnxruntime', 'cv2'}
    monkeypatch.setattr(doctor, 'find_spec', lambda name: name if name in installed else None)
    assert doctor.tried(('pycocotools', '')) == (True, 'pycocotools is not installed')
    installed.remove('torch')
    assert doctor.tried(('torch', '')) == (True, 'torch is not installed')
    assert doctor.tried(('pycocotools', '')) == (False, 'pycocotools is not installed')
    installed.remove('onnxruntime')
    assert doctor.tried(('torch', '')) == (False, 'torch is not installed')

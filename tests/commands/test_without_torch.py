"""The lines of docs/files.md make an environment without torch, in which exported models run."""

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from swin_dense import runtime
from swin_dense.commands import doctor
from tests.commands.files import write_file
from tests.conftest import ROOT, photograph
from tests.processes import completed, copy_clone

PAGE = (ROOT / 'docs' / 'files.md').read_text()


def install_lines():
    """Return the commands of the page that install the packages that a file needs."""
    section = PAGE[PAGE.index('\n### Run the file\n') :]
    lines = re.search(r'\n\n((?: {4}pip install .*\n)+)', section)[1].splitlines()
    return [line.split() for line in lines]


@pytest.fixture(scope='module')
def environment(tmp_path_factory):
    """Return the folder of the programs of an environment with only the packages that the page installs."""
    folder = tmp_path_factory.mktemp('without torch')
    clone = copy_clone(folder / 'clone', without=['tests/', 'docs/', 'benchmarks/'])
    subprocess.run([sys.executable, '-m', 'venv', folder / 'environment'], check=True)
    programs = folder / 'environment' / 'bin'
    for line in install_lines():
        run(programs, *line, cwd=clone)
    return programs


def run(environment, program, *arguments, cwd, status=0):
    clean = {name: value for name, value in os.environ.items() if not name.startswith('PYTHON')}
    return completed([environment / program, *arguments], status, cwd=cwd, env=clean)


@pytest.fixture
def folder(tmp_path):
    write_file(tmp_path / 'model.onnx')
    Image.fromarray(photograph(60, 90)).save(tmp_path / 'photo.jpg')
    return tmp_path


@pytest.mark.slow
def test_the_command_line_of_an_environment_made_by_the_page(environment, folder):
    def call(*arguments, status=0):
        return run(environment, 'swin-dense', *arguments, cwd=folder, status=status)

    assert 'predict ' in call('--help').stdout
    for name in ('predict', 'export', 'zoo', 'train'):
        assert f'usage: swin-dense {name}' in call(name, '--help').stdout
    report = call('doctor').stdout
    assert re.search(r'exported models +ok', report)
    assert report.endswith('Nothing is broken.\n')
    call('predict', 'model.onnx', 'photo.jpg', '--out', 'found')
    expected = runtime.load(folder / 'model.onnx').predict(folder / 'photo.jpg')
    record = json.loads((folder / 'found/photo.json').read_text())
    assert record == {**expected.record, 'image': 'photo.jpg'}
    np.testing.assert_array_equal(np.asarray(Image.open(folder / 'found/photo.labels.png')), expected.labels)
    refused = call('features', '.', '--out', 'x', status=2).stderr
    assert 'which are not installed: pip install' in refused
    assert refused.count('\n') == 1


@pytest.mark.slow
def test_the_lines_of_python_on_the_page(environment, folder):
    code = re.search(r'^```python\n(from swin_dense import runtime\n.*?)^```', PAGE, re.S | re.M)[1]
    (folder / 'page.py').write_text(f'{code}\nimport sys\nassert "torch" not in sys.modules\n')
    assert run(environment, 'python', 'page.py', cwd=folder).stdout.startswith('photo.jpg')


@pytest.mark.parametrize(
    ('installed', 'name', 'is_right'),
    [
        ('torch onnxruntime cv2', 'pycocotools', True),
        ('onnxruntime cv2', 'torch', True),
        ('onnxruntime cv2', 'pycocotools', False),
        ('cv2', 'torch', False),
    ],
)
def test_packages_that_count_as_broken_if_they_are_missing(monkeypatch, installed, name, is_right):
    monkeypatch.setattr(doctor, 'find_spec', lambda package: package if package in installed.split() else None)
    assert doctor.tried((name, '')) == (is_right, f'{name} is not installed')

"""What is wrong or missing is said in one line with the cure, before anything is downloaded."""

import os
import re
import subprocess
import sys
from pathlib import Path

import machine
import mmcv_build
import pytest
import steps
from kinds import KINDS, read
from machine import Unfit

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ('PYTHONPATH', 'CXX')}


def set_up(folder, **environment):
    """Run the set-up, without a connection, as whatever it refuses has to be refused without."""
    # Nothing listens there, and pip does not try again.
    offline = {'PIP_INDEX_URL': 'http://127.0.0.1:9/simple', 'PIP_RETRIES': '0', 'PIP_NO_INDEX': '1'}
    command = [sys.executable, str(ROOT / 'tools/set_up'), 'main', str(folder)]
    return subprocess.run(command, env={**ENVIRONMENT, **offline, **environment}, capture_output=True, text=True)


def make_python(folder, script):
    """Make the folder of an environment whose Python is a shell script."""
    (folder / 'bin').mkdir(parents=True)
    python = folder / 'bin/python'
    python.write_text(f'#!/bin/sh\n{script}\n')
    python.chmod(0o755)


def test_without_a_compiler(tmp_path):
    done = set_up(tmp_path / 'an environment', CXX='no-such-compiler')
    assert done.returncode == 1
    assert done.stdout == ''
    assert done.stderr.splitlines() == [
        "set-up: mmcv is compiled here, and there is no C++ compiler 'no-such-compiler': apt install g++"
    ]
    assert not (tmp_path / 'an environment').exists()


def test_with_a_compiler_that_does_not_work(tmp_path):
    compiler = tmp_path / 'c++'
    compiler.write_text('#!/bin/sh\necho "error: -std=c++17 is not known"; exit 1\n')
    compiler.chmod(0o755)
    done = set_up(tmp_path / 'environment', CXX=str(compiler))
    assert len(done.stderr.splitlines()) == 1
    assert '(error: -std=c++17 is not known): apt install g++' in done.stderr


def test_with_an_environment_of_another_python(tmp_path):
    make_python(tmp_path / 'its environment', 'echo 3.8')
    done = set_up(tmp_path / 'its environment')
    assert 'is of Python 3.8' in done.stderr
    assert f"rm -r '{tmp_path}/its environment', or make PYTHON=python3.8" in done.stderr


def test_with_an_environment_whose_python_is_gone(tmp_path):
    (tmp_path / 'environment/bin').mkdir(parents=True)
    (tmp_path / 'environment/bin/python').symlink_to(tmp_path / 'gone')
    done = set_up(tmp_path / 'environment')
    assert f'is damaged, its Python does not run: rm -r {tmp_path}/environment' in done.stderr


def test_without_a_connection(tmp_path):
    done = set_up(tmp_path / 'environment')
    assert done.returncode == 1
    assert 'HTTPS_PROXY' in done.stderr.splitlines()[-1]


def test_python_too_old():
    with pytest.raises(Unfit, match=r'3\.99 or newer needed: make PYTHON=python3'):
        machine.check_python((3, 99), (3, 99))


def test_python_newer_than_tried_is_a_warning(capsys):
    machine.check_python((3, 8), (3, 9))
    assert 'has not been tried, 3.9 is the newest' in capsys.readouterr().out


def test_python_without_headers(tmp_path, monkeypatch):
    monkeypatch.setattr(machine.sysconfig, 'get_paths', lambda: {'include': str(tmp_path)})
    monkeypatch.delenv('CXX', raising=False)
    with pytest.raises(Unfit, match=rf'{tmp_path}/Python.h is missing: apt install python3\.\d+-dev'):
        machine.check_compiler()


def test_room_on_one_disk_is_added_up(tmp_path, monkeypatch):
    monkeypatch.setattr(machine.shutil, 'disk_usage', lambda path: machine.shutil._ntuple_diskusage(1e12, 1e12, 5e9))
    machine.check_space({tmp_path / 'to/be/made': 3.0})
    with pytest.raises(Unfit, match=r'5\.0 GB free on the disk of .*, 6\.0 needed'):
        machine.check_space({tmp_path / 'to/be/made': 3.0, tmp_path: 3.0})


@pytest.mark.parametrize(
    ('gpu', 'cuda', 'nvcc', 'wanted', 'reason'),
    [
        (False, '13.0', '13.0', False, 'no GPU here'),
        (True, None, '13.0', False, 'is a build for CPUs'),
        (True, '13.0', None, False, 'no nvcc: install CUDA 13.0'),
        (True, '13.0', '12.4', False, r'torch 2\.13\.0 is for CUDA 13\.0 and nvcc is 12\.4, which do not go together'),
        (True, '13.0', '13.1', True, r'torch 2\.13\.0 for CUDA 13\.0, nvcc 13\.1'),
    ],
)
def test_operators_of_mmcv_for_gpus(gpu, cuda, nvcc, wanted, reason, monkeypatch):
    monkeypatch.delenv('FORCE_CUDA', raising=False)
    monkeypatch.setattr(mmcv_build, 'has_gpu', lambda: gpu)
    monkeypatch.setattr(mmcv_build, 'nvcc_version', lambda: nvcc)
    build = mmcv_build.plan('2.13.0', cuda)
    assert build.cuda is wanted
    assert re.search(reason, build.reason)
    assert ('cuda' in build.key) is wanted


class PipWith:
    """Stands in for the pip of an environment that holds these packages."""

    python = Path('an environment/bin/python')

    def __init__(self, **versions):
        self.versions = versions

    def installed(self):
        return self.versions


def test_a_torch_that_is_there_is_kept():
    kept = steps.keep_torch(PipWith(torch='2.12.1+cu126'), Path('.venv'), ['torch==2.13.0', 'numpy==2.3.5'])
    assert kept == ['torch==2.12.1+cu126', 'numpy==2.3.5']
    assert steps.keep_torch(PipWith(), Path('.venv'), ['torch==2.13.0']) == ['torch==2.13.0']


def test_a_torch_that_is_too_old_is_refused():
    with pytest.raises(Unfit, match=r'torch 1\.13\.1 in \.venv is older than .*python -m pip uninstall torch'):
        steps.keep_torch(PipWith(torch='1.13.1'), Path('.venv'), ['torch==2.13.0'])


def test_builds_for_other_torches_are_kept_apart(monkeypatch):
    monkeypatch.setattr(mmcv_build, 'has_gpu', lambda: False)
    monkeypatch.delenv('FORCE_CUDA', raising=False)
    builds = [mmcv_build.plan(torch, None) for torch in ('2.13.0', '2.13.0+cpu', '2.12.1')]
    assert len({mmcv_build.wheel_folder('mmcv==2.1.0', build) for build in builds}) == 3


def test_kinds_name_files_that_are_there():
    for kind in KINDS.values():
        assert all(read(name) for name in (*kind.files, *kind.no_deps))

"""`swin-dense doctor` in complete and in broken environments, where it reports the fault instead of failing."""

import importlib.metadata
import os
import re
import subprocess
import sys

import pytest

from swin_dense.commands import doctor
from swin_dense.commands._main import _explained, main
from swin_dense.commands.doctor import tried, version_line
from swin_dense.utils.packages import cure_for
from tests.conftest import ROOT
from tests.processes import completed


@pytest.fixture
def installed(monkeypatch):
    """Return a function that replaces the installed distributions."""

    def install(**found):
        found = {name.replace('_', '-'): version for name, version in found.items()}

        def version(name):
            if name not in found:
                raise importlib.metadata.PackageNotFoundError(name)
            return found[name]

        monkeypatch.setattr(importlib.metadata, 'version', version)

    return install


def test_versions(installed):
    installed(
        torch='2.1.2+cu121',
        setuptools='84.2.1',
        mmcv='2.1.0',
        mmcv_lite='2.1.0',
        onedl_mmengine='0.10.12',
    )
    assert version_line('torch') == 'torch 2.1.2+cu121'
    assert version_line('setuptools') == "setuptools 84.2.1 (tested: (None, '81'))"
    assert version_line('mmcv') == 'mmcv 2.1.0 and mmcv-lite 2.1.0 install the same files'
    assert version_line('mmengine') == 'onedl-mmengine 0.10.12'
    assert version_line('mmdet') == 'not installed'


@pytest.mark.parametrize(
    ('error', 'cure'),
    [
        ("ModuleNotFoundError: No module named 'pkg_resources'", "pip install 'setuptools<81'"),
        ('RuntimeError: operator torchvision::nms does not exist', 'install the torchvision version that matches'),
        ('AssertionError: MMCV==2.2.0 is used but incompatible.', 'does not support this mmcv'),
        ("ModuleNotFoundError: No module named 'mmcv._ext'", 'has no operators: pip install ./mmcv_lite_ops'),
        ('ImportError: mmcv/_ext.cpython-311.so: undefined symbol: _ZN3c10', 'was compiled for another torch'),
        ('RuntimeError: Numpy is not available', "pip install 'numpy<2'"),
        ("ModuleNotFoundError: No module named 'ftfy'", 'pip install ftfy'),
        ("ModuleNotFoundError: No module named 'mmcv'", "pip install '.[mm-lite]' ./mmcv_lite_ops"),
        ('ValueError: something else', ''),
    ],
)
def test_cures(error, cure):
    found = cure_for(error)
    assert cure in found if cure else found == ''


def test_cures_name_forks_where_forks_are_installed(installed):
    installed(onedl_mmengine='0.10.12')
    compile_mmcv = 'pip install --no-build-isolation onedl-mmcv'
    assert cure_for("ModuleNotFoundError: No module named 'mmcv'") == compile_mmcv
    error = ModuleNotFoundError("No module named 'mmcv'", name='mmcv')
    assert _explained(error).endswith(f'not installed: {compile_mmcv}')


@pytest.mark.parametrize(
    ('source', 'text'),
    [
        ('import os; os.kill(os.getpid(), 11)', 'SIGSEGV'),
        ('raise OSError("no libc10.so")', 'OSError: no libc10.so'),
    ],
)
def test_a_broken_package_is_named(tmp_path, monkeypatch, source, text):
    (tmp_path / 'broken').mkdir()
    (tmp_path / 'broken' / '__init__.py').write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    is_right, found = tried(('broken', 'import broken'))
    assert is_right is False
    assert found.startswith(text)


def test_a_slow_package_is_not_broken(monkeypatch, capsys):
    probes = {'quick': ('sys', ''), 'slow': ('sys', 'import time; time.sleep(600)')}
    monkeypatch.setattr(doctor, 'TIMEOUT', 5)
    monkeypatch.setattr(doctor, 'PROBES', probes)
    assert main(['doctor']) == 0
    printed = capsys.readouterr().out
    assert 'slow                     did not end within 5 seconds\n' in printed
    assert '\nNothing was found broken.\nNot known, because it did not end within 5 seconds: slow. On a slow' in printed
    monkeypatch.setitem(probes, 'wrong', ('sys', 'import pkg_resourcez'))
    assert main(['doctor']) == 1
    assert '\n1 broken. Suggested fixes:\n  wrong: pip install pkg_resourcez\nNot known, ' in capsys.readouterr().out


def test_the_time_of_a_slow_package_is_printed(monkeypatch, capsys):
    monkeypatch.setattr(doctor, 'PROBES', {'one': ('sys', 'print(7)')})
    monkeypatch.setattr(doctor, 'SLOW', 0)
    assert main(['doctor']) == 0
    assert re.search(r'  one +7 \(after \d+ seconds\)\n\nNothing is broken.', capsys.readouterr().out)


def test_an_empty_environment(tmp_path):
    python = tmp_path / 'empty' / 'bin' / 'python'
    subprocess.run([sys.executable, '-m', 'venv', '--without-pip', tmp_path / 'empty'], check=True)
    environment = {'PATH': '/usr/bin:/bin', 'PYTHONPATH': str(ROOT), 'HOME': os.environ.get('HOME', '/')}
    done = completed([python, '-m', 'swin_dense', 'doctor'], 1, env=environment)
    assert done.stderr == ''
    assert 'torch is not installed' in done.stdout


def test_exit_status_and_report(monkeypatch, capsys):
    monkeypatch.setattr(doctor, 'PROBES', {'one': ('sys', 'print(7)'), 'other': ('absent_package', '')})
    assert main(['doctor']) == 0
    assert capsys.readouterr().out.endswith('Nothing is broken.\n')
    monkeypatch.setitem(doctor.PROBES, 'last', ('sys', 'import pkg_resourcez'))
    assert main(['doctor']) == 1
    assert capsys.readouterr().out.endswith('  last: pip install pkg_resourcez\n')

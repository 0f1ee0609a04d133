"""What the doctor says of environments that are whole, and of broken ones, which it survives."""

import importlib.metadata
import json
import os
import subprocess
import sys

import pytest

from swin_dense import doctor
from swin_dense.__main__ import main
from swin_dense.doctor import Finding, cure_for, probe, versions
from tests.conftest import ROOT


@pytest.fixture
def installed(monkeypatch):
    """Let the environment have other distributions."""

    def install(**found):
        found = {name.replace('_', '-'): version for name, version in found.items()}

        def version(name):
            if name not in found:
                raise importlib.metadata.PackageNotFoundError(name)
            return found[name]

        monkeypatch.setattr(importlib.metadata, 'version', version)
        return {finding.name: finding for finding in versions()}

    return install


def test_versions_against_the_table(installed):
    found = installed(torch='2.1.2+cu121', numpy='2.3.5', setuptools='84.2.1', mmcv='2.2.0', triton='3.6.0')
    status = {name: finding.status for name, finding in found.items()}
    assert [status[name] for name in ('torch', 'numpy', 'triton')] == ['ok', 'ok', 'ok']
    assert (status['mmcv'], found['mmcv'].cure) == ('note', 'tried: >= 2.1.0, < 2.2')
    assert (status['setuptools'], found['setuptools'].cure) == ('note', 'tried: < 81')
    assert found['mmdet'].text == 'not installed'


def test_forks_and_originals_in_one_place_are_broken(installed):
    found = installed(mmcv='2.1.0', onedl_mmcv='2.3.6', onedl_mmengine='0.10.12')
    assert found['mmcv'].status == 'broken'
    assert found['mmcv'].cure == 'keep one: pip uninstall mmcv onedl-mmcv'
    assert (found['mmengine'].status, found['mmengine'].text) == ('note', 'onedl-mmengine 0.10.12')


@pytest.mark.parametrize(
    ('error', 'package', 'cure'),
    [
        ("ModuleNotFoundError: No module named 'pkg_resources'", 'mmengine', "pip install 'setuptools<81'"),
        (
            'RuntimeError: operator torchvision::nms does not exist',
            'torchvision',
            'install the torchvision made for this torch',
        ),
        ('AssertionError: MMCV==2.2.0 is used but incompatible.', 'mmdet', 'refuses this mmcv'),
        ("ModuleNotFoundError: No module named 'mmcv._ext'", 'mmcv', 'has no compiled operators'),
        ('ImportError: mmcv/_ext.cpython-311.so: undefined symbol: _ZN3c10', 'mmcv', 'was compiled for another torch'),
        ('ImportError: libtorch_cpu.so: undefined symbol: iJIT_NotifyEvent', 'torch', 'install torch again'),
        ('RuntimeError: Numpy is not available', 'torch', "pip install 'numpy<2'"),
        ('UnpicklingError: Weights only load failed. WeightsUnpickler error', 'torch', 'import swin_dense before'),
        ("ModuleNotFoundError: No module named 'ftfy'", 'mmseg', 'pip install ftfy'),
        ("ModuleNotFoundError: No module named 'PIL'", '', 'pip install Pillow'),
        ('KeyError: 3', 'mmseg', 'pip install --force-reinstall --no-deps mmsegmentation'),
        ('ValueError: something else', '', ''),
    ],
)
def test_cures(error, package, cure):
    found = cure_for(error, package)
    assert found.startswith(cure) if not cure else cure in found


@pytest.mark.parametrize(
    ('source', 'text', 'cure'),
    [
        ('raise ImportError("mmcv/_ext.so: undefined symbol: x")', 'undefined symbol', 'compiled for another torch'),
        ('import os; os.kill(os.getpid(), 11)', 'ended with SIGSEGV', '-X faulthandler'),
        ('raise SystemExit(7)', 'SystemExit: 7', 'pip uninstall mmcv'),
        ('import os; print("{}"); os._exit(7)', 'ended with status 7', '-X faulthandler'),
        ('', "cannot import name 'nms'", ''),
    ],
)
def test_a_broken_package_is_a_finding(tmp_path, monkeypatch, source, text, cure):
    (tmp_path / 'mmcv').mkdir()
    (tmp_path / 'mmcv' / '__init__.py').write_text('')
    (tmp_path / 'mmcv' / 'ops.py').write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    found = probe('trap', 'operators of mmcv')
    assert found.status == 'broken'
    assert text in found.text
    assert cure in found.cure


def test_a_check_that_hangs_is_a_finding(monkeypatch):
    monkeypatch.setattr(doctor, 'TIMEOUT', 0.05)
    found = probe('check', 'torch alone')
    assert (found.status, found.text) == ('broken', 'gave no answer within 0.05 seconds')


def doctor_of(path, python=sys.executable):
    """Return what the doctor prints as JSON in an environment with ``path`` before all others, and as text."""
    environment = {'PATH': '/usr/bin:/bin', 'PYTHONPATH': f'{path}{os.pathsep}{ROOT}', 'OMP_NUM_THREADS': '1'}
    as_json, as_text = (
        subprocess.run(
            [python, '-m', 'swin_dense', 'doctor', *options], env=environment, capture_output=True, text=True
        )
        for options in (['--json'], [])
    )
    assert (as_json.returncode, as_text.returncode) == (1, 1), as_text.stdout + as_text.stderr
    assert 'Traceback' not in as_json.stderr + as_text.stdout + as_text.stderr
    broken = {finding['name']: finding for finding in json.loads(as_json.stdout) if finding['status'] == 'broken'}
    assert all(finding['cure'] in as_text.stdout.partition('What helps:')[2] for finding in broken.values())
    return broken


def shadow(tmp_path, package, source):
    """Put a package that does ``source`` when it is imported before the true one, and hide the frameworks."""
    (tmp_path / package).mkdir(parents=True)
    (tmp_path / package / '__init__.py').write_text(source)
    hidden = {'mmdet', 'mmseg', 'mmcv', 'mmengine'} - {package}
    (tmp_path / 'sitecustomize.py').write_text(f'import sys\nsys.modules.update(dict.fromkeys({hidden}))\n')
    return tmp_path


@pytest.mark.parametrize(
    'error', ['OSError("libcudart.so.12: cannot open shared object file")', 'RuntimeError("two\\nlines")']
)
def test_torch_that_cannot_be_imported(tmp_path, error):
    found = doctor_of(shadow(tmp_path / 'with space', 'torch', f'raise {error}'))
    assert list(found) == ['torch alone']
    assert found['torch alone']['text'].startswith(error.partition('(')[0])
    assert 'pytorch.org' in found['torch alone']['cure']
    done = subprocess.run(
        [sys.executable, '-m', 'swin_dense', 'complexity'],
        env={'PYTHONPATH': f'{tmp_path / "with space"}{os.pathsep}{ROOT}'},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert 'error: swin_dense needs torch, which cannot be imported' in done.stderr
    assert done.stderr.rstrip().endswith('`swin-dense doctor` says more')


def test_an_environment_without_anything(tmp_path):
    subprocess.run([sys.executable, '-m', 'venv', '--without-pip', tmp_path / 'empty'], check=True)
    found = doctor_of(tmp_path, tmp_path / 'empty' / 'bin' / 'python')
    assert {name: finding['cure'] for name, finding in found.items()} == {'torch alone': 'pip install torch'}


@pytest.mark.slow
@pytest.mark.parametrize(
    ('package', 'source', 'name', 'text', 'cure'),
    [
        ('numpy', 'raise ImportError("C-extensions failed")', 'numpy with torch', 'C-extensions', 'no-deps numpy'),
        ('PIL', 'raise ImportError("no _imaging")', 'Pillow', 'no _imaging', 'no-deps Pillow'),
        ('triton', 'raise RuntimeError("0 active drivers")', 'triton', 'active drivers', 'no-deps triton'),
        ('mmengine', 'MODELS = 1 / 0', 'checkpoints of mmengine', 'ZeroDivisionError', 'no-deps mmengine'),
        ('mmcv', 'raise OSError("libc10.so: no such file")', 'operators of mmcv', 'libc10.so', 'pip uninstall mmcv'),
    ],
)
def test_one_broken_package_leaves_the_other_findings(tmp_path, package, source, name, text, cure):
    found = doctor_of(shadow(tmp_path, package, source))
    assert 'torch alone' not in found
    assert text in found[name]['text']
    assert cure in found[name]['cure']


@pytest.mark.slow
def test_this_environment_is_whole(capsys):
    assert main(['doctor', '--json']) == 0
    findings = json.loads(capsys.readouterr().out)
    assert {finding['topic'] for finding in findings} == {'version', 'trap', 'backend', 'check'}
    checks = {finding['name']: finding['text'] for finding in findings if finding['topic'] == 'check'}
    assert checks['mmdet'] == 'forward and backward of RetinaNet'
    assert checks['mmsegmentation'] == 'forward and backward of EncoderDecoder'


def test_exit_status_and_report(monkeypatch, capsys):
    findings = [Finding('version', 'torch', 'ok', '2.13'), Finding('trap', 'torchvision', 'note', 'not installed')]
    monkeypatch.setattr('swin_dense.commands.doctor.examine', lambda: findings)
    assert main(['doctor']) == 0
    assert capsys.readouterr().out.endswith('Nothing is broken.\n')
    findings.append(Finding('check', 'mmdet', 'broken', 'an error', 'pip install x'))
    assert main(['doctor']) == 1
    printed = capsys.readouterr().out
    assert printed.endswith('1 broken. What helps:\n  pip install x\n')
    assert '-> pip install x' in printed

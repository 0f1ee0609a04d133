"""What the doctor says of environments that are whole, and of broken ones, which it survives."""

import importlib.metadata
import json

import pytest

from swin_dense import doctor
from swin_dense.__main__ import main
from swin_dense.doctor import Finding, cure_for, probe, versions


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
    ('error', 'cure'),
    [
        ("ModuleNotFoundError: No module named 'pkg_resources'", "pip install 'setuptools<81'"),
        ('RuntimeError: operator torchvision::nms does not exist', 'install the torchvision made for this torch'),
        ('AssertionError: MMCV==2.2.0 is used but incompatible. Please install mmcv>=2.0.0rc4', 'refuses this mmcv'),
        ("ModuleNotFoundError: No module named 'mmcv._ext'", 'has no compiled operators'),
        ('ImportError: mmcv/_ext.cpython-311.so: undefined symbol: _ZN3c10', 'was compiled for another torch'),
        ('RuntimeError: Numpy is not available', "pip install 'numpy<2'"),
        (
            '_pickle.UnpicklingError: Weights only load failed. WeightsUnpickler error',
            'import swin_dense before loading',
        ),
        ("ModuleNotFoundError: No module named 'ftfy'", 'pip install ftfy'),
        ('ValueError: something else', ''),
    ],
)
def test_cures(error, cure):
    found = cure_for(f'Traceback (most recent call last):\n  File "mmcv/_ext.py"\n{error}\n')
    assert found.startswith(cure) if not cure else cure in found


@pytest.mark.parametrize(
    ('source', 'text', 'cure'),
    [
        ('raise ImportError("mmcv/_ext.so: undefined symbol: x")', 'undefined symbol', 'compiled for another torch'),
        ('import os; os.kill(os.getpid(), 11)', 'status -11', ''),
        ('import sys; sys.exit(7)', 'status 7', ''),
        ('', "cannot import name 'nms'", ''),
    ],
)
def test_a_broken_package_is_a_finding(tmp_path, monkeypatch, source, text, cure):
    (tmp_path / 'mmcv').mkdir()
    (tmp_path / 'mmcv' / '__init__.py').write_text('')
    (tmp_path / 'mmcv' / 'ops.py').write_text(source)
    monkeypatch.setenv('PYTHONPATH', str(tmp_path), prepend=':')
    found = probe('trap', 'operators of mmcv')
    assert found.status == 'broken'
    assert text in found.text
    assert cure in found.cure


def test_a_check_that_hangs_is_a_finding(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, 'TIMEOUT', 0.05)
    assert probe('check', 'torch alone') == Finding(
        'check', 'torch alone', 'broken', 'gave no answer within 0.05 seconds'
    )


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
    assert printed.endswith('1 broken\n')
    assert '-> pip install x' in printed

"""`swin-dense doctor` in complete and in broken environments, where it reports findings instead of failing."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys

import pytest

from swin_dense import doctor
from swin_dense.__main__ import _explained, main
from swin_dense.doctor import Finding, cure_for, extras, probe, probes, versions
from tests.conftest import ROOT


@pytest.fixture
def installed(monkeypatch):
    """Return a function that replaces the installed distributions and returns the findings of ``versions`` by name."""

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
    assert (status['mmcv'], found['mmcv'].cure) == ('note', 'tested: >= 2.1.0, < 2.2')
    assert (status['setuptools'], found['setuptools'].cure) == ('note', 'tested: < 81')
    assert found['mmdet'].text == 'not installed'


def test_forks_next_to_originals_are_broken(installed):
    found = installed(mmcv='2.1.0', onedl_mmcv='2.3.6', onedl_mmengine='0.10.12')
    assert found['mmcv'].status == 'broken'
    assert found['mmcv'].text == 'mmcv 2.1.0 and onedl-mmcv 2.3.6 install the same files'
    assert found['mmcv'].cure == 'pip uninstall mmcv onedl-mmcv, and install one again'
    assert (found['mmengine'].status, found['mmengine'].text) == ('note', 'onedl-mmengine 0.10.12')


def test_mmcv_lite_is_an_mmcv_but_not_over_a_compiled_one(installed):
    found = installed(mmcv_lite='2.1.0')
    assert (found['mmcv'].status, found['mmcv'].text) == ('ok', 'mmcv-lite 2.1.0')
    found = installed(mmcv_lite='2.2.0')
    assert (found['mmcv'].status, found['mmcv'].cure) == ('note', 'tested: >= 2.1.0, < 2.2')
    found = installed(mmcv='2.1.0', mmcv_lite='2.1.0')
    assert (found['mmcv'].status, found['mmcv'].text) == (
        'broken',
        'mmcv 2.1.0 and mmcv-lite 2.1.0 install the same files',
    )
    assert found['mmcv'].cure == 'pip uninstall mmcv mmcv-lite, and install one again'


def test_extras_and_what_is_missing_from_each(installed, monkeypatch):
    missing = {'tifffile', 'pyarrow', 'mmcv', 'mmseg'}
    monkeypatch.setattr(doctor, 'find_spec', lambda name: None if name in missing else name)
    installed()
    found = {finding.name: finding for finding in extras()}
    assert (found['features'].status, found['features'].text) == ('note', 'missing: pyarrow, tifffile')
    assert found['features'].cure == "pip install '.[features]' (in the clone of swin_dense)"
    assert (found['zarr'].status, found['zarr'].text) == ('ok', 'has zarr')
    assert found['mm-lite'].cure.startswith("pip install '.[mm-lite]' ./mmcv_lite_ops (in the clone of swin_dense)")


@pytest.mark.parametrize(
    ('error', 'package', 'cure'),
    [
        ("ModuleNotFoundError: No module named 'pkg_resources'", 'mmengine', "pip install 'setuptools<81'"),
        (
            'RuntimeError: operator torchvision::nms does not exist',
            'torchvision',
            'install the torchvision version that matches this torch',
        ),
        ('AssertionError: MMCV==2.2.0 is used but incompatible.', 'mmdet', 'does not support this mmcv'),
        ("ModuleNotFoundError: No module named 'mmcv._ext'", 'mmcv', 'has no operators: pip install ./mmcv_lite_ops'),
        ('ImportError: mmcv/_ext.cpython-311.so: undefined symbol: _ZN3c10', 'mmcv', 'was compiled for another torch'),
        ('ImportError: libtorch_cpu.so: undefined symbol: iJIT_NotifyEvent', 'torch', 'install torch again'),
        ('RuntimeError: Numpy is not available', 'torch', "pip install 'numpy<2'"),
        ('UnpicklingError: Weights only load failed. WeightsUnpickler error', 'torch', 'import swin_dense before'),
        ('EOFError: Ran out of input', 'yapf_third_party', 'rm -r ~/.cache/YAPF'),
        ("ModuleNotFoundError: No module named 'ftfy'", 'mmseg', 'pip install ftfy'),
        ("ModuleNotFoundError: No module named 'PIL'", '', 'pip install Pillow'),
        ("ModuleNotFoundError: No module named 'mmcv'", 'mmdet', "pip install '.[mm-lite]' ./mmcv_lite_ops"),
        ('KeyError: 3', 'mmseg', 'pip install --force-reinstall --no-deps mmsegmentation'),
        ('ValueError: something else', '', ''),
    ],
)
def test_cures(error, package, cure):
    found = cure_for(error, package)
    assert cure in found if cure else found == ''


def test_cures_name_forks_where_forks_are_installed(installed):
    installed(onedl_mmengine='0.10.12')
    compile_mmcv = 'pip install --no-build-isolation onedl-mmcv'
    assert cure_for("ModuleNotFoundError: No module named 'mmcv'", 'mmdet') == compile_mmcv
    assert cure_for("ModuleNotFoundError: No module named 'mmseg'") == 'pip install onedl-mmsegmentation'
    assert cure_for('KeyError: 3', 'mmdet') == 'pip install --force-reinstall --no-deps onedl-mmdetection'
    recompile = cure_for('ImportError: mmcv/_ext.cpython-312.so: undefined symbol: _ZN3c10', 'mmcv')
    assert recompile.endswith(f'pip uninstall onedl-mmcv mmcv-lite; pip cache remove onedl_mmcv; {compile_mmcv}')
    error = ModuleNotFoundError("No module named 'mmcv'", name='mmcv')
    assert _explained(error).endswith(f'not installed: {compile_mmcv}')


@pytest.mark.parametrize(
    ('source', 'text', 'cure'),
    [
        ('import os; os.kill(os.getpid(), 11)', 'ended with SIGSEGV', '-X faulthandler'),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ('raise ImportError("mmcv/_ext.so: undefined symbol: x")', 'undefined symbol', 'for another torch'),
                ('raise SystemExit(7)', 'SystemExit: 7', 'pip uninstall mmcv'),
                ('import os; print("{}"); os._exit(7)', 'ended with status 7', '-X faulthandler'),
                ('', 'cannot import name', ''),  # the first that is missing, which depends on the operators in use
            )
        ),
    ],
)
def test_a_broken_package_is_a_finding(tmp_path, monkeypatch, source, text, cure):
    (tmp_path / 'mmcv').mkdir()
    (tmp_path / 'mmcv' / '__init__.py').write_text('')
    (tmp_path / 'mmcv' / 'ops.py').write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    (found,) = probe('operators of mmcv')
    assert found.status == 'broken'
    assert text in found.text
    assert cure in found.cure if cure else found.cure == ''


def test_a_check_that_hangs_is_a_finding(monkeypatch):
    monkeypatch.setattr(doctor, 'TIMEOUT', 0.05)
    (found,) = probe('torch alone', 'Pillow')
    assert (found.status, found.text) == ('broken', 'did not answer within 0.05 seconds')


@pytest.mark.parametrize(
    ('source', 'text'),
    [
        ('import os; os.kill(os.getpid(), 11)', 'ended with SIGSEGV'),
        ('raise OSError("no libc10.so")', 'OSError: no libc10.so'),
        ('print("{}", flush=True); raise SystemExit(7)', 'SystemExit: 7'),
    ],
)
def test_checks_after_a_broken_one_run(tmp_path, monkeypatch, source, text):
    (tmp_path / 'mmcv').mkdir()
    (tmp_path / 'mmcv' / '__init__.py').write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    pillow, operators, triton = doctor.probe_all(['Pillow', 'operators of mmcv', 'triton'])
    assert (pillow.topic, pillow.name, pillow.status) == ('trap', 'Pillow', 'ok')
    assert (operators.name, operators.status, operators.text) == ('operators of mmcv', 'broken', text)
    assert triton.name == 'triton'
    assert triton.status != 'broken'
    (alone,) = doctor.probe_all(['operators of mmcv', 'Pillow'])  # the others need the first
    assert alone.text == text


def test_every_check_runs():
    shared = [name for names in probes.TOGETHER for name in names]
    assert set(shared) == {*probes.TRAPS, *probes.BACKENDS, *probes.CHECKS}
    assert sorted(shared) == sorted([*set(shared), 'torch alone'])  # which begins both


def doctor_of(path, *options, python=sys.executable):
    """Run the doctor with ``path`` first in PYTHONPATH, expect broken findings, and return its output."""
    environment = {'PATH': '/usr/bin:/bin', 'PYTHONPATH': f'{path}{os.pathsep}{ROOT}', 'OMP_NUM_THREADS': '1'}
    command = [python, '-m', 'swin_dense', 'doctor', *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    assert not done.stderr
    return done.stdout


def broken(report):
    """Return the broken findings of a JSON report by name."""
    return {finding['name']: finding for finding in json.loads(report) if finding['status'] == 'broken'}


def shadow(folder, **sources):
    """Write packages with the given source code to ``folder``, and hide the frameworks that are not among them."""
    for package, source in sources.items():
        (folder / package).mkdir(parents=True)
        (folder / package / '__init__.py').write_text(source)
    hidden = {'mmdet', 'mmseg', 'mmcv', 'mmengine'} - set(sources)
    (folder / 'sitecustomize.py').write_text(f'import sys\nsys.modules.update(dict.fromkeys({hidden}))\n')
    return folder


@pytest.mark.parametrize(
    ('package', 'error', 'cure'),
    [
        ('torch', 'OSError("libcudart.so.12: cannot open shared object file")', 'pytorch.org'),
        ('torch', 'RuntimeError("two\\nlines")', 'pytorch.org'),
        ('numpy', 'ImportError("Importing the numpy C-extensions failed")', '--no-deps numpy'),
    ],
)
def test_a_required_package_that_cannot_be_imported(tmp_path, package, error, cure):
    path = shadow(tmp_path / 'with space', **{package: f'raise {error}'})
    (finding,) = broken(doctor_of(path, '--json')).values()
    assert finding['text'].startswith(error.partition('(')[0])
    assert cure in finding['cure']
    assert doctor_of(path).endswith(f'1 broken. Suggested fixes:\n  {finding["cure"]}\n')
    command = [sys.executable, '-m', 'swin_dense', 'flops', '--arch', 't']
    environment = {'PYTHONPATH': f'{path}{os.pathsep}{ROOT}'}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert f'error: swin_dense needs {package}, which cannot be imported' in done.stderr
    assert done.stderr.endswith('run `swin-dense doctor` for details\n')


def test_an_empty_environment(tmp_path):
    subprocess.run([sys.executable, '-m', 'venv', '--without-pip', tmp_path / 'empty'], check=True)
    found = broken(doctor_of(tmp_path, '--json', python=tmp_path / 'empty' / 'bin' / 'python'))
    assert {name: finding['cure'] for name, finding in found.items()} == {'torch alone': 'pip install torch'}


@pytest.mark.parametrize(('is_faster', 'used'), [(True, 'oneDNN'), (False, "torch's own choice")])
def test_the_library_of_linear_layers_is_reported_and_timed(monkeypatch, is_faster, used):
    pytest.importorskip('torch')
    monkeypatch.setattr(probes, 'ROUNDS', 2)
    monkeypatch.setattr('swin_dense.ops.linear.IS_FASTER_BY_ONEDNN', is_faster)
    assert probes.linear_layers() == f'{used}, in float32 on this CPU'
    timed = probes.linear_layers_timed()
    assert re.fullmatch(r"oneDNN takes \d+\.\d\d of the time of torch's own choice|not timed: .* has no oneDNN", timed)


def test_exit_status_and_report(monkeypatch, capsys):
    findings = [Finding('version', 'torch', 'ok', '2.13'), Finding('trap', 'torchvision', 'note', 'not installed')]
    calls = []
    monkeypatch.setattr('swin_dense.commands.doctor.examine', lambda times: calls.append(times) or findings)
    assert main(['doctor', '--time']) == 0
    assert capsys.readouterr().out.endswith('Nothing is broken.\n')
    findings.append(Finding('check', 'mmdet', 'broken', 'an error', 'pip install x'))
    assert main(['doctor']) == 1
    printed = capsys.readouterr().out
    assert printed.endswith('1 broken. Suggested fixes:\n  pip install x\n')
    assert '-> pip install x' in printed
    assert calls == [True, False]


def test_findings_are_printed_as_they_are_found(monkeypatch, capsys):
    printed = []

    def examine(times):
        yield Finding('version', 'torch', 'ok', '2.13')
        printed.append(capsys.readouterr().out)
        yield Finding('version', 'numpy', 'ok', '2.3')
        yield Finding('trap', 'resume', 'ok', 'works')
        printed.append(capsys.readouterr().out)

    monkeypatch.setattr('swin_dense.commands.doctor.examine', examine)
    assert main(['doctor']) == 0
    assert [line.split() for line in printed[0].splitlines()] == [['Versions'], ['ok', 'torch', '2.13']]
    assert printed[1].splitlines()[1:3] == ['', 'Known problems']
    assert capsys.readouterr().out == '\nNothing is broken.\n'


def test_versions_are_known_before_any_check_has_run(monkeypatch):
    monkeypatch.setattr(doctor, 'probe', None)
    findings = doctor.examine()
    assert [next(findings).name for _ in range(2)] == ['python', 'torch']

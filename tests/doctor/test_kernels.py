"""The check of the kernels on a stand-in for a GPU, and the verdict that it stores."""

import json
import os
import subprocess
import sys

import pytest
import torch

from swin_dense.doctor import kernels
from swin_dense.ops.triton import verdicts
from swin_dense.ops.triton.verdicts import Entry
from tests.conftest import ROOT
from tests.ops import stand_in
from tests.ops.devices import needs_interpreter

ATTENTION = stand_in.ATTENTION['agrees'].name
FAST = {mode: {'triton': 50.0, 'sdpa': 100.0, 'plain': 200.0} for mode in ('inference', 'training')}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    return tmp_path


@pytest.fixture
def on_stand_in(cache, monkeypatch):
    """Replace the GPU by the stand-in, in this process and in those that it starts."""
    monkeypatch.setenv('PYTHONPATH', f'{stand_in.FOLDER}{os.pathsep}{ROOT}')
    monkeypatch.setenv('STAND_IN', '1')
    stand_in.pretend(monkeypatch.setattr)


def checked(monkeypatch):
    """Replace the check by one that finds no error; return a list of its calls."""
    calls = []

    def check(device):
        calls.append(device)
        return {ATTENTION: Entry(None, (), FAST)}

    monkeypatch.setattr(kernels, '_devices', lambda: [kernels.Device('cpu', None, stand_in.KEY, 0)])
    monkeypatch.setattr(kernels, 'check', check)
    return calls


EXPECTED = {
    'agrees': (
        'ok',
        'agrees with torch; 2.00 times as fast as sdpa in inference, 2.00 times as fast as sdpa in training',
    ),
    'is slow': (
        'note',
        'agrees with torch; 0.67 times as fast as sdpa in inference, 0.67 times as fast as sdpa in training: '
        'not used in inference and training',
    ),
    'disagrees': ('broken', 'on 16 channels of 3 x 5 tokens the output is off by'),
    'hangs': ('broken', f'did not answer within {stand_in.PATIENCE} seconds'),
    'crashes': ('broken', 'ended with SIGSEGV (CUDA error: an illegal memory access was encountered)'),
    'needs too much memory': (
        'broken',
        'not enough memory: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.',
    ),
    'does not compile': ('broken', 'it raised an error: RuntimeError: out of registers'),
}


@needs_interpreter
@pytest.mark.slow
@pytest.mark.long
def test_the_behaviour_of_each_kernel_is_reported_and_stored(on_stand_in):
    """A kernel that fails, hangs or crashes in its process does not prevent the check of the others."""
    command = [sys.executable, '-m', 'swin_dense', 'doctor', '--json']
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1, done.stderr
    assert 'checking 9 Triton kernels on Stand-In 100, once' in done.stderr
    found = {finding['name']: finding for finding in json.loads(done.stdout) if finding['topic'] == 'kernel'}
    entries = verdicts.read(stand_in.KEY)
    for what, case in stand_in.ATTENTION.items():
        status, text = EXPECTED[what]
        assert (found[case.name]['status'], found[case.name]['text'][: len(text)]) == (status, text)
        assert '\n' not in found[case.name]['text']
        assert ('--again' in found[case.name]['cure']) == (entries[case.name].error is not None) == (status == 'broken')
        assert ('free GPU memory' in found[case.name]['cure']) == (what == 'needs too much memory')
    assert found[stand_in.NORM.name]['status'] == found[stand_in.BIAS.name]['status'] == 'ok'
    assert list(entries[stand_in.NORM.name].channels) == [16]
    assert found['cpu']['text'].startswith('Stand-In 100, driver 550.54; the verdict is stored in ')


def test_a_stored_verdict_is_reused(cache, monkeypatch):
    calls = checked(monkeypatch)
    for _ in range(2):
        findings = kernels.examine()
        kernels.ensure_verdict()
    assert len(calls) == 1
    assert str(verdicts.path(stand_in.KEY)) in findings[0].text
    kernels.examine(again=True)
    assert len(calls) == 2


def test_a_verdict_of_another_version_is_ignored(cache, monkeypatch):
    calls = checked(monkeypatch)
    kernels.ensure_verdict()
    for name in stand_in.KEY:
        other = {**stand_in.KEY, name: 'another'}
        assert verdicts.read(other) is None
        monkeypatch.setattr(kernels, '_devices', lambda key=other: [kernels.Device('cpu', None, key, 0)])
        kernels.ensure_verdict()
    assert len(calls) == 1 + len(stand_in.KEY)
    assert len(list(verdicts.path(stand_in.KEY).parent.iterdir())) == len(calls)  # each verdict has a file of its own


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch, caplog):
    (tmp_path / 'file').touch()
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'file'))
    calls = checked(monkeypatch)
    kernels.ensure_verdict()
    (warning,) = [record.getMessage() for record in caplog.records]
    assert 'the verdict on the Triton kernels cannot be stored: ' in warning
    gpu, attention = kernels.examine()
    assert (gpu.status, attention.status) == ('note', 'ok')
    assert 'cannot be stored' in gpu.text
    assert 'XDG_CACHE_HOME' in gpu.cure
    assert len(calls) == 2
    assert verdicts.read(stand_in.KEY) is None


def test_without_a_home_folder_there_is_no_verdict(monkeypatch):
    monkeypatch.delenv('XDG_CACHE_HOME', raising=False)
    monkeypatch.setattr('pathlib.Path.home', lambda: (_ for _ in ()).throw(RuntimeError('no home')))
    assert verdicts.read(stand_in.KEY) is None
    assert kernels._keep(stand_in.KEY, {}) == 'the verdict on the Triton kernels cannot be stored: no home'


@pytest.mark.long
def test_two_processes_write_a_verdict_at_once(cache):
    """A reader sees a complete verdict of one process at any time."""
    code = """
        import sys
        from swin_dense.doctor import kernels
        from swin_dense.ops.triton.verdicts import Entry
        key, text = {'gpu': 'x'}, sys.argv[1] * 200000
        for _ in range(100):
            assert kernels._keep(key, {'kernel': Entry(text)}) is None
    """
    code = '\n'.join(line.strip() if 'assert' not in line else '    ' + line.strip() for line in code.splitlines())
    environment = {**os.environ, 'PYTHONPATH': str(ROOT)}
    writers = [subprocess.Popen([sys.executable, '-c', code, letter], env=environment) for letter in 'ab']
    seen = set()
    while any(writer.poll() is None for writer in writers):
        entries = verdicts.read({'gpu': 'x'})
        if entries is not None or seen:
            error = entries['kernel'].error
            assert len(error) == 200000
            assert len(set(error)) == 1
            seen.add(error[0])
    assert [writer.returncode for writer in writers] == [0, 0]
    assert seen == {'a', 'b'}
    assert [path.suffix for path in verdicts.path({'gpu': 'x'}).parent.iterdir()] == ['.json']


def test_without_a_gpu_no_process_is_started(monkeypatch):
    monkeypatch.setattr(torch.version, 'cuda', None)
    monkeypatch.setattr(kernels, '_Process', None)
    (finding,) = kernels.examine()
    assert (finding.status, finding.text) == ('note', 'not checked: torch sees no GPU')
    kernels.ensure_verdict()


def test_an_unsupported_gpu(cache, monkeypatch):
    reason = 'the kernels are for NVIDIA GPUs, but this torch is for AMD GPUs (ROCm)'
    monkeypatch.setattr(kernels, '_devices', lambda: [kernels.Device('cuda:0', reason, {}, 0)])
    (finding,) = kernels.examine()
    assert (finding.status, finding.text) == ('note', f'{reason}; torch is used instead (sdpa)')
    kernels.ensure_verdict()
    assert not list(cache.iterdir())


@pytest.mark.parametrize(
    'error', [OSError('no more processes'), RuntimeError('the process that queries the GPUs failed: ended with SIGBUS')]
)
def test_a_failed_check_does_not_stop_training(error, monkeypatch, caplog):
    def fail():
        raise error

    monkeypatch.setattr(kernels, '_devices', fail)
    kernels.ensure_verdict()
    assert caplog.text.count(str(error)) == 1
    (finding,) = kernels.examine()
    assert (finding.status, finding.text) == ('broken', str(error))


@needs_interpreter
def test_kernels_that_are_not_reached_in_time_have_failed(monkeypatch):
    monkeypatch.setattr(kernels, 'LIMIT', 0)
    entries = kernels.check(kernels.Device('cpu', None, stand_in.KEY, 0))
    assert {entry.error for entry in entries.values()} == {'it was not reached within 0 seconds'}

"""`make gpu` rehearsed on a CPU, where no GPU can try it: every step, and every step cut after its first row."""

import json
import sys

import pytest

from tests.conftest import ROOT, needs
from tests.processes import python

sys.path.insert(0, str(ROOT / 'benchmarks'))

import gpu_session

SCRIPT = str(ROOT / 'benchmarks' / 'gpu_session.py')


def rehearse(folder, *options):
    """Return the steps of a rehearsal, from all files that it has written."""
    python(SCRIPT, '--rehearse', '--json', 'session.json', *options, cwd=folder)
    steps = {}
    for path in sorted(folder.glob('*.json')):
        steps |= json.loads(path.read_text())['steps']
    return steps


@needs('mmdet')
@needs('mmseg')
@pytest.mark.long
def test_every_step_runs(tmp_path):
    steps = rehearse(tmp_path)
    assert list(steps) == list(gpu_session.STEPS)
    assert {name: step['status'] for name, step in steps.items()} == dict.fromkeys(steps, 'done')
    failed = [row for step in steps.values() for row in step['rows'] if 'failed' in row]
    assert [(row['model'], row['pure_bfloat16']) for row in failed] == [('mmdet', True)]  # which cannot run so
    assert [name for name, step in steps.items() if not step['rows']] == ['tests']  # whose rows are tests that fail
    assert 'tests collected' in ' '.join(steps['tests']['last_lines'])
    assert {row['model'] for row in steps['eager']['rows']} >= {'auto', 'sdpa', 'mmdet'}
    assert {row['framework'] for row in steps['whole']['rows']} == {'mmdet', 'mmseg'}


@needs('mmdet')
@needs('mmseg')
@pytest.mark.long
def test_a_step_that_is_killed_keeps_its_rows(tmp_path):
    names = [name for name in gpu_session.STEPS if name != 'tests']
    steps = rehearse(tmp_path, '--cut', '--steps', *names)
    assert {name: (step['status'], len(step['rows'])) for name, step in steps.items()} == dict.fromkeys(
        names, ('exit status -9', 1)
    )


def test_a_step_that_takes_too_long_is_cut(tmp_path):
    found = gpu_session.run_step(tmp_path / 'session.json', 'machine', 0.1, ['--rehearse'])
    assert (found['status'], found['stderr']) == ('cut', [])
    assert list(tmp_path.iterdir()) == []


def test_parts_fit_five_minutes(monkeypatch, tmp_path):
    """Steps that take all of their time leave the later ones less, and none runs beyond the end."""
    now = 0.0

    def run_step(path, name, limit, options):
        nonlocal now
        assert limit <= gpu_session.STEPS[name]
        now += limit
        return {'status': 'cut'}

    monkeypatch.setattr(gpu_session, 'run_step', run_step)
    monkeypatch.setattr(gpu_session.time, 'monotonic', lambda: now)
    monkeypatch.setattr(gpu_session.signal, 'signal', lambda *_: None)
    for part in gpu_session.PARTS.values():
        now = 0.0
        gpu_session.run_steps(tmp_path / 'session.json', list(part), [])
        assert now <= gpu_session.TOTAL < 300
        written = json.loads((tmp_path / 'session.json').read_text())
        assert set(written['steps']) == set(part)

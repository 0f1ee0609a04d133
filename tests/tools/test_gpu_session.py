"""`make gpu` rehearsed on a CPU, where no GPU can try it: every step, and every step cut after its first row."""

import sys

import pytest

from tests.conftest import ROOT, needs
from tests.processes import python

sys.path.insert(0, str(ROOT / 'benchmarks'))

import gpu_session
from measurements import COLUMNS, runs_in

SCRIPT = str(ROOT / 'benchmarks' / 'gpu_session.py')


def rehearse(folder, *options):
    """Return the runs of a rehearsal by their step, from all files that it has written."""
    python(SCRIPT, '--rehearse', '--json', 'session.json', *options, cwd=folder)
    runs = [run for path in sorted(folder.glob('*.json')) for run in runs_in(path)]
    return {run['settings']['step']: run for run in runs}


def measured(run):
    """Return the measurements of a run, as dicts."""
    return [dict(zip(COLUMNS, row, strict=True)) for row in run['rows']]


@needs('mmdet')
@needs('mmseg')
@pytest.mark.long
def test_every_step_runs(tmp_path):
    steps = rehearse(tmp_path)
    assert list(steps) == list(gpu_session.STEPS)
    assert {name: step['status'] for name, step in steps.items()} == dict.fromkeys(steps, 'done')
    failed = [key for step in steps.values() for key in step.get('failed', {})]
    assert failed == ['eager, bfloat16, inference, mmdet, 2 x 800 x 1344']  # which cannot run so
    assert [name for name, step in steps.items() if not step['rows']] == ['tests']  # which notes tests that fail
    assert 'tests collected' in ' '.join(steps['tests']['last_lines'])
    assert {row['model'] for row in measured(steps['eager'])} >= {'auto', 'sdpa', 'mmdet'}
    assert {row['way'] for row in measured(steps['whole'])} == {'Mask R-CNN', 'UPerNet'}


@needs('mmdet')
@needs('mmseg')
@pytest.mark.long
def test_a_step_that_is_killed_keeps_its_rows(tmp_path):
    names = [name for name in gpu_session.STEPS if name != 'tests']
    steps = rehearse(tmp_path, '--cut', '--steps', *names)
    assert {name: step['status'] for name, step in steps.items()} == dict.fromkeys(names, 'exit status -9')
    for step in steps.values():
        assert len({tuple(row[:4]) for row in step['rows']}) == 1  # of one thing, before its process was killed


def test_a_step_that_takes_too_long_is_cut(tmp_path):
    assert gpu_session.run_step(tmp_path / 'session.json', 'machine', 0.1, ['--rehearse']) == 'cut'
    assert list(tmp_path.iterdir()) == []


def test_parts_fit_five_minutes(monkeypatch, tmp_path):
    """Steps that take all of their time leave the later ones less, and none runs beyond the end."""
    now = 0.0
    ran = []

    def run_step(path, name, limit, options):
        nonlocal now
        assert limit <= gpu_session.STEPS[name]
        now += limit
        ran.append(name)
        return 'cut'

    monkeypatch.setattr(gpu_session, 'run_step', run_step)
    monkeypatch.setattr(gpu_session.time, 'monotonic', lambda: now)
    monkeypatch.setattr(gpu_session.signal, 'signal', lambda *_: None)
    for part in gpu_session.PARTS.values():
        now = 0.0
        gpu_session.run_steps(tmp_path / 'session.json', list(part), [])
        assert now <= gpu_session.TOTAL < 300
    assert 'machine' in ran
    assert 'whole' in ran

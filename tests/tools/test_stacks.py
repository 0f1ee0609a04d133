"""benchmarks/stacks.py records what failed, and its exit status says so."""

import json

import pytest

from benchmarks import stacks

PASSED = 'SKIPPED [2] tests/a.py:1: needs triton\n3 passed, 2 skipped in 1.00s\n'
FAILED = 'FAILED tests/a.py::test_b - assert 1 == 2\n1 failed, 2 passed in 1.00s\n'


def record(monkeypatch, tmp_path, *logs, parts='core'):
    """Record logs of pytest as the row 'mine', and return the results."""
    results = tmp_path / 'stacks.json'
    monkeypatch.setattr(stacks, 'RESULTS', results)
    names = [tmp_path / f'{number}.log' for number in range(len(logs))]
    for name, log in zip(names, logs, strict=True):
        name.write_text(log)
    monkeypatch.setattr('sys.argv', ['stacks.py', 'mine', '--parts', parts, '--log', *map(str, names)])
    try:
        stacks.main()
    finally:
        rows = json.loads(results.read_text())
        assert list(rows) == ['mine']
    return rows['mine']


def test_passed_tests_are_a_success(monkeypatch, tmp_path):
    core = record(monkeypatch, tmp_path, PASSED)['core']
    assert core == {'passed': 3, 'failed': 0, 'skipped': 2, 'failures': [], 'skips': {'needs triton': 2}}


def test_failed_tests_are_recorded_and_end_with_an_error(monkeypatch, tmp_path):
    with pytest.raises(SystemExit, match=r'mine failed: tests/a.py::test_b'):
        record(monkeypatch, tmp_path, FAILED)


def test_tests_that_pass_the_second_time_are_a_success(monkeypatch, tmp_path):
    row = record(monkeypatch, tmp_path, FAILED, PASSED)
    assert (row['core']['failed'], row['core']['again']['failed']) == (1, 0)


def test_a_training_that_failed_ends_with_an_error(monkeypatch, tmp_path):
    outcomes = {'mmdet': {'error': 'no loss'}, 'mmseg': {'steps': 10}}
    monkeypatch.setattr(stacks, 'in_a_process', outcomes.get)
    with pytest.raises(SystemExit, match=r'mine failed: mmdet$'):
        record(monkeypatch, tmp_path, PASSED, parts='training')


def test_a_run_of_tests_that_ended_early_is_no_result(monkeypatch):
    monkeypatch.setattr(stacks, 'CORE', ['tests/no_such_test.py'])
    with pytest.raises(SystemExit, match='pytest ended with status 4'):
        stacks.core_tests()

"""What fails with the originals fails as recorded, and works here; the rows of timm are in tests/peers."""

import copy
import json
import re
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

sys.path.insert(0, str(ROOT / 'benchmarks'))
sys.path.insert(0, str(ROOT / 'tools'))

import originals
import update_readme

# The others, of which some export or train, are left to `make test-all`.
QUICK = ('frozen_stages', 'bfloat16', 'other_window')
RECORDED = json.loads(originals.RESULTS.read_text())
ROWS = {name: row.of_peers for name, row in originals.ROWS.items()}


def check_row(name):
    """Run both sides of a row, and compare what comes out with the record, but for measured numbers."""
    found = originals.both_sides(name, Path(sys.executable))
    recorded = RECORDED[name]
    assert found['original']['failed'], originals.described(found)
    assert not found['ours']['failed'], originals.described(found)
    for side in ('original', 'ours'):
        assert masked(found[side]['gave']) == masked(recorded[side]['gave'])
    assert [found[key] for key in ('user', 'package', 'thread')] == [
        recorded[key] for key in ('user', 'package', 'thread')
    ]


def masked(text):
    return re.sub(r'by up to [\d.]+|in \d+ %', '', text)


@pytest.mark.slow
@pytest.mark.parametrize(
    'name',
    [
        pytest.param(name, marks=[] if name in QUICK else [pytest.mark.long])
        for name, of_peers in ROWS.items()
        if not of_peers
    ],
)
def test_the_original_fails_as_recorded_and_ours_works(name):
    check_row(name)


def test_every_row_is_recorded_and_translated():
    assert list(RECORDED) == list(ROWS) == list(update_readme.CHINESE_ROWS)


def test_an_original_that_fails_no_longer_is_not_called_a_failure(tmp_path, monkeypatch):
    report = copy.deepcopy(RECORDED['bfloat16'])
    report['original'].update(failed=False, gave='4 maps')
    assert 'NO LONGER FAILS (4 maps)' in originals.described(report)
    results = tmp_path / 'originals.json'
    results.write_text(json.dumps({'bfloat16': report}))
    monkeypatch.setattr(originals, 'RESULTS', results)
    with pytest.raises(ValueError, match='bfloat16 shows no failure of the original'):
        update_readme.originals_table()

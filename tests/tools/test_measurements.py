"""The results under benchmarks/: each row is complete, a new measurement replaces the old one, and pages show them."""

import json
import math
import re
import statistics
import sys

import pytest

from tests.conftest import ROOT

sys.path.insert(0, str(ROOT / 'benchmarks'))

from measurements import COLUMNS, NAMES, RESULTS, RUN_FIELDS, Run, read, runs_in

OTHERS = {'originals.json', 'real_data.json', 'stacks.json'}  # in forms of their own
FILES = sorted(path.name for path in RESULTS.glob('*.json') if path.name not in OTHERS)


@pytest.mark.parametrize('name', FILES)
def test_each_row_is_complete(name):
    runs = runs_in(RESULTS / name)
    assert runs
    seen = set()
    for run in runs:
        assert set(RUN_FIELDS) <= set(run), name
        assert run['device'] in ('cpu', 'cuda')
        assert run['command'] or run['note']  # where the numbers come from
        assert run['columns'] == list(COLUMNS)
        assert run['rows'] or run['settings'].get('step') == 'tests'  # whose outcome is a remark
    for one in read(name):
        assert all(isinstance(getattr(one, field), str) for field in (*NAMES, 'unit', 'machine', 'release', 'date'))
        assert one.what
        assert one.quantity
        assert one.unit
        assert math.isfinite(one.value)
        if one.spread is not None:
            least, largest = one.spread
            assert least <= one.value <= largest
        identity = (*one[: len(NAMES)], one.machine, json.dumps(one.run['settings'], sort_keys=True))
        assert identity not in seen, identity
        seen.add(identity)


def test_a_measurement_replaces_the_older_one_of_the_same_thing(tmp_path):
    path = tmp_path / 'found.json'
    names = {'what': 'inference', 'size': '1 x 2 x 3'}
    Run(path, step='tests').note(passed=3)
    for threads, models in ((1, ('auto', 'timm')), (2, ('auto',)), (2, ('auto',)), (1, ('auto',))):
        run = Run(path, threads=threads)
        for model in models:
            run.add([3.0, len(runs_in(path)) + 10.0, 4.0], 'time', 'ms', model=model, **names)
    remarks, *runs = runs_in(path)
    assert (remarks['passed'], remarks['rows']) == (3, [])
    assert [len(run['rows']) for run in runs] == [1, 1, 1]  # a run is gone with its last row
    found = [(run['settings']['threads'], dict(zip(COLUMNS, row, strict=True))) for run in runs for row in run['rows']]
    assert [(threads, row['model']) for threads, row in found] == [(1, 'timm'), (2, 'auto'), (1, 'auto')]
    assert found[-1][1] | {'what': 'inference'} == {
        'way': 'eager',
        'model': 'auto',
        'quantity': 'time',
        'unit': 'ms',
        'value': 4.0,
        'spread': [3.0, 13.0],
        'samples': [3.0, 13.0, 4.0],
        **names,
    }


def test_a_table_on_a_page_has_the_numbers_of_the_rows():
    """The first table of CPUs, cell by cell, from the file without the code that writes tables."""
    page = (ROOT / 'docs' / 'speed.md').read_text()
    block = re.search(r'<!-- speed -->\n(.*?)<!-- end -->', page, re.S)[1]
    titles, _, *lines = [[cell.strip() for cell in line.strip('|').split('|')] for line in block.splitlines()]
    known = {}
    for path in RESULTS.glob('*_alone.json'):
        for run in json.loads(path.read_text()):
            for row in run['rows']:
                what, _, model, size, quantity, _, value, _, samples = row
                assert samples is None or value == statistics.median(samples)
                known[f'{what}, {size}', run['machine'], model, quantity] = value
    assert len(lines) == 15
    for case, processor, ours, *ratios in lines:
        case = case.replace('\u00d7', ' x ')
        machine = processor if 'Intel' in processor else f'AMD EPYC, {processor}'
        assert f'{known[case, machine, "auto", "time"]:,.0f}' == ours
        for model, ratio in zip(titles[3:], ratios, strict=True):
            assert f'{known[case, machine, model, "time relative to ours"]:.2f}' == ratio

"""benchmarks/alone.py refuses models with different outputs, and records measurements from processes of their own."""

import sys

import pytest
import torch

from tests.conftest import ROOT

sys.path.insert(0, str(ROOT / 'benchmarks'))

import alone
import bench_host
import harness
from measurements import COLUMNS, runs_in

CASE = 'inference, 1 x 64 x 96'


def test_models_that_differ_are_not_timed():
    ours = [torch.randn(1, 4, 8, 8)]
    other = [ours[0] + 1e-6]
    assert 0 < alone.differences({'auto': ours, 'sdpa': other}, (32, 32), 7, 'eager')['sdpa'] < 1e-5
    other = [ours[0] + 1e-2]
    with pytest.raises(RuntimeError, match='sdpa differs from auto'):
        alone.differences({'auto': ours, 'sdpa': other}, (32, 32), 7, 'eager')
    assert alone.differences({'auto': ours, 'sdpa': other}, (32, 32), 7, 'bfloat16')['sdpa'] > 1e-3
    assert alone.differences({'auto': ours, 'timm': other}, (32, 32), 7, 'eager')['timm'] > 1e-3  # it rolls, then pads


def test_a_case_of_another_form_is_refused():
    with pytest.raises(SystemExit, match="'infer 64' is no case"):
        alone.parsed('infer 64')


def test_a_peak_begins_anew():
    large = torch.zeros(2**26)  # 256 MiB
    del large
    before = bench_host.reset_peak()
    assert bench_host.held_mib('VmHWM') - before < 100
    large = torch.zeros(2**26)
    assert large.sum() == 0
    del large
    assert bench_host.held_mib('VmHWM') - before > 250


def test_a_worker_imports_packages_of_another_tree(tmp_path):
    (tmp_path / 'swin_dense.py').write_text("NAME = 'another tree'\n")
    script = tmp_path / 'script.py'
    script.write_text('import json, swin_dense\nprint(json.dumps(swin_dense.NAME))\n')
    worker = harness.Worker(str(script), tree=tmp_path)
    assert worker.greeting == 'another tree'
    worker.close()


@pytest.mark.slow
def test_each_model_has_its_measurements(tmp_path):
    options = ['--cases', CASE, '--models', 'auto', 'reference', '--processes', '1', '--turns', '2', '--threads', '1']
    alone.main([*options, '--json', str(tmp_path / 'found.json')])
    (run,) = runs_in(tmp_path / 'found.json')
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in run['rows']]
    found = {(row['model'], row['quantity']): row['value'] for row in rows}
    quantities = {'time', 'time relative to ours', 'first call', 'peak memory', 'difference from ours'}
    for model in ('auto', 'reference'):
        assert {name for of, name in found if of == model} - {'FLOPs', 'parameters'} == quantities
        assert found[model, 'time'] > 0
        assert found[model, 'difference from ours'] < 1e-5
    assert found['auto', 'parameters'] == sum(
        parameter.numel() for parameter in alone.build_ours('swin_t', 7, 'auto').parameters()
    )

"""The benchmark tool runs, refuses models with different outputs, and computes its limits from the right formulas."""

import argparse
import json
import math
import sys

import pytest
import torch

from tests.conftest import ROOT
from tests.processes import python

sys.path.insert(0, str(ROOT / 'benchmarks'))

import bench_limits
import bench_models
import benchmark

from swin_dense import SwinBackbone


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize('mode', ['infer', 'train'])
def test_comparison_with_the_frameworks(tmp_path, mode):
    report, picture = tmp_path / 'report.json', tmp_path / 'report.png'
    options = f'--size 64 96 --mode {mode} --rounds 2 --threads 1 --ours auto reference+cp'.split()
    script = ROOT / 'benchmarks' / 'benchmark.py'
    done = python('-W', 'ignore', script, *options, '--json', report, '--plot', picture)
    data = json.loads(report.read_text())
    for name in ('auto', 'reference+cp', 'mmdet', 'mmseg'):
        row = data['rows'][name]
        assert 0 < row['p10_ms'] <= row['median_ms'] <= row['p90_ms']
        assert row['peak_mib'] > 0
        assert data['agreement'][name] < 1e-4
        assert len(data['seconds'][name]) == 2
        assert f'| {name} |' in done.stdout
    assert {'timm', 'transformers', 'torchvision'} <= {*data['absent'], *data['rows']}
    assert picture.stat().st_size > 0


def test_models_that_differ_are_not_timed():
    ours, other = (bench_models.build_ours('t', 7, 'auto') for _ in range(2))
    args = argparse.Namespace(
        dtype='float32',
        device='cpu',
        mode='infer',
        size=(32, 32),
        window=7,
    )
    img = torch.randn(1, 3, 32, 32)
    assert benchmark.check_outputs({'auto': ours, 'sdpa': other}, img, args)['sdpa'] < 1e-5
    torch.nn.init.normal_(other.norm0.weight)
    with pytest.raises(RuntimeError, match='sdpa differs from auto'):
        benchmark.check_outputs({'auto': ours, 'sdpa': other}, img, args)


def test_matrix_products_equal_those_of_the_model():
    """Compare with the multiply-adds of the linear layers and convolutions that a forward pass calls."""
    backbone, counted = SwinBackbone('t').to('meta').eval(), []

    def count(module, inputs, output):
        weight = module.weight
        counted.append(weight.numel() * output.numel() // len(weight))

    def count_projection(module, inputs, output):
        counted.append(module.qkv.weight.numel() * inputs[0].numel() // module.qkv.in_features)

    for name, module in backbone.named_modules():
        if name.endswith('.w_msa'):  # with a hook on the projection itself, it would project padding tokens too
            module.register_forward_hook(count_projection)
        elif isinstance(module, (torch.nn.Linear, torch.nn.Conv2d)) and not name.endswith('.qkv'):
            module.register_forward_hook(count)
    backbone(torch.empty(2, 3, 199, 301, device='meta'))
    products = bench_limits._products(backbone, (199, 301), 2)
    assert sum(math.prod(product) for product in products) == sum(counted)


def test_roofline_has_the_published_number_of_flops(monkeypatch):
    monkeypatch.setattr(bench_limits, '_peak', lambda *_: 1e12)
    monkeypatch.setattr(bench_limits, '_bandwidth', lambda *_: 1e30)
    limit = bench_limits.roofline(
        SwinBackbone('t'),
        (800, 1344),
        1,
        'infer',
        torch.float32,
        'cpu',
    )
    # Two FLOPs per multiply-add; the patch embedding is not counted.
    assert limit['gflops_of_pass'] == pytest.approx(192.8, rel=0.01)
    assert limit['seconds'] == pytest.approx(limit['gflops_of_pass'] / 1000)

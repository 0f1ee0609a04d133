"""The benchmark tool runs, refuses models with different outputs, and computes its limits from the right formulas."""

import argparse
import sys

import pytest
import torch

from tests.conftest import ROOT

sys.path.insert(0, str(ROOT / 'benchmarks'))

import bench_limits
import bench_models
import benchmark

from swin_dense import SwinBackbone


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

"""The memory counts of docs/speed.md against counts by hand, their order, and the page's table."""

import json
import sys

import pytest
import torch
from torch import nn

from tests.conftest import ROOT

sys.path.insert(0, str(ROOT / 'benchmarks'))

import memory_ladder


class Squares(nn.Module):
    """Three layers without a bias, each keeping its input for the backward pass."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, img):
        for layer in self.layers:
            img = layer(img)
        return (img,)


def test_the_peak_by_hand():
    counter = memory_ladder.PeakCounter()
    memory_ladder.train_once(Squares().to('meta'), torch.empty(1, 3, 32, 8, device='meta'), torch.float32, counter)
    map_, weight = 4 * 3 * 32 * 8, 4 * 8 * 8
    # At the second layer of the backward pass: the output of the first layer, the last output and its gradient, which
    # the caller holds, the gradients of the second and of the first output, and those of the last two weights.
    assert counter.peak == 5 * map_ + 2 * weight


@pytest.mark.slow
def test_checkpointed_activations_are_not_kept():
    settings = {'batch': 1, 'dtype': 'float32', 'with_cp': False, 'frozen_stages': -1}
    kept, recomputed = (
        memory_ladder.count_rung({**settings, 'with_cp': stages}, 't', (64, 64))
        for stages in (False, memory_ladder.ALL_STAGES)
    )
    assert recomputed['kept'] < 0.5 * kept['kept']
    assert recomputed['flops'] > kept['flops']


@pytest.mark.parametrize('groups', [1, 4])
def test_the_flops_of_a_convolution_by_hand(groups):
    """Each gradient takes as many as the output, also that of a depthwise convolution's weights."""
    counter, model = memory_ladder.PeakCounter(), nn.Conv2d(4, 8, 3, padding=1, groups=groups, device='meta')
    model.forward = lambda img: (nn.Conv2d.forward(model, img),)
    img = torch.empty(2, 4, 5, 7, device='meta', requires_grad=True)
    memory_ladder.train_once(model, img, torch.float32, counter)
    assert counter.flops == 3 * 2 * (2 * 8 * 5 * 7) * (4 // groups * 3 * 3)


def test_no_rung_needs_more_memory_than_the_one_before():
    rungs = json.loads((ROOT / 'benchmarks' / 'memory_ladder.json').read_text())['rungs']
    assert [rung['name'] for rung in rungs] == [name for name, _ in memory_ladder.RUNGS]
    totals = [rung['total'] for rung in rungs]
    assert totals == sorted(totals, reverse=True)


def test_the_page_shows_the_counts():
    report = json.loads((ROOT / 'benchmarks' / 'memory_ladder.json').read_text())
    assert '\n'.join(memory_ladder.table(report['rungs'])) in (ROOT / 'docs' / 'speed.md').read_text()

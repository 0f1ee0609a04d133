"""Compare the costs in ``benchmarks/operator_costs.py`` with the launches of the operators."""

import collections
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from swin_dense.ops.triton import attention, bias, norm
from tests.conftest import ROOT
from tests.ops.devices import needs_interpreter

sys.path.insert(0, str(ROOT / 'benchmarks'))

from operator_costs import COSTS

pytestmark = needs_interpreter


class Launches(TorchDispatchMode):
    """Count torch's own kernels; allocations and views launch none."""

    def __init__(self):
        super().__init__()
        self.names = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not (func.is_view or 'empty' in str(func)):
            self.names[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def launched(monkeypatch):
    """Count launches of Triton kernels by name instead of running them, because the interpreter itself uses torch."""
    from triton.runtime.interpreter import InterpretedFunction

    names = collections.Counter()

    def count(kernel, grid):
        names[kernel.fn.__name__] += 1
        return lambda *tensors, **arguments: None

    monkeypatch.setattr(InterpretedFunction, '__getitem__', count)
    return names


def attention_calls(window, strided):
    tokens = window[0] * window[1]
    qkv, expanded, pad_kv = torch.randn(1, 8, 9, 96), torch.randn(2, tokens, tokens), torch.randn(64)
    if strided:
        expanded = expanded.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    geometry = (2, list(window), [3, 3], 0.25)
    out, lse = attention._forward(qkv, expanded, pad_kv, *geometry)
    grad = torch.randn_like(out)
    yield attention._forward, (qkv, expanded, pad_kv, *geometry)
    yield attention._backward, (grad, qkv, expanded, pad_kv, out, lse, *geometry)
    yield attention._backward, (grad.mT.contiguous().mT, qkv, expanded, pad_kv, out, lse, *geometry)


def bias_calls():
    yield bias._forward, (torch.randn(15, 2), [2, 3])
    yield bias._forward, (torch.randn(2, 15).mT, [2, 3])
    yield bias._backward, (torch.randn(2, 6, 6), [2, 3])


def norm_calls():
    x, weight, offset = torch.randn(2, 5, 4, 16), torch.randn(16), torch.randn(16)
    yield norm.layer_norm, (x, weight, offset, 1e-5, torch.bfloat16)
    yield norm.layer_norm, (x.mT.contiguous().mT, weight, offset, 1e-5, torch.bfloat16)
    yield norm._backward, (torch.randn_like(x), x, weight, 1e-5)


CALLS = {
    'window 7': lambda: attention_calls((7, 7), strided=False),
    'window 7, gathered bias': lambda: attention_calls((7, 7), strided=True),
    'window 9': lambda: attention_calls((9, 9), strided=False),
    'window 9, gathered bias': lambda: attention_calls((9, 9), strided=True),
    'bias': bias_calls,
    'norm': norm_calls,
}


@pytest.mark.parametrize('name', CALLS)
def test_costs_count_the_launches_of_the_operators(name, launched):
    for operator, args in CALLS[name]():
        launched.clear()
        with Launches() as torch_launches:
            operator._init_fn(*args)
        cost = COSTS[operator._qualname](*args)
        assert cost.launches == launched.total() + torch_launches.names.total(), (launched, torch_launches.names)


def test_bytes_of_attention_by_hand():
    """One image of 2 x 3 windows of 49 tokens, 2 heads of 16, float32."""
    qkv, expanded, pad_kv = torch.empty(1, 14, 21, 96), torch.empty(2, 49, 49), torch.empty(64)
    geometry = (2, [7, 7], [3, 3], 0.25)
    cost = COSTS['swin_dense::triton_window_attention'](qkv, expanded, pad_kv, *geometry)
    tokens = 14 * 21
    assert cost.bytes == 4 * (tokens * 96 + 2 * 49 * 49 + 64 + tokens * 32 + 6 * 2 * 49)
    assert cost.flops == 2 * 2 * 6 * 2 * 49 * 49 * 16


def test_every_operator_of_the_gpu_path_has_costs():
    ours = {name for name in dir(torch.ops.swin_dense) if name.startswith(('triton', 'layer_norm', 'relative'))}
    assert {name.split('::')[1] for name in COSTS} == ours
    assert len(ours) == 6

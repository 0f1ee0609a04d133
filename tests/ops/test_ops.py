"""Compare every backend with tests/textbook.py: outputs, gradients, precision, caches, threads and dispatch."""

import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from swin_dense.ops import context, sdpa, window_attention
from swin_dense.ops.windows import WindowSpec, relative_position_bias
from tests import textbook
from tests.conftest import FLOAT16
from tests.derivatives import weighted_sum
from tests.ops.devices import as_on_a_gpu

HEADS = 2
ON_A_CPU = pytest.mark.parametrize('backend', ['sdpa', 'reference'])
# A GPU computes them in one call for all windows, or in one for each mask.
EVERYWHERE = pytest.mark.parametrize('backend', ['sdpa', 'sdpa on a GPU', 'reference'])


class Case(NamedTuple):
    """A map, a window and a shift, in tokens, and which biases there are."""

    size: tuple[int, int]
    window: tuple[int, int]
    shift: tuple[int, int]
    batch: int = 1
    has_table: bool = True
    has_bias: bool = True


SMALL = Case(
    (4, 4),
    (4, 4),
    (0, 0),
)
PADDED = Case(
    (9, 8),
    (3, 4),
    (1, 2),
    batch=2,
)


class Inputs(NamedTuple):
    """A map of any size, the weight and bias of the layer that projects its tokens, and a table of position bias."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    table: Tensor | None

    def project(self, tokens):
        return F.linear(tokens, self.weight, self.bias)


@st.composite
def cases(draw):
    sides = st.integers(2, 16)
    window = draw(sides), draw(sides)
    return Case(
        size=(draw(st.integers(1, 30)), draw(st.integers(1, 30))),
        window=window,
        shift=tuple(draw(st.integers(0, side - 1)) for side in window),
        batch=draw(st.integers(0, 3)),
        has_table=draw(st.booleans()),
        has_bias=draw(st.booleans()),
    )


def make_inputs(case, dtype=torch.float64, head_dim=16):
    channels = HEADS * head_dim
    offsets = (2 * case.window[0] - 1) * (2 * case.window[1] - 1)
    generator = torch.Generator().manual_seed(0)

    def draw(*shape, scale=1.0):
        values = torch.randn(*shape, dtype=torch.float64, generator=generator)
        return (scale * values).to(dtype).requires_grad_()

    inputs = Inputs(
        draw(case.batch, *case.size, channels),
        draw(3 * channels, channels, scale=channels**-0.5),
        draw(3 * channels) if case.has_bias else None,
        draw(offsets, HEADS) if case.has_table else None,
    )
    return inputs, WindowSpec(HEADS, case.window, case.shift, head_dim**-0.5)


def attend(inputs, spec, backend, attn_drop=None):
    """Run window attention by a backend, with padding tokens of zero, or by tests/textbook.py."""
    x = inputs.x
    height, width, channels = x.shape[1:]
    if backend == 'textbook':
        # A padding token is zero, so its keys and values are the bias of the layer.
        pad_kv = None if inputs.bias is None else inputs.bias[channels:]
        bias = None if inputs.table is None else relative_position_bias(inputs.table, spec.window)
        return textbook.window_attention(inputs.project(x), bias, pad_kv, spec)
    below = -height % spec.window[0]
    right = -width % spec.window[1]
    x = F.pad(x, (0, 0, 0, right, 0, below))
    attn_drop = attn_drop or nn.Dropout(0.0)
    with as_on_a_gpu() if backend == 'sdpa on a GPU' else contextlib.nullcontext():
        out = window_attention(x, inputs.project, inputs.table, spec, attn_drop, backend.removesuffix(' on a GPU'))
    return out[:, :height, :width]


def run(inputs, spec, backend):
    """Return the output and the gradients of all inputs."""
    out = attend(inputs, spec, backend)
    wanted = [tensor for tensor in inputs if tensor is not None]
    gradients = torch.autograd.grad(
        weighted_sum([out]),
        wanted,
        allow_unused=True,
        materialize_grads=True,
    )
    return [out.detach(), *gradients]


def assert_like_the_textbook(inputs, spec, backend):
    expected = run(inputs, spec, 'textbook')
    torch.testing.assert_close(run(inputs, spec, backend), expected, rtol=1e-9, atol=1e-11)
    with torch.no_grad():
        alone = attend(inputs, spec, backend)
    torch.testing.assert_close(alone, expected[0], rtol=1e-9, atol=1e-11)


@EVERYWHERE
@settings(max_examples=40, deadline=None)
@given(case=cases())
@example(case=Case((1, 1), (2, 2), (0, 1), has_bias=False))  # the only window of the map has a mask
def test_outputs_and_gradients_equal_the_textbooks(backend, case):
    assert_like_the_textbook(*make_inputs(case, head_dim=4), backend)


@ON_A_CPU
def test_gradients_of_gradients(backend):
    inputs, spec = make_inputs(Case((4, 3), (3, 2), (1, 1)), head_dim=2)

    def function(*inputs):
        return attend(Inputs(*inputs), spec, backend)

    inputs = tuple(inputs)
    assert torch.autograd.gradcheck(function, inputs, fast_mode=True, check_batched_grad=True, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True, check_batched_grad=True)


@pytest.mark.parametrize(
    ('dtype', 'is_amd', 'trains_bias', 'dropout', 'parts'),
    [
        (torch.float32, False, False, 0.0, '_attend_by_groups'),
        (torch.float32, True, False, 0.0, '_attend_by_groups'),
        (torch.bfloat16, False, False, 0.0, '_attend_by_groups'),
        (torch.bfloat16, True, False, 0.0, '_attend_by_products'),
        (torch.float32, False, True, 0.0, '_attend_by_products'),
        (torch.float32, False, False, 0.3, '_attend_by_products'),
    ],
)
def test_torchs_attention_is_called_where_it_is_not_slow(monkeypatch, dtype, is_amd, trains_bias, dropout, parts):
    called = []

    def record(name):
        original = getattr(sdpa, name)
        monkeypatch.setattr(sdpa, name, lambda *args: called.append(name) or original(*args))

    record('_attend_by_groups')
    record('_attend_by_products')
    monkeypatch.setattr(sdpa, 'IS_FASTER_BY_ONEDNN', is_amd)
    inputs, spec = make_inputs(PADDED, dtype)
    inputs.table.requires_grad_(trains_bias)
    attend(inputs, spec, 'sdpa', nn.Dropout(dropout))
    assert called == [parts]


@pytest.mark.parametrize('rate', [0.0, 0.3])
def test_a_reentrant_checkpoint_on_a_gpu_computes_the_same_twice(rate):
    """It computes a map without gradients, where all windows are one call, and again with them."""
    inputs, spec = make_inputs(Case((20, 23), (7, 7), (3, 3), batch=2), torch.float32)
    outs = []
    for has_gradients in (False, True):
        torch.manual_seed(0)
        with torch.set_grad_enabled(has_gradients):
            outs.append(attend(inputs, spec, 'sdpa on a GPU', nn.Dropout(rate)).detach())
    torch.testing.assert_close(*outs)


def test_what_a_compiler_would_compute_for_each_pair_is_stored(monkeypatch):
    stored = mock.Mock(wraps=sdpa._opaque_copy)
    monkeypatch.setattr(sdpa, '_opaque_copy', stored)
    monkeypatch.setattr(context, 'is_tracing', lambda: True)
    inputs, spec = make_inputs(PADDED)
    torch.testing.assert_close(run(inputs, spec, 'sdpa'), run(inputs, spec, 'textbook'))
    assert stored.call_count == 2  # the position bias and the regions


@EVERYWHERE
@pytest.mark.parametrize('wanted', range(4))
def test_a_single_gradient(backend, wanted):
    inputs, spec = make_inputs(PADDED)
    for index, tensor in enumerate(inputs):
        tensor.requires_grad_(index == wanted)
    grads = []
    for name in (backend, 'textbook'):
        loss = attend(inputs, spec, name).square().sum()
        grads.append(torch.autograd.grad(loss, inputs[wanted]))
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize('is_amd', [False, True])
@pytest.mark.parametrize('dtype', [torch.bfloat16, FLOAT16])
def test_low_precision_errs_at_most_twice_as_much_as_plain_torch(monkeypatch, dtype, is_amd):
    monkeypatch.setattr(sdpa, 'IS_FASTER_BY_ONEDNN', is_amd)
    inputs, spec = make_inputs(Case((20, 23), (7, 7), (3, 3), batch=2), dtype)
    exact = Inputs(*(tensor.detach().double().requires_grad_() for tensor in inputs))
    found = run(inputs, spec, 'sdpa')
    plain = run(inputs, spec, 'textbook')
    for ours, theirs, truth in zip(found, plain, run(exact, spec, 'textbook'), strict=True):
        allowed = 2 * (theirs.double() - truth).abs().max()
        assert (ours.double() - truth).abs().max() <= allowed


@ON_A_CPU
def test_threads_with_different_sizes_get_right_answers(backend):
    sizes = [(9 + i, 20 - i) for i in range(8)]
    cases = [make_inputs(Case(size, (4, 4), (2, 2)), torch.float32) for size in sizes]
    expected = [attend(*case, 'textbook').detach() for case in cases]
    sdpa._plans.clear()

    @torch.no_grad()
    def count_wrong(start):
        wrong = 0
        for index in range(start, start + 40):
            out = attend(*cases[index % 8], backend)
            wrong += not torch.allclose(out, expected[index % 8], atol=1e-5)
        return wrong

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(count_wrong, range(4))) == [0] * 4


@EVERYWHERE
def test_inference_mode_first_and_training_later(backend):
    inputs, spec = make_inputs(
        Case(
            (11, 13),
            (5, 5),
            (2, 2),
        )
    )
    sdpa._plans.clear()
    with torch.inference_mode():
        attend(inputs, spec, backend)
    run(inputs, spec, backend)


def assert_dropout_keeps_the_mean(outs, expected, rounding=0.0):
    assert not torch.equal(outs[0], outs[1])
    atol = rounding + float(5 * outs.std(0).max() / len(outs) ** 0.5)
    torch.testing.assert_close(outs.mean(0), expected, rtol=0, atol=atol)


def test_dropout_in_bfloat16_on_amd_processors(monkeypatch):
    monkeypatch.setattr(sdpa, 'IS_FASTER_BY_ONEDNN', True)
    inputs, spec = make_inputs(SMALL, torch.bfloat16)
    expected = attend(inputs, spec, 'textbook').detach().float()
    dropout = nn.Dropout(0.3)
    with torch.no_grad():
        outs = torch.stack([attend(inputs, spec, 'sdpa', dropout).float() for _ in range(2000)])
    rounding = 2**-7 * float(expected.abs().max())
    assert_dropout_keeps_the_mean(outs, expected, rounding)


@EVERYWHERE
@pytest.mark.parametrize('with_gradients', [False, True])
def test_dropout_keeps_the_mean_in_training_only(backend, with_gradients):
    inputs, spec = make_inputs(SMALL)
    expected = attend(inputs, spec, 'textbook').detach()
    dropout = nn.Dropout(0.3)
    with torch.set_grad_enabled(with_gradients):
        outs = torch.stack([attend(inputs, spec, backend, dropout).detach() for _ in range(2000)])
        in_evaluation = attend(inputs, spec, backend, dropout.eval())
    torch.testing.assert_close(in_evaluation.detach(), expected)
    assert_dropout_keeps_the_mean(outs, expected)


@ON_A_CPU
def test_a_hook_on_dropout_sees_the_weights_and_its_result_is_used(backend):
    inputs, spec = make_inputs(PADDED)
    expected, seen = attend(inputs, spec, 'textbook'), []
    dropout = nn.Dropout(0.0)
    dropout.register_forward_hook(lambda module, args, out: seen.append(out) or 2 * out)
    torch.testing.assert_close(attend(inputs, spec, backend, dropout), 2 * expected)
    (weights,) = seen
    assert weights.shape == (2 * 3 * 2, HEADS, 12, 12)
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))


class Half(nn.Module):
    def forward(self, weights):
        return weights / 2


class HalfDropout(nn.Dropout):
    def forward(self, weights):
        return weights / 2


@ON_A_CPU
@pytest.mark.parametrize('kind', [Half, HalfDropout])
def test_another_module_in_place_of_dropout_is_called(backend, kind):
    inputs, spec = make_inputs(PADDED)
    found = attend(inputs, spec, backend, kind())
    torch.testing.assert_close(found, attend(inputs, spec, 'textbook') / 2)


def test_an_unknown_backend():
    inputs, spec = make_inputs(PADDED)
    with pytest.raises(ValueError, match=r"backend must be .*, triton, got 'bmm'"):
        attend(inputs, spec, 'bmm')

"""Compare every backend with tests/textbook.py: outputs, gradients, precision, caches, threads and dispatch."""

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from swin_dense import SwinBackbone
from swin_dense.ops import BACKENDS, gathered, window_attention
from swin_dense.ops.windows import WindowSpec
from tests import textbook
from tests.conftest import FLOAT16

SIDES = st.integers(1, 30)
HEADS = 2
ON_A_CPU = pytest.mark.parametrize('backend', ['sdpa', 'reference'])


class Inputs(NamedTuple):
    """A map of any size, the weight and bias of the layer that projects its tokens, and a relative bias."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    relative_bias: Tensor | None

    def project(self, tokens):
        return F.linear(tokens, self.weight, self.bias)


@st.composite
def cases(draw):
    window = (draw(st.integers(2, 16)), draw(st.integers(2, 16)))
    shift = tuple(draw(st.integers(0, side - 1)) for side in window)
    return draw(st.integers(0, 3)), draw(SIDES), draw(SIDES), window, shift, draw(st.booleans()), draw(st.booleans())


def make_inputs(case, dtype, head_dim=16):
    batch, height, width, window, shift, with_relative_bias, with_bias = case
    channels, tokens = HEADS * head_dim, window[0] * window[1]
    generator = torch.Generator().manual_seed(0)

    def draw(*shape, scale=1.0):
        values = torch.randn(*shape, dtype=torch.float64, generator=generator)
        return (scale * values).to(dtype).requires_grad_()

    inputs = Inputs(
        draw(batch, height, width, channels),
        draw(3 * channels, channels, scale=channels**-0.5),
        draw(3 * channels) if with_bias else None,
        draw(HEADS, tokens, tokens) if with_relative_bias else None,
    )
    return inputs, WindowSpec(HEADS, window, shift, head_dim**-0.5)


def attend(inputs, spec, backend, attn_drop=None):
    """Run window attention by a backend, with padding tokens of zero, or by tests/textbook.py."""
    x = inputs.x
    height, width, channels = x.shape[1:]
    if backend == 'textbook':
        # A padding token is zero, so its keys and values are the bias of the layer.
        pad_kv = None if inputs.bias is None else inputs.bias[channels:]
        return textbook.window_attention(inputs.project(x), inputs.relative_bias, pad_kv, spec)
    x = F.pad(x, (0, 0, 0, -width % spec.window[1], 0, -height % spec.window[0]))
    attn_drop = attn_drop or nn.Dropout(0.0)
    out = window_attention(x, inputs.project, inputs.relative_bias, spec, attn_drop, backend)
    return out[:, :height, :width]


def run(inputs, spec, backend):
    """Return the output and the gradients of all inputs."""
    out = attend(inputs, spec, backend)
    wanted = [tensor for tensor in inputs if tensor is not None]
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out.dtype)
    gradients = torch.autograd.grad((out * weights).sum(), wanted, allow_unused=True, materialize_grads=True)
    return [out.detach(), *gradients]


def assert_like_the_textbook(inputs, spec, backend):
    torch.testing.assert_close(run(inputs, spec, backend), run(inputs, spec, 'textbook'), rtol=1e-9, atol=1e-11)


@ON_A_CPU
@settings(max_examples=40, deadline=None)
@given(case=cases())
def test_outputs_and_gradients_equal_the_textbooks(backend, case):
    assert_like_the_textbook(*make_inputs(case, torch.float64, head_dim=4), backend)


@ON_A_CPU
@settings(max_examples=20, deadline=None)
@given(case=cases())
def test_outputs_without_gradients_equal_the_textbooks(backend, case):
    inputs, spec = make_inputs(case, torch.float64, head_dim=4)
    with torch.no_grad():
        ours, expected = (attend(inputs, spec, name) for name in (backend, 'textbook'))
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-11)


def test_more_windows_than_a_kernel_takes(monkeypatch):
    sizes = []
    original = F.scaled_dot_product_attention

    def attend_and_record(q, *args, **options):
        sizes.append(len(q))
        return original(q, *args, **options)

    monkeypatch.setattr(gathered, 'MAX_WINDOWS', 5)
    monkeypatch.setattr(F, 'scaled_dot_product_attention', attend_and_record)
    q, k, v = torch.randn(3, 12, 2, 16, 4)
    mask = torch.randn(1, 2, 16, 16)
    ours = gathered._attend_to_parts(q, k, v, mask, dropout_p=0.0, scale=0.5)
    assert sizes == [5, 5, 2]
    torch.testing.assert_close(ours, original(q, k, v, mask, scale=0.5))


@ON_A_CPU
@pytest.mark.parametrize('case', [(1, 4, 3, (3, 2), (1, 1), True, True), (2, 2, 2, (2, 2), (0, 0), False, True)])
def test_gradcheck(backend, case):
    inputs, spec = make_inputs(case, torch.float64, head_dim=2)

    def function(x, weight, bias, relative_bias=None):
        return attend(Inputs(x, weight, bias, relative_bias), spec, backend)

    given = [tensor for tensor in inputs if tensor is not None]
    assert torch.autograd.gradcheck(function, given, check_batched_grad=True)


@ON_A_CPU
def test_gradients_of_gradients(backend):
    inputs, spec = make_inputs((1, 4, 3, (3, 2), (1, 1), True, True), torch.float64, head_dim=2)

    def function(*inputs):
        return attend(Inputs(*inputs), spec, backend)

    assert torch.autograd.gradgradcheck(function, tuple(inputs), fast_mode=True, check_batched_grad=True)


@ON_A_CPU
@pytest.mark.parametrize('wanted', range(4))
def test_a_single_gradient(backend, wanted):
    inputs, spec = make_inputs((2, 9, 8, (3, 4), (1, 2), True, True), torch.float64)
    grads = []
    for name in (backend, 'textbook'):
        alone = Inputs(*(tensor.detach().requires_grad_(index == wanted) for index, tensor in enumerate(inputs)))
        out = attend(alone, spec, name)
        grads.append(torch.autograd.grad(out.square().sum(), alone[wanted])[0])
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize('backend', ['auto', 'reference'])
def test_meta_tensors_give_a_shape(backend):
    inputs, spec = make_inputs((2, 9, 8, (3, 4), (1, 2), True, True), torch.float32)
    out = attend(Inputs(*(tensor.to('meta') for tensor in inputs)), spec, backend)
    assert out.shape == (2, 9, 8, HEADS * 16)


@pytest.mark.parametrize('is_amd', [False, True])
@pytest.mark.parametrize('dtype', [torch.bfloat16, FLOAT16])
def test_low_precision_errs_at_most_twice_as_much_as_plain_torch(monkeypatch, dtype, is_amd):
    monkeypatch.setattr(gathered, 'IS_FASTER_BY_ONEDNN', is_amd)
    case = (2, 20, 23, (7, 7), (3, 3), True, True)
    inputs, spec = make_inputs(case, dtype)
    exact = Inputs(*(tensor.detach().double().requires_grad_() for tensor in inputs))
    expected = run(exact, spec, 'textbook')
    for ours, plain, truth in zip(run(inputs, spec, 'sdpa'), run(inputs, spec, 'textbook'), expected, strict=True):
        allowed = 2 * (plain.double() - truth).abs().max()
        assert (ours.double() - truth).abs().max() <= allowed


@ON_A_CPU
def test_threads_with_different_sizes_get_right_answers(backend):
    sizes = [(9 + i, 20 - i) for i in range(8)]
    cases_ = [make_inputs((1, *size, (4, 4), (2, 2), True, True), torch.float32) for size in sizes]
    expected = [attend(inputs, spec, 'textbook').detach() for inputs, spec in cases_]
    gathered.cached_plan.cache_clear()

    @torch.no_grad()
    def wrong_sizes(start):
        order = [(start + i) % len(sizes) for i in range(40)]
        outs = ((index, attend(*cases_[index], backend)) for index in order)
        return [sizes[index] for index, out in outs if not torch.allclose(out, expected[index], atol=1e-5)]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(wrong_sizes, range(4))) == [[]] * 4


@ON_A_CPU
def test_inference_mode_first_and_training_later(backend):
    inputs, spec = make_inputs((1, 11, 13, (5, 5), (2, 2), True, True), torch.float64)
    gathered.cached_plan.cache_clear()
    with torch.inference_mode():
        attend(inputs, spec, backend)
    run(inputs, spec, backend)


CASE = (2, 9, 8, (3, 4), (1, 2), True, True)


def assert_dropout_keeps_the_mean(outs, expected, rounding=0.0):
    assert not torch.equal(outs[0], outs[1])
    atol = rounding + float(5 * outs.std(0).max() / len(outs) ** 0.5)
    torch.testing.assert_close(outs.mean(0), expected, rtol=0, atol=atol)


def test_dropout_in_bfloat16_on_amd_processors(monkeypatch):
    monkeypatch.setattr(gathered, 'IS_FASTER_BY_ONEDNN', True)
    inputs, spec = make_inputs((1, 4, 4, (4, 4), (0, 0), True, True), torch.bfloat16)
    expected = attend(inputs, spec, 'textbook').detach().float()
    with torch.no_grad():
        outs = torch.stack([attend(inputs, spec, 'sdpa', nn.Dropout(0.3)).float() for _ in range(2000)])
    assert_dropout_keeps_the_mean(outs, expected, rounding=2**-7 * float(expected.abs().max()))


@ON_A_CPU
@pytest.mark.parametrize('with_gradients', [False, True])
def test_dropout_keeps_the_mean_in_training_only(backend, with_gradients):
    inputs, spec = make_inputs((1, 4, 4, (4, 4), (0, 0), True, True), torch.float64)
    expected = attend(inputs, spec, 'textbook').detach()
    dropout = nn.Dropout(0.3)
    with torch.set_grad_enabled(with_gradients):
        outs = torch.stack([attend(inputs, spec, backend, dropout).detach() for _ in range(2000)])
        torch.testing.assert_close(attend(inputs, spec, backend, dropout.eval()).detach(), expected)
    assert_dropout_keeps_the_mean(outs, expected)


@ON_A_CPU
def test_a_hook_on_dropout_sees_the_weights_and_its_result_is_used(backend):
    inputs, spec = make_inputs(CASE, torch.float64)
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
    inputs, spec = make_inputs(CASE, torch.float64)
    torch.testing.assert_close(attend(inputs, spec, backend, kind()), attend(inputs, spec, 'textbook') / 2)


def test_an_unknown_backend():
    inputs, spec = make_inputs(CASE, torch.float64)
    with pytest.raises(ValueError, match=r"backend must be .*, triton, got 'bmm'"):
        attend(inputs, spec, 'bmm')


@pytest.mark.parametrize('backend', [name for name in BACKENDS if name != 'triton'])
def test_backend_is_an_option_of_the_backbone(backend):
    torch.manual_seed(0)
    options = {'embed_dims': 8, 'depths': (2,), 'num_heads': (2,), 'strides': (4,)}
    backbone = SwinBackbone(**options, attn_backend=backend).eval()
    expected = SwinBackbone(**options, attn_backend='reference').eval()
    expected.load_state_dict(backbone.state_dict())
    img = torch.randn(1, 3, 41, 33)
    torch.testing.assert_close(backbone(img)[0], expected(img)[0], rtol=1e-4, atol=1e-5)

"""Compare every backend with tests/textbook.py: outputs, gradients, precision, caches, threads and dispatch."""

import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swin_dense import SwinBackbone
from swin_dense.ops import BACKENDS, cpu, dispatch, window_attention
from swin_dense.ops.windows import WindowSpec
from tests import textbook
from tests.conftest import FLOAT16

SIDES = st.integers(1, 30)
HEADS = 2
ON_A_CPU = pytest.mark.parametrize('backend', ['sdpa', 'bmm'])


@st.composite
def cases(draw):
    window = (draw(st.integers(2, 16)), draw(st.integers(2, 16)))
    shift = tuple(draw(st.integers(0, side - 1)) for side in window)
    return draw(st.integers(0, 3)), draw(SIDES), draw(SIDES), window, shift, draw(st.booleans()), draw(st.booleans())


def make_inputs(case, dtype, head_dim=16):
    batch, height, width, window, shift, with_bias, with_pad = case
    channels, tokens = HEADS * head_dim, window[0] * window[1]
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()

    qkv = draw(batch, height, width, 3 * channels)
    bias = draw(HEADS, tokens, tokens) if with_bias else None
    pad = draw(2 * channels) if with_pad else None
    return (qkv, bias, pad), WindowSpec(HEADS, window, shift, head_dim**-0.5)


def attend(inputs, spec, backend):
    """Run window attention by a backend, or by tests/textbook.py."""
    if backend == 'textbook':
        return textbook.window_attention(*inputs, spec)
    return window_attention(*inputs, spec, backend)


def run(inputs, spec, backend):
    """Return the output and the gradients of all inputs."""
    out = attend(inputs, spec, backend)
    wanted = [tensor for tensor in inputs if tensor is not None]
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out.dtype)
    gradients = torch.autograd.grad((out * weights).sum(), wanted, allow_unused=True, materialize_grads=True)
    return [out.detach(), *gradients]


@ON_A_CPU
@settings(max_examples=40, deadline=None)
@given(case=cases())
def test_outputs_and_gradients_equal_the_textbooks(backend, case):
    inputs, spec = make_inputs(case, torch.float64, head_dim=4)
    pairs = zip(run(inputs, spec, backend), run(inputs, spec, 'textbook'), strict=True)
    for ours, expected in pairs:
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-11)


@ON_A_CPU
@settings(max_examples=20, deadline=None)
@given(case=cases())
def test_outputs_without_gradients_equal_the_textbooks(backend, case):
    inputs, spec = make_inputs(case, torch.float64, head_dim=4)
    with torch.no_grad():
        ours, expected = (attend(inputs, spec, name) for name in (backend, 'textbook'))
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-11)


@ON_A_CPU
@pytest.mark.parametrize('case', [(1, 4, 3, (3, 2), (1, 1), True, True), (2, 2, 2, (2, 2), (0, 0), True, False)])
def test_gradcheck(backend, case):
    inputs, spec = make_inputs(case, torch.float64, head_dim=2)
    given = [tensor for tensor in inputs if tensor is not None]

    def function(qkv, bias, pad=None):
        return window_attention(qkv, bias, pad, spec, backend)

    assert torch.autograd.gradcheck(function, given, check_batched_grad=True)


@ON_A_CPU
def test_gradients_of_gradients(backend):
    inputs, spec = make_inputs((1, 4, 3, (3, 2), (1, 1), True, True), torch.float64, head_dim=2)

    def function(*inputs):
        return window_attention(*inputs, spec, backend)

    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


@ON_A_CPU
@pytest.mark.parametrize('wanted', [0, 1, 2])
def test_a_single_gradient(backend, wanted):
    inputs, spec = make_inputs((2, 9, 8, (3, 4), (1, 2), True, True), torch.float64)
    grads = []
    for name in (backend, 'textbook'):
        alone = [t.detach().requires_grad_(index == wanted) for index, t in enumerate(inputs)]
        out = attend(alone, spec, name)
        grads.append(torch.autograd.grad(out.square().sum(), alone[wanted])[0])
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize('backend', ['auto', 'bmm', 'sdpa', 'reference'])
def test_meta_tensors_give_a_shape(backend):
    inputs, spec = make_inputs((2, 9, 8, (3, 4), (1, 2), True, True), torch.float32)
    out = window_attention(*(t.to('meta') for t in inputs), spec, backend)
    assert out.shape == (2, 9, 8, HEADS * 16)


@pytest.mark.parametrize('dtype', [torch.bfloat16, FLOAT16])
def test_low_precision_errs_at_most_twice_as_much_as_plain_torch(dtype):
    case = (2, 20, 23, (7, 7), (3, 3), True, True)
    inputs, spec = make_inputs(case, dtype)
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected = run(exact, spec, 'textbook')
    for ours, plain, truth in zip(run(inputs, spec, 'sdpa'), run(inputs, spec, 'textbook'), expected, strict=True):
        allowed = 2 * (plain.double() - truth).abs().max()
        assert (ours.double() - truth).abs().max() <= allowed


@ON_A_CPU
def test_threads_with_different_sizes_get_right_answers(backend):
    sizes = [(9 + i, 20 - i) for i in range(8)]
    cases_ = [make_inputs((1, *size, (4, 4), (2, 2), True, True), torch.float32) for size in sizes]
    expected = [attend(inputs, spec, 'textbook').detach() for inputs, spec in cases_]

    @torch.no_grad()
    def wrong_sizes(start):
        order = [(start + i) % len(sizes) for i in range(40)]
        outs = ((index, window_attention(*cases_[index][0], cases_[index][1], backend)) for index in order)
        return [sizes[index] for index, out in outs if not torch.allclose(out, expected[index], atol=1e-5)]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(wrong_sizes, range(4))) == [[]] * 4


@ON_A_CPU
def test_inference_mode_first_and_training_later(backend):
    inputs, spec = make_inputs((1, 11, 13, (5, 5), (2, 2), True, True), torch.float64)
    with torch.inference_mode():
        window_attention(*inputs, spec, backend)
    run(inputs, spec, backend)


@pytest.mark.parametrize('backend', [name for name in BACKENDS if name != 'triton'])
def test_backend_is_an_option_of_the_backbone(backend):
    torch.manual_seed(0)
    options = {'embed_dims': 8, 'depths': (2,), 'num_heads': (2,), 'strides': (4,)}
    backbone = SwinBackbone(**options, attn_backend=backend).eval()
    expected = SwinBackbone(**options, attn_backend='reference').eval()
    expected.load_state_dict(backbone.state_dict())
    img = torch.randn(1, 3, 41, 33)
    torch.testing.assert_close(backbone(img)[0], expected(img)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ('is_amd', 'dtype', 'side', 'autocast', 'grad', 'chosen'),
    [
        (True, torch.float32, 8, False, True, 'bmm'),
        (False, torch.float32, 8, False, True, 'sdpa'),
        (True, torch.float64, 8, False, True, 'sdpa'),
        (True, torch.bfloat16, 8, False, True, 'sdpa'),
        (True, torch.float32, 12, False, True, 'sdpa'),
        (True, torch.float32, 8, True, True, 'sdpa'),
        (True, torch.float32, 8, False, False, 'sdpa'),
    ],
)
def test_the_automatic_choice_is_logged_once(monkeypatch, caplog, is_amd, dtype, side, autocast, grad, chosen):
    monkeypatch.setattr(cpu, 'is_amd', lambda: is_amd)
    dispatch._log_once.cache_clear()
    inputs, spec = make_inputs((1, 4, 4, (side, side), (0, 0), True, True), dtype)
    with (
        caplog.at_level(logging.INFO, logger='swin_dense.ops'),
        torch.autocast('cpu', enabled=autocast),
        torch.set_grad_enabled(grad),
    ):
        for _ in range(3):
            window_attention(*inputs, spec)
    assert [record.levelname for record in caplog.records] == ['INFO']
    assert f"backend '{chosen}'" in caplog.text


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_batched_products_refuse_low_precision(dtype):
    inputs, spec = make_inputs((1, 4, 4, (2, 2), (0, 0), True, True), dtype)
    with pytest.raises(RuntimeError, match=f'bmm: the map is {dtype} on cpu, not float32 or float64 on a CPU'):
        window_attention(*inputs, spec, 'bmm')


def test_batched_products_with_dropout_keep_the_mean():
    torch.manual_seed(0)
    inputs, spec = make_inputs((1, 4, 4, (4, 4), (0, 0), True, True), torch.float64)
    expected = attend(inputs, spec, 'textbook')
    outs = torch.stack([window_attention(*inputs, spec._replace(dropout=0.3), 'bmm') for _ in range(2000)]).detach()
    assert not torch.equal(outs[0], outs[1])
    torch.testing.assert_close(outs.mean(0), expected.detach(), rtol=0, atol=float(5 * outs.std(0).max() / 2000**0.5))

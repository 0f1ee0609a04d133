"""Compare the LayerNorm kernels with torch's LayerNorm, forward and backward, in every dtype."""

import pytest
import torch
import torch.nn.functional as F

from swin_dense.ops.triton import norm
from tests.conftest import IfInstalled
from tests.ops.devices import compile_for_h200, device, needs_interpreter

norm_kernels = IfInstalled('swin_dense.ops.triton.norm_kernels')  # which needs triton
EPS = 1e-5


def inputs(shape, device, dtype=torch.float32, parameter_dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    channels = shape[-1]
    x = 3 * torch.randn(shape, generator=generator) + torch.randn(shape[-1], generator=generator)
    weight, bias = 1 + torch.randn(channels, generator=generator), torch.randn(channels, generator=generator)
    tensors = [x.to(dtype), weight.to(parameter_dtype), bias.to(parameter_dtype)]
    return [t.to(device).requires_grad_() for t in tensors]


def plain(x, weight, bias, eps=EPS):
    """Compute the same with torch operations."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def with_gradients(out, leaves):
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return [out, *torch.autograd.grad(out, leaves, grad)]


@device
@pytest.mark.parametrize('shape', [(2, 5, 7, 12), (1, 8, 6, 96), (3, 1, 1, 16), (1, 2, 3, 130)], ids=str)
def test_equals_torchs_layer_norm(shape, device):
    leaves = inputs(shape, device)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    expected = with_gradients(plain(*exact), exact)
    actual = with_gradients(norm.layer_norm(*leaves, EPS, torch.float32), leaves)
    for a, e in zip(actual, expected, strict=True):
        assert a.shape == e.shape
        torch.testing.assert_close(a.double(), e, rtol=2e-5, atol=2e-5)


@device
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16], ids=str)
def test_equals_autocast_followed_by_a_cast(dtype, device):
    """The residual stream and the parameters are float32; the low-precision result is rounded once."""
    leaves = inputs((1, 9, 6, 32), device)
    exact = plain(*leaves).to(dtype)
    actual = norm.layer_norm(*leaves, EPS, dtype)
    assert actual.dtype == dtype
    # Mean and variance are summed in a different order, so that a few values round differently.
    assert (actual != exact).float().mean() < 0.01
    for a, e in zip(with_gradients(actual, leaves), with_gradients(exact, leaves), strict=True):
        assert a.dtype == e.dtype
        torch.testing.assert_close(a, e, rtol=torch.finfo(dtype).eps, atol=1e-4)


@device
def test_low_precision_errs_at_most_twice_as_much_as_torch(device):
    leaves = inputs((2, 7, 9, 48), device, torch.bfloat16, torch.bfloat16)
    exact = [x.detach().float().requires_grad_() for x in leaves]
    truth = with_gradients(plain(*exact).bfloat16(), exact)
    torchs = with_gradients(plain(*leaves), leaves)
    ours = with_gradients(norm.layer_norm(*leaves, EPS, torch.bfloat16), leaves)
    for t, p, f in zip(truth, torchs, ours, strict=True):
        assert f.dtype == torch.bfloat16
        assert (f.float() - t.float()).norm() <= 2 * (p.float() - t.float()).norm()


@device
def test_no_sum_is_written_beyond_the_last_channel(device):
    x, weight, _ = (tensor.detach() for tensor in inputs((6, 12), device))
    sums = torch.full((2 * 12 + 1,), 7.0, device=device)
    shape = {'CHANNELS': 12, 'BLOCK': 16, 'ROWS': 4}
    norm_kernels.backward[(1,)](x, x, weight, torch.empty_like(x), sums, EPS, 6, 1, **shape)
    torch.testing.assert_close(sums[12:24], x.sum(0))
    assert sums[24] == 7


@device
def test_rows_far_from_zero_keep_their_precision(device):
    """The variance is computed from centred values, not as a difference of two large sums."""
    x = (1e4 + torch.randn(1, 1, 50, 64)).to(device)
    one, zero = torch.ones(64, device=device), torch.zeros(64, device=device)
    expected = F.layer_norm(x.double(), (64,), eps=EPS)
    actual = norm.layer_norm(x, one, zero, EPS, torch.float32)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-2, atol=1e-2)


@device
def test_strided_and_empty_inputs(device):
    x, weight, bias = inputs((2, 6, 5, 16), device)
    strided = x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    expected = with_gradients(plain(x, weight, bias), [x, weight, bias])
    out = norm.layer_norm(strided, weight, bias, EPS, torch.float32)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    actual = [out, *torch.autograd.grad(out, [strided, weight, bias], grad.mT.contiguous().mT)]
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-4)
    none = with_gradients(norm.layer_norm(x[:0], weight, bias, EPS, torch.float32), [weight, bias])
    assert not any(g.any() for g in none)


@device
def test_any_number_of_axes(device):
    x, weight, bias = inputs((3, 16), device)
    out = norm.layer_norm(x, weight, bias, EPS, torch.float32)
    torch.testing.assert_close(out, F.layer_norm(x, (16,), weight, bias, EPS), rtol=1e-4, atol=1e-4)


@device
def test_operators_pass_opcheck(device):
    leaves = inputs((1, 3, 4, 16), device)
    torch.library.opcheck(norm.layer_norm, (*leaves, EPS, torch.bfloat16))
    x, weight, bias = (t.detach() for t in leaves)
    grad = torch.randn_like(norm.layer_norm(x, weight, bias, EPS, torch.bfloat16))
    torch.library.opcheck(norm._backward, (grad, x, weight, EPS))


@needs_interpreter
def test_saves_only_input_and_weight():
    kept = []

    def pack(tensor):
        kept.append(tensor)
        return tensor

    x, weight, bias = inputs((1, 4, 4, 16), 'cpu')
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        norm.layer_norm(x, weight, bias, EPS, torch.bfloat16)
    assert {t.data_ptr() for t in kept} == {x.data_ptr(), weight.data_ptr()}


@needs_interpreter
def test_unsupported_inputs_are_named():
    assert norm.unsupported_reason(torch.zeros(4, 16)) is None
    assert 'float64' in norm.unsupported_reason(torch.zeros(4, 16, dtype=torch.float64))
    assert '9000 channels' in norm.unsupported_reason(torch.zeros(4, 9000))


@needs_interpreter
def test_parameters_of_a_wrong_shape_are_refused():
    x, weight, bias = inputs((1, 4, 4, 16), 'cpu')
    with pytest.raises(ValueError, match='weight and bias must have the shape'):
        norm.layer_norm(x, weight[:-1], bias, EPS, torch.float32)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(norm.gpu._unusable is not None, reason=str(norm.gpu._unusable))
def test_kernels_compile_for_an_h200():
    rows = compile_for_h200("""
        from swin_dense.ops.triton import norm, norm_kernels
        for channels in (96, 3072):
            x, weight, bias = (torch.zeros(size).requires_grad_() for size in ((1, 9, 8, channels), channels, channels))
            norm.layer_norm(x, weight, bias, 1e-5, torch.bfloat16).sum().backward()
    """)
    assert [name for name, _ in rows] == ['forward', 'backward'] * 2
    assert max(shared for _, shared in rows) <= 227 * 1024 / 2  # bytes per multiprocessor; two programs should fit

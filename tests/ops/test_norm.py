"""Compare the LayerNorm kernels with torch's LayerNorm, forward and backward, in every layout and dtype."""

import pytest
import torch
import torch.nn.functional as F

from swin_dense.models.layers import PatchMerging
from swin_dense.ops.triton import norm
from tests.ops.devices import compile_for_h200, device, needs_interpreter

EPS = 1e-5


def inputs(shape, layout, device, dtype=torch.float32, parameter_dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    channels = shape[-1] * (4 if layout == 'merged' else 1)
    x = 3 * torch.randn(shape, generator=generator) + torch.randn(shape[-1], generator=generator)
    weight, bias = 1 + torch.randn(channels, generator=generator), torch.randn(channels, generator=generator)
    tensors = [x.to(dtype), weight.to(parameter_dtype), bias.to(parameter_dtype)]
    return [t.to(device).requires_grad_() for t in tensors]


def plain(layout, x, weight, bias, eps=EPS):
    """Compute the same with torch operations."""
    if layout == 'merged':
        x = F.pad(x, (0, 0, 0, x.shape[2] % 2, 0, x.shape[1] % 2))
        x = torch.stack([x[:, i::2, j::2] for i, j in ((0, 0), (0, 1), (1, 0), (1, 1))], -1).flatten(3)
    out = F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    return out.permute(0, 3, 1, 2).contiguous() if layout == 'maps' else out


def with_gradients(out, leaves):
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return [out, *torch.autograd.grad(out, leaves, grad)]


@device
@pytest.mark.parametrize('layout', norm.LAYOUTS)
@pytest.mark.parametrize('shape', [(2, 5, 7, 12), (1, 8, 6, 96), (3, 1, 1, 16), (1, 2, 3, 130)], ids=str)
def test_equals_torchs_layer_norm(shape, layout, device):
    leaves = inputs(shape, layout, device)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    expected = with_gradients(plain(layout, *exact), exact)
    actual = with_gradients(norm.LAYOUTS[layout](*leaves, EPS, torch.float32), leaves)
    for a, e in zip(actual, expected, strict=True):
        assert a.shape == e.shape
        torch.testing.assert_close(a.double(), e, rtol=2e-5, atol=2e-5)


@device
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize('layout', norm.LAYOUTS)
def test_equals_autocast_followed_by_a_cast(layout, dtype, device):
    """The residual stream and the parameters are float32; the low-precision result is rounded once."""
    leaves = inputs((1, 9, 6, 32), layout, device)
    exact = plain(layout, *leaves).to(dtype)
    actual = norm.LAYOUTS[layout](*leaves, EPS, dtype)
    assert actual.dtype == dtype
    # Mean and variance are summed in a different order, so that a few values round differently.
    assert (actual != exact).float().mean() < 0.01
    for a, e in zip(with_gradients(actual, leaves), with_gradients(exact, leaves), strict=True):
        assert a.dtype == e.dtype
        torch.testing.assert_close(a, e, rtol=torch.finfo(dtype).eps, atol=1e-4)


@device
@pytest.mark.parametrize('layout', norm.LAYOUTS)
def test_low_precision_errs_at_most_twice_as_much_as_torch(layout, device):
    leaves = inputs((2, 7, 9, 48), layout, device, torch.bfloat16, torch.bfloat16)
    exact = [x.detach().float().requires_grad_() for x in leaves]
    truth = with_gradients(plain(layout, *exact).bfloat16(), exact)
    torchs = with_gradients(plain(layout, *leaves), leaves)
    ours = with_gradients(norm.LAYOUTS[layout](*leaves, EPS, torch.bfloat16), leaves)
    for t, p, f in zip(truth, torchs, ours, strict=True):
        assert f.dtype == torch.bfloat16
        assert (f.float() - t.float()).norm() <= 2 * (p.float() - t.float()).norm()


@device
def test_patch_merging_equals_the_module(device):
    merging = PatchMerging(16, 2, {'type': 'LN'}).to(device)
    torch.nn.init.normal_(merging.norm.weight)
    x = torch.randn(2, 7, 4, 16, device=device)
    out = norm.merge_and_layer_norm(x, merging.norm.weight, merging.norm.bias, merging.norm.eps, torch.float32)
    torch.testing.assert_close(merging.reduction(out), merging(x), rtol=1e-4, atol=1e-5)


@device
def test_rows_far_from_zero_keep_their_precision(device):
    """The variance is computed from centred values, not as a difference of two large sums."""
    x = (1e4 + torch.randn(1, 1, 50, 64)).to(device)
    one, zero = torch.ones(64, device=device), torch.zeros(64, device=device)
    expected = F.layer_norm(x.double(), (64,), eps=EPS)
    actual = norm.layer_norm(x, one, zero, EPS, torch.float32)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-2, atol=1e-2)


@device
@pytest.mark.parametrize('layout', norm.LAYOUTS)
def test_strided_and_empty_inputs(layout, device):
    x, weight, bias = inputs((2, 6, 5, 16), layout, device)
    strided = x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    expected = with_gradients(plain(layout, x, weight, bias), [x, weight, bias])
    out = norm.LAYOUTS[layout](strided, weight, bias, EPS, torch.float32)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    actual = [out, *torch.autograd.grad(out, [strided, weight, bias], grad.mT.contiguous().mT)]
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-4)
    none = with_gradients(norm.LAYOUTS[layout](x[:0], weight, bias, EPS, torch.float32), [weight, bias])
    assert not any(g.any() for g in none)


@device
def test_any_number_of_axes(device):
    x, weight, bias = inputs((3, 16), 'tokens', device)
    out = norm.layer_norm(x, weight, bias, EPS, torch.float32)
    torch.testing.assert_close(out, F.layer_norm(x, (16,), weight, bias, EPS), rtol=1e-4, atol=1e-4)


@device
@pytest.mark.parametrize('layout', norm.LAYOUTS)
def test_operators_pass_opcheck(layout, device):
    leaves = inputs((1, 3, 4, 16), layout, device)
    torch.library.opcheck(norm._forward, (*leaves, EPS, torch.bfloat16, layout))
    x, weight, bias = (t.detach() for t in leaves)
    grad = torch.randn_like(norm._forward(x, weight, bias, EPS, torch.bfloat16, layout))
    torch.library.opcheck(norm._backward, (grad, x, weight, EPS, layout))


@needs_interpreter
def test_saves_only_input_and_weight():
    kept = []

    def pack(tensor):
        kept.append(tensor)
        return tensor

    x, weight, bias = inputs((1, 4, 4, 16), 'tokens', 'cpu')
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        norm.layer_norm(x, weight, bias, EPS, torch.bfloat16)
    assert {t.data_ptr() for t in kept} == {x.data_ptr(), weight.data_ptr()}


@needs_interpreter
def test_unsupported_inputs_are_named():
    assert norm.unsupported_reason(torch.zeros(4, 16), 16) is None
    assert 'float64' in norm.unsupported_reason(torch.zeros(4, 16, dtype=torch.float64), 16)
    assert '9000 channels' in norm.unsupported_reason(torch.zeros(4, 9000), 9000)


@needs_interpreter
@pytest.mark.parametrize('layout', norm.LAYOUTS)
def test_parameters_of_a_wrong_shape_are_refused(layout):
    x, weight, bias = inputs((1, 4, 4, 16), layout, 'cpu')
    with pytest.raises(ValueError, match='weight and bias must have the shape'):
        norm.LAYOUTS[layout](x, weight[:-1], bias, EPS, torch.float32)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(norm.gpu._unusable is not None, reason=str(norm.gpu._unusable))
def test_kernels_compile_for_an_h200():
    rows = compile_for_h200("""
        from swin_dense.ops.triton import norm
        for function in (norm.layer_norm, norm.layer_norm_to_maps, norm.merge_and_layer_norm):
            for channels in (96, 3072):
                x = torch.zeros(1, 9, 8, channels // (4 if function is norm.merge_and_layer_norm else 1))
                x, weight, bias = (t.requires_grad_() for t in (x, torch.zeros(channels), torch.zeros(channels)))
                function(x, weight, bias, 1e-5, torch.bfloat16).sum().backward()
    """)
    assert [name for name, _ in rows] == ['forward', 'backward'] * 6
    assert max(shared for _, shared in rows) <= 227 * 1024 / 2  # bytes per multiprocessor; two programs should fit

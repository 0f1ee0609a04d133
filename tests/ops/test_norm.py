"""Compare the norm kernels with torch's in float64, in triton's interpreter and, if available, on a GPU."""

import copy
import functools
from collections import defaultdict

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from swin_dense import SwinBackbone, SwinV2Backbone
from swin_dense.models.layers import LayerNorm, build_norm
from swin_dense.ops import context
from swin_dense.ops import norm as choice_of_norm
from swin_dense.ops.triton import choice, gpu, norm, trials
from swin_dense.utils import compat
from tests.ops.devices import compile_for, device, needs_interpreter

LOW = torch.bfloat16


def draw(*shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def outcome(function, tensors, grad):
    """Return the output and the gradients of x, weight and bias."""
    leaves = [tensor.detach().clone(memory_format=torch.preserve_format).requires_grad_() for tensor in tensors]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


def torchs(x, weight, bias):
    return F.layer_norm(x, weight.shape, weight, bias, 1e-5)


def ours(x, weight, bias, dtype):
    return norm.layer_norm(x, weight, bias, 1e-5, dtype)


@device
@pytest.mark.parametrize('channels', [1, 20, 96, 768, 3000])
@pytest.mark.parametrize('rows', [(0,), (1,), (2, 3, 23)], ids=str)
@pytest.mark.parametrize(
    ('x_dtype', 'weight_dtype', 'out_dtype'),
    [
        (torch.float32, torch.float32, torch.float32),
        (torch.float32, torch.float32, LOW),
        (LOW, torch.float32, torch.float32),
        (LOW, LOW, LOW),
    ],
    ids=str,
)
def test_output_and_gradients(device, channels, rows, x_dtype, weight_dtype, out_dtype):
    x = (3 * draw(*rows, channels) + 1).to(x_dtype)
    weight, bias = (draw(channels + shift)[shift:].to(weight_dtype) for shift in (0, 1))
    grad = draw(*rows, channels).to(out_dtype)
    exact = outcome(torchs, [x.double(), weight.double(), bias.double()], grad)
    tensors = [tensor.to(device) for tensor in (x, weight, bias)]
    found = outcome(functools.partial(ours, dtype=out_dtype), tensors, grad.to(device))
    dtypes = [out_dtype, x_dtype, weight_dtype, weight_dtype]
    assert [tensor.dtype for tensor in found] == dtypes
    for tensor, truth, dtype in zip(found, exact, dtypes, strict=True):
        scale = truth.abs().max() if truth.numel() else 1.0
        error = (tensor.cpu().double() - truth).abs().max() if truth.numel() else 0.0
        assert error <= (2e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps) * scale + 1e-6


@device
def test_a_map_that_is_not_contiguous(device):
    x = draw(2, 32, 5, 7, dtype=torch.float32).permute(0, 2, 3, 1)
    tensors = [x, draw(32, dtype=torch.float32), draw(32, dtype=torch.float32)]
    grad = draw(2, 7, 5, 32, dtype=torch.float32).transpose(1, 2)
    exact = outcome(torchs, [tensor.double() for tensor in tensors], grad)
    found = outcome(
        functools.partial(ours, dtype=torch.float32), [tensor.to(device) for tensor in tensors], grad.to(device)
    )
    for tensor, truth in zip(found, exact, strict=True):
        torch.testing.assert_close(tensor.cpu().double(), truth, rtol=1e-5, atol=1e-5)


@device
def test_parameters_that_are_parts_of_larger_tensors(device):
    """As those of a flat parameter, or of a matrix; they are neither contiguous nor aligned."""
    x = draw(5, 24, dtype=torch.float32)
    parts = draw(24, 2, dtype=torch.float32)[:, 1], draw(25, dtype=torch.float32)[1:]
    tensors = [x, *parts]
    grad = draw(5, 24, dtype=torch.float32)
    exact = outcome(torchs, [tensor.double() for tensor in tensors], grad)
    strided = [
        x.to(device),
        draw(24, 2, dtype=torch.float32).to(device)[:, 1],
        draw(25, dtype=torch.float32).to(device)[1:],
    ]
    leaves = [tensor.requires_grad_() for tensor in strided]
    out = norm.layer_norm(*leaves, 1e-5, torch.float32)
    found = [out.detach(), *torch.autograd.grad(out, leaves, grad.to(device))]
    for tensor, truth in zip(found, exact, strict=True):
        torch.testing.assert_close(tensor.cpu().double(), truth, rtol=1e-5, atol=1e-5)


@device
def test_gradients_of_gradients(device):
    tensors = [
        draw(3, 8, dtype=torch.float32).to(device).requires_grad_(),
        *(draw(2, 8, dtype=torch.float32).to(device)),
    ]

    def penalty(function):
        out = function(*tensors)
        (grad,) = torch.autograd.grad(out.square().sum(), tensors[0], create_graph=True)
        return torch.autograd.grad(grad.square().sum(), tensors[0])

    torch.testing.assert_close(penalty(functools.partial(ours, dtype=torch.float32)), penalty(torchs))


@device
def test_the_same_bits_every_time(device):
    tensors = [tensor.to(device, torch.float32) for tensor in (draw(999, 96), draw(96), draw(97)[1:])]
    grad = draw(999, 96).to(device, LOW)
    first, second = (outcome(functools.partial(ours, dtype=LOW), tensors, grad) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.fixture
def _on_a_gpu(monkeypatch):
    """Answer the questions for the device as on a GPU."""
    monkeypatch.setattr(choice, 'reasons', choice.Reasons())
    monkeypatch.setattr(torch.cuda, 'is_current_stream_capturing', lambda: False)
    monkeypatch.setattr(gpu, 'unsupported_device_reason', lambda device: None)


@needs_interpreter
@pytest.mark.usefixtures('_on_a_gpu')
@pytest.mark.parametrize(
    'dtypes', [(LOW, torch.float32), (torch.float32, LOW), (torch.float16, torch.float16)], ids=str
)
@pytest.mark.parametrize('channels', [16, 96, 384])
def test_the_kernel_passes_its_trial(dtypes, channels):
    out_dtype, x_dtype = dtypes
    trial = trials.NormTrial(torch.device('cpu'), out_dtype, x_dtype, x_dtype, channels, True)
    assert choice._reason_against(trial) is None


NORM_TRIAL = trials.NormTrial(torch.device('cpu'), LOW, torch.float32, torch.float32, 96, True)


def right_forward(x, weight, bias, eps, dtype):
    return torchs(x.float(), weight.float(), bias.float()).to(dtype)


def right_backward(grad, x, weight, eps):
    leaves = [x.float().requires_grad_(), weight.float().requires_grad_(), torch.zeros(len(weight)).requires_grad_()]
    return torch.autograd.grad(torchs(*leaves), leaves, grad.float())


def with_the_unbiased_variance(x, weight, bias, eps, dtype):
    """Return a norm that divides by one channel too few."""
    centred = x.float() - x.float().mean(-1, keepdim=True)
    normalised = centred / (x.float().var(-1, keepdim=True) + eps).sqrt()
    return (normalised * weight + bias).to(dtype)


def without_the_bias(x, weight, bias, eps, dtype):
    return right_forward(x, weight, 0 * bias, eps, dtype)


def with_a_nan(x, weight, bias, eps, dtype):
    out = right_forward(x, weight, bias, eps, dtype)
    out.view(-1)[-1] = torch.nan
    return out


def without_the_mean(grad, x, weight, eps):
    """Forget what the mean takes away from the gradient of the map."""
    grad_x, grad_weight, grad_bias = right_backward(grad, x, weight, eps)
    factor = (x.float().var(-1, correction=0, keepdim=True) + eps).rsqrt()
    return grad_x + (grad.float() * weight).mean(-1, keepdim=True) * factor, grad_weight, grad_bias


def without_the_last_row(grad, x, weight, eps):
    grad_x, grad_weight, _ = right_backward(grad, x, weight, eps)
    return grad_x, grad_weight, grad.float().flatten(0, -2)[:-1].sum(0)


def with_the_gradients_exchanged(grad, x, weight, eps):
    grad_x, grad_weight, grad_bias = right_backward(grad, x, weight, eps)
    return grad_x, grad_bias, grad_weight


@pytest.fixture
def _right_kernel(monkeypatch, _on_a_gpu):
    monkeypatch.setattr(norm, 'forward', right_forward)
    monkeypatch.setattr(norm, 'backward', right_backward)


@pytest.mark.usefixtures('_right_kernel')
def test_a_right_kernel_passes():
    assert choice.reasons[(trials.NormTrial, *NORM_TRIAL)] is None


FAULTS = [
    ('forward', without_the_bias),
    ('forward', with_a_nan),
    ('backward', without_the_mean),
    ('backward', without_the_last_row),
    ('backward', with_the_gradients_exchanged),
]


@pytest.mark.usefixtures('_right_kernel')
@pytest.mark.parametrize(
    ('dtype', 'function', 'fault'),
    [
        (torch.float32, 'forward', with_the_unbiased_variance),  # half a percent, which bfloat16 would round away
        *[(dtype, *fault) for dtype in (torch.float32, LOW) for fault in FAULTS],
    ],
)
def test_a_kernel_that_errs_is_not_used_and_a_warning_says_so(monkeypatch, dtype, function, fault):
    monkeypatch.setattr(norm, function, fault)
    with pytest.warns(UserWarning, match=r"is torch's LayerNorm on cpu.*differ.*norm_cfg=torch.nn"):
        assert choice.reasons[(trials.NormTrial, *NORM_TRIAL._replace(out_dtype=dtype))]


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True


@pytest.fixture
def called(monkeypatch, _on_a_gpu):
    """Let maps be on a GPU where kernels are right, and return a list of the dtypes in which the kernel is called."""
    dtypes = []
    monkeypatch.setattr(choice, 'reasons', defaultdict(lambda: None))
    monkeypatch.setattr(choice_of_norm, 'Tensor', OnGpu)
    monkeypatch.setattr(context, 'Tensor', OnGpu)
    monkeypatch.setattr(norm, 'layer_norm', lambda x, weight, bias, eps, dtype: dtypes.append(dtype) or x)
    return dtypes


def on_gpu(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype).as_subclass(OnGpu)


@pytest.mark.parametrize(
    ('autocast', 'feeds_linear', 'dtype', 'expected'),
    [
        (None, True, torch.float32, torch.float32),
        (None, True, LOW, LOW),
        (LOW, True, torch.float32, LOW),
        (LOW, False, torch.float32, torch.float32),
        (LOW, False, LOW, torch.float32),
    ],
)
@torch.no_grad()
def test_the_dtype_is_that_of_the_layer_that_reads_the_norm(
    monkeypatch, called, autocast, feeds_linear, dtype, expected
):
    monkeypatch.setattr(choice_of_norm.compat, 'is_autocast_enabled', lambda device: autocast is not None)
    monkeypatch.setattr(choice_of_norm.compat, 'get_autocast_dtype', lambda device: autocast)
    build_norm({'type': 'LN'}, 8, feeds_linear).to(dtype)(on_gpu(2, 8, dtype=dtype))
    assert called == [expected]


def names_of_norms(model):
    names = {True: set(), False: set()}
    for name, module in model.named_modules():
        if isinstance(module, LayerNorm):
            names[module.feeds_linear].add(name)
    return names


def test_norms_that_a_linear_layer_reads():
    """V1 adds and returns in float32 what patch embedding and output norms give, V2 what all norms give."""
    arch = {'embed_dims': 16, 'depths': (1, 1), 'num_heads': (1, 1)}
    first = names_of_norms(SwinBackbone(arch))
    assert first[False] == {'patch_embed.norm', 'norm0', 'norm1'}
    blocks = {f'stages.{stage}.blocks.0.norm{number}' for stage in (0, 1) for number in (1, 2)}
    assert first[True] == {*blocks, 'stages.0.downsample.norm'}
    assert names_of_norms(SwinV2Backbone(arch))[True] == set()


def test_small_norms_are_torchs_in_eager_training(monkeypatch, called):
    monkeypatch.setattr(choice_of_norm, 'LEAST_IN_TRAINING', 100)
    layer = LayerNorm(10)
    layer(on_gpu(9, 10))
    assert len(called) == 0
    layer(on_gpu(10, 10))
    assert len(called) == 1
    with torch.no_grad():
        layer(on_gpu(9, 10))
    assert len(called) == 2
    monkeypatch.setattr(torch.cuda, 'is_current_stream_capturing', lambda: True)
    layer(on_gpu(9, 10))
    assert len(called) == 3


class Sharded(OnGpu):
    """A parameter with operations of its own."""


@torch.no_grad()
def test_where_the_kernel_has_no_place(monkeypatch, called):
    x = on_gpu(4, 8)
    LayerNorm(8, elementwise_affine=False)(x)
    LayerNorm((4, 8))(x)
    sharded = LayerNorm(8)
    sharded.weight = nn.Parameter(torch.ones(8).as_subclass(Sharded))
    sharded(x)
    with pytest.raises(RuntimeError):  # that of torch
        LayerNorm(8).to(LOW)(x)
    with pytest.raises(RuntimeError):
        LayerNorm(8)(on_gpu(4, 7))
    torch.func.vmap(LayerNorm(8))(x)
    monkeypatch.setattr(compat, 'is_compiling', lambda: True)
    LayerNorm(8)(x)
    assert not called


@torch.no_grad()
def test_parameters_on_another_device_are_refused_by_torch(called):
    with pytest.raises((RuntimeError, NotImplementedError)):
        LayerNorm(8, device='meta')(on_gpu(4, 8))
    assert not called


def test_torchs_own_class_opts_out():
    assert type(build_norm(nn.LayerNorm, 12)) is nn.LayerNorm


def test_the_layer_looks_like_torchs():
    layer = build_norm({'type': 'LN', 'eps': 1e-6}, 12)
    twin = nn.LayerNorm(12, eps=1e-6)
    assert type(layer) is LayerNorm
    assert repr(layer) == repr(twin)
    assert layer.state_dict().keys() == twin.state_dict().keys()
    twin.load_state_dict(layer.state_dict())
    seen = []
    x = draw(3, 12, dtype=torch.float32)
    assert torch.equal(copy.deepcopy(layer)(x), twin(x))
    layer.register_forward_hook(lambda module, inputs, out: seen.append(out))
    assert torch.equal(layer(x), twin(x))
    assert len(seen) == 1


@pytest.mark.slow
@pytest.mark.skipif(gpu._unusable is not None, reason=str(gpu._unusable))
@pytest.mark.parametrize('capability', [80, 90])
def test_kernels_compile_to_machine_code(capability):
    code = """
        from swin_dense.ops.triton import norm
        for channels in (1, 96, 4096):
            x = torch.zeros(2, channels, requires_grad=True)
            norm._Norm.apply(x, torch.ones(channels), torch.ones(channels), 1e-5, torch.bfloat16).sum().backward()
    """
    assert [name for name, _ in compile_for(capability, code)] == ['forward', 'backward'] * 3

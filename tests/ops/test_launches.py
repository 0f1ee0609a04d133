"""Count the operations that launch kernels on a GPU, on the meta device, so that a change that adds some is noticed.

Tensors on the meta device answer the questions for the device as on a GPU, and torch's attention is replaced by what it
does there. Parameters and the image are in one dtype: nothing is cast.
"""

import contextlib
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from swin_dense import SwinBackbone
from swin_dense.models.layers import LayerNorm
from swin_dense.ops import sdpa
from swin_dense.ops.norm import LEAST_IN_TRAINING
from swin_dense.ops.triton import attention, choice, gpu
from tests.ops.devices import as_on_a_gpu

# Views are told by their schema; these neither launch anything.
FREE = {
    *('aten.detach.default', 'aten.alias.default', 'aten._unsafe_view.default', 'aten._reshape_alias.default'),
    'aten.is_same_size.default',  # of torch 2.1
    *('aten.empty.memory_format', 'aten.new_empty.default', 'aten.empty_like.default', 'aten.empty_strided.default'),
}
# Two images that need padding in both stages, and regions: 16 x 24 and 8 x 12 tokens in windows of 7 x 7.
ARCH = {
    'embed_dims': 32,
    'depths': (2, 2),
    'num_heads': (1, 2),
    'strides': (4, 2),
}
SIZE = (2, 3, 64, 96)


class Launches(TorchDispatchMode):
    """Count operations that launch at least one kernel, by name."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view and str(func) not in FREE:
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def attention_of_a_gpu(q, k, v, attn_mask, dropout_p, scale):
    """Do what torch does on CUDA: copy a mask whose rows do not begin at multiples of 8 numbers; launch one kernel."""
    shape = *q.shape[:3], k.shape[2]
    if any(stride % 8 for stride in attn_mask.stride()[:-1]):
        attn_mask = F.pad(attn_mask, (0, -shape[3] % 8))[..., : shape[3]]
    operator = torch.ops.aten._scaled_dot_product_efficient_attention
    return operator(q, k, v, attn_mask.expand(shape), torch.is_grad_enabled(), dropout_p, scale=scale)[0]


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(choice, 'reasons', choice.Reasons())
    monkeypatch.setattr(choice, '_reason_against', lambda trial: 'no kernel is the default here')
    monkeypatch.setattr(gpu, 'unsupported_reason', lambda x: None)
    monkeypatch.setattr(attention, 'must_call_operators', lambda is_tracing: True)
    monkeypatch.setattr(F, 'scaled_dot_product_attention', attention_of_a_gpu)
    with as_on_a_gpu():
        yield


def launches(backend, trains):
    """Return the counts of a forward pass, and of a backward pass if the model trains, once its plans are cached."""
    model = SwinBackbone(**ARCH, attn_backend=backend, drop_path_rate=0.1).bfloat16().to('meta').train(trains)
    img = torch.empty(SIZE, device='meta', dtype=torch.bfloat16)
    with torch.set_grad_enabled(trains):
        model(img)
        with Launches() as forward:
            outs = model(img)
    grads = [torch.empty_like(out) for out in outs]
    with Launches() as backward:
        if trains:
            torch.autograd.backward(outs, grads)
    return forward.counts, backward.counts


ATTENTION = 'aten._scaled_dot_product_efficient_attention.default'
is_old = not hasattr(torch.library, 'custom_op')
of_kernel = pytest.mark.skipif(is_old, reason='torch 2.1 has no custom operators')
of_today = pytest.mark.skipif(is_old, reason='torch 2.1 composes the gradient of attention of more operations')
# By backend: launches of inference, and of a forward and a backward pass of training.
EXPECTED = {
    'triton': (53, 71, 93),
    'sdpa': (81, 111, 169),
    'reference': (255, 273, 163),
}


@pytest.mark.parametrize(
    'backend', [pytest.param('triton', marks=of_kernel), pytest.param('sdpa', marks=of_today), 'reference']
)
def test_launches_of_a_pass(backend):
    inference, _ = launches(backend, trains=False)
    forward, backward = launches(backend, trains=True)
    found = tuple(counts.total() for counts in (inference, forward, backward))
    assert found == EXPECTED[backend], (inference, forward, backward)


def test_a_block_without_triton():
    """One attention a block, without gradients; a mask is padded once a block, and given to each window once."""
    counts, _ = launches('sdpa', trains=False)
    blocks, shifted = 4, 2
    assert counts[ATTENTION] == blocks
    assert counts['aten.cat.default'] == 0
    assert counts['aten.constant_pad_nd.default'] == blocks + blocks  # maps and masks
    assert counts['aten.index_select.default'] == 2 * blocks + shifted


def test_a_block_without_triton_in_training():
    """One attention for each group of windows with the same mask, so that autograd keeps a mask of each group only."""
    counts, _ = launches('sdpa', trains=True)
    blocks, shifted = 4, 2
    assert counts[ATTENTION] == (blocks - shifted) + 4 * shifted
    assert counts['aten.index_select.default'] == 2 * blocks


@pytest.mark.parametrize('trains', [False, True])
def test_no_call_has_more_windows_than_a_kernel_takes(monkeypatch, trains):
    """The two images have 12 windows each in the first stage, and 4 in the second."""
    numbers = []

    def attend_and_record(q, *others, **options):
        numbers.append(len(q))
        return attention_of_a_gpu(q, *others, **options)

    monkeypatch.setattr(sdpa, 'MAX_WINDOWS', 11)
    monkeypatch.setattr(F, 'scaled_dot_product_attention', attend_and_record)
    launches('sdpa', trains)
    assert max(numbers) == 10  # of both images


@of_kernel
def test_a_block_with_the_kernel():
    counts, backward = launches('triton', trains=True)
    assert counts['swin_dense.triton_window_attention.default'] == 4
    assert backward['swin_dense.triton_window_attention_backward.default'] == 4
    # Every product, qkv, projection and MLP, is one with its bias, because the kernel writes contiguous maps.
    assert counts['aten.addmm.default'] == 4 * 4
    assert counts['aten.bmm.default'] == 0


# Kernels that one operation launches on CUDA, where it is not one.
KERNELS = {
    'aten.constant_pad_nd.default': 2,
    'aten.convolution.default': 2,
    'aten.convolution_backward.default': 3,
    'aten.native_layer_norm_backward.default': 3,
    'aten.slice_backward.default': 2,
    'aten.select_backward.default': 2,
    'swin_dense.triton_window_attention_backward.default': 2,
}


class Autocast(TorchFunctionMode):
    """Cast as autocast to bfloat16 does on a GPU, for what a Swin calls; each weight is cast once in a pass."""

    LOW = (F.linear, torch.conv2d)
    FULL = (F.layer_norm,)

    def __init__(self):
        super().__init__()
        self.weights = {}

    def lower(self, value):
        if not isinstance(value, torch.Tensor) or value.dtype != torch.float32:
            return value
        if isinstance(value, torch.nn.Parameter):
            if value not in self.weights:
                self.weights[value] = value.bfloat16()
            return self.weights[value]
        return value.bfloat16()

    def widen(self, value):
        return value.float() if isinstance(value, torch.Tensor) else value

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        cast = self.lower if func in self.LOW else self.widen if func in self.FULL else None
        if cast is not None:
            args = [cast(value) for value in args]
            kwargs = {name: cast(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


class NormOfAGpu(torch.autograd.Function):
    """Launch as the kernel of LayerNorm does: once forward, and once and a sum backward."""

    @staticmethod
    def forward(ctx, x, weight, bias, dtype):
        ctx.save_for_backward(x, weight)
        return x.new_empty(x.shape, dtype=dtype).zero_()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        partials = x.new_empty(528, 2, len(weight), dtype=torch.float32)
        grad_weight, grad_bias = partials.sum(0).to(weight.dtype)
        return torch.empty_like(x).zero_(), grad_weight, grad_bias, None


@pytest.fixture
def launches_of_swin_t(monkeypatch):
    """Return a function that counts launches of a forward and a backward pass of 2 images of 800 x 1344 pixels."""

    def count(is_pure, trains, least_norm=0):
        def normalise(self, x):
            dtype = torch.bfloat16 if is_pure or self.feeds_linear else torch.float32
            if trains and x.numel() < least_norm:
                return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
            return NormOfAGpu.apply(x, self.weight, self.bias, dtype)

        monkeypatch.setattr(LayerNorm, 'forward', normalise)
        dtype = torch.bfloat16 if is_pure else torch.float32
        model = SwinBackbone('t', attn_backend='triton', drop_path_rate=0.2).to('meta', dtype).train(trains)
        img = torch.empty(2, 3, 800, 1344, device='meta', dtype=dtype)
        autocast = contextlib.nullcontext if is_pure else Autocast
        with torch.set_grad_enabled(trains), Launches() as forward, autocast():
            outs = model(img)
        with Launches() as backward:
            if trains:
                torch.autograd.backward(outs, [torch.empty_like(out) for out in outs])
        return [
            sum(number * KERNELS.get(name, 1) for name, number in counter.counts.items())
            for counter in (forward, backward)
        ]

    return count


@of_kernel
def test_launches_of_a_swin_t(launches_of_swin_t):
    """A bound for each way in which the pass is the host's: 343, 188 and 409 + 612 before norms and table."""
    inference, _ = launches_of_swin_t(is_pure=False, trains=False)
    assert inference <= 270
    pure, _ = launches_of_swin_t(is_pure=True, trains=False)
    assert pure <= 165
    forward, backward = launches_of_swin_t(is_pure=False, trains=True)
    assert forward <= 333
    assert backward <= 450


@of_kernel
def test_launches_of_eager_training_where_small_norms_are_torchs(launches_of_swin_t):
    forward, backward = launches_of_swin_t(is_pure=False, trains=True, least_norm=LEAST_IN_TRAINING)
    assert forward <= 370
    assert backward <= 515

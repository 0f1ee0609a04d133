"""Count the operations that launch kernels on a GPU, on the meta device, so that a change that adds some is noticed.

A model on the meta device would use plain operations, so the questions for the device are answered as on a GPU, and
torch's attention is replaced by what it does there. Parameters and the image are in one dtype: nothing is cast.
"""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from swin_dense import SwinBackbone
from swin_dense.ops import context
from swin_dense.ops.triton import attention, gpu

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
    monkeypatch.setattr(context, 'needs_reference', lambda x: False)
    monkeypatch.setattr(gpu, 'unsupported_reason', lambda x: None)
    monkeypatch.setattr(attention, 'must_call_operators', lambda: True)
    monkeypatch.setattr(F, 'scaled_dot_product_attention', attention_of_a_gpu)


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


of_kernel = pytest.mark.skipif(not hasattr(torch.library, 'custom_op'), reason='torch 2.1 has no custom operators')
# By backend: launches of inference, and of a forward and a backward pass of training.
EXPECTED = {
    'triton': (53, 71, 93),
    'sdpa': (93, 111, 169),
    'reference': (275, 293, 163),
}


@pytest.mark.parametrize('backend', [pytest.param('triton', marks=of_kernel), 'sdpa', 'reference'])
def test_launches_of_a_pass(backend):
    inference, _ = launches(backend, trains=False)
    forward, backward = launches(backend, trains=True)
    found = tuple(counts.total() for counts in (inference, forward, backward))
    assert found == EXPECTED[backend], (inference, forward, backward)


def test_a_block_without_triton():
    """One attention a group, four for a shifted block; a mask is padded once a block."""
    counts, _ = launches('sdpa', trains=False)
    blocks, shifted = 4, 2
    attention_name = 'aten._scaled_dot_product_efficient_attention.default'
    assert counts[attention_name] == (blocks - shifted) + 4 * shifted
    assert counts['aten.cat.default'] == shifted
    assert counts['aten.constant_pad_nd.default'] == blocks + blocks  # maps and masks
    assert counts['aten.index_select.default'] == 2 * blocks


@of_kernel
def test_a_block_with_the_kernel():
    counts, backward = launches('triton', trains=True)
    assert counts['swin_dense.triton_window_attention.default'] == 4
    assert backward['swin_dense.triton_window_attention_backward.default'] == 4
    # Every product, qkv, projection and MLP, is one with its bias, because the kernel writes contiguous maps.
    assert counts['aten.addmm.default'] == 4 * 4
    assert counts['aten.bmm.default'] == 0

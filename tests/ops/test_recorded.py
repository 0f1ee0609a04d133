"""The geometry of recorded graphs against the textbook's, eagerly; then one trace at sizes that it never saw."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from swin_dense import SwinBackbone
from swin_dense.layers import PatchMerging
from swin_dense.ops import recorded, reference
from tests.conftest import randomize

SIZES = st.tuples(st.integers(1, 30), st.integers(1, 30))
HEADS, CHANNELS = 2, 6


@st.composite
def geometries(draw):
    """Windows and shifts, among them none, and windows that are not square."""
    window = draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
    return window, tuple(draw(st.integers(0, side - 1)) for side in window)


@given(SIZES, geometries(), st.integers(0, 3), st.booleans(), st.booleans())
def test_attention_is_the_textbooks(size, geometry, batch, has_bias, has_padding):
    window, shift = geometry
    tokens = window[0] * window[1]
    qkv = torch.randn(batch, *size, 3 * CHANNELS, dtype=torch.float64)
    bias = torch.randn(HEADS, tokens, tokens, dtype=torch.float64) if has_bias else None
    pad_kv = torch.randn(2 * CHANNELS, dtype=torch.float64) if has_padding else None
    given = qkv, bias, pad_kv, HEADS, window, shift, 0.3, 0.0
    ours, expected = recorded.window_attention(*given), reference.window_attention(*given)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


@given(SIZES, st.integers(1, 4))
def test_neighbours_are_those_of_patch_merging(size, stride):
    x = torch.randn(2, *size, CHANNELS)
    assert torch.equal(recorded.neighbours(x, stride), PatchMerging(CHANNELS, stride, None)._join(x))


@given(SIZES, SIZES)
def test_resizing_is_torchs(size, target):
    x = torch.randn(3, *size, dtype=torch.float64)
    expected = F.interpolate(x[None], target, mode='bicubic')[0]
    torch.testing.assert_close(recorded.resize_bicubic(x, target), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    'options',
    [{'window_size': 7}, {'window_size': (5, 12), 'use_abs_pos_embed': True, 'pretrain_img_size': 40}],
    ids=str,
)
def test_a_trace_is_right_at_sizes_that_it_never_saw(options):
    options = {'embed_dims': 16, 'depths': (2, 2), 'num_heads': (1, 2), 'strides': (4, 2), **options}
    model = randomize(SwinBackbone(**options)).double().eval().requires_grad_(False)
    trace = torch.jit.trace(model, torch.randn(2, 3, 75, 100, dtype=torch.float64))
    for shape in [(1, 1, 1), (3, 1, 300), (1, 300, 1), (4, 5, 9), (1, 28, 28), (2, 57, 199), (1, 224, 224)]:
        img = torch.randn(shape[0], 3, *shape[1:], dtype=torch.float64)
        for ours, expected in zip(trace(img), model(img), strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)

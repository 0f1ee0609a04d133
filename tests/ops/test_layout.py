"""Compare the layout of maps with tests/textbook.py, and a trace with eager mode at sizes it was not traced with."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from swin_dense import SwinBackbone, SwinV2Backbone
from swin_dense.ops import context, layout
from tests import textbook
from tests.conftest import assert_near, randomize
from tests.derivatives import doubles

SIZES = st.tuples(st.integers(1, 30), st.integers(1, 30))
CHANNELS = 6


def exporting():
    return mock.patch.object(context, 'is_exporting', return_value=True)


@given(SIZES, st.integers(1, 4))
def test_neighbours_equal_the_textbook(size, stride):
    x = torch.randn(2, *size, CHANNELS)
    by_neighbour = textbook.neighbours(x, stride)
    by_column_row_channel = by_neighbour.unflatten(-1, (2, 2, CHANNELS))
    expected = by_column_row_channel.permute(0, 1, 2, 5, 4, 3).flatten(3)
    assert torch.equal(layout.neighbours(x, stride), expected)
    assert layout.neighbours(x[:0], stride).shape == (0, *expected.shape[1:])
    with exporting():
        assert torch.equal(layout.neighbours(x, stride), expected)


@given(SIZES, SIZES)
def test_resizing_equals_torchs_interpolate(size, target):
    position = doubles(1, size[0] * size[1], 3)
    maps = position.unflatten(1, size).permute(0, 3, 1, 2)
    expected = F.interpolate(maps, target, mode='bicubic').permute(0, 2, 3, 1)
    assert_near(layout.resize_position(position, size, target), expected, 0)
    with exporting():
        ours = layout.resize_position(position, size, target)
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-12)


@given(SIZES, st.integers(1, 5))
def test_images_are_padded_to_whole_patches(size, side):
    img = torch.randn(1, 2, *size)
    below, right = -size[0] % side, -size[1] % side
    expected = F.pad(img, (0, right, 0, below))
    assert torch.equal(layout.pad_to_multiple(img, (side, side), axis=2), expected)
    with exporting():
        assert torch.equal(layout.pad_to_multiple(img, (side, side), axis=2), expected)


def test_what_needs_no_padding_is_not_copied():
    x = torch.rand(1, 8, 12, 3)
    assert layout.pad_to_multiple(x, (4, 3)) is x
    img = torch.rand(1, 3, 8, 12)
    assert layout.pad_to_multiple(img, (4, 4), axis=2) is img


OTHER_SHAPES = [
    (1, 1, 1),
    (3, 1, 300),
    (1, 300, 1),
    (4, 5, 9),
    (1, 28, 28),
    (2, 57, 199),
    (1, 224, 224),
]
OBLONG_WINDOW = {
    'window_size': (5, 12),
    'use_abs_pos_embed': True,
    'pretrain_img_size': (40, 64),
}


@pytest.mark.parametrize(
    ('kind', 'options', 'batch'),
    [
        (SwinBackbone, {}, 1),
        (SwinBackbone, OBLONG_WINDOW, 2),
        (SwinV2Backbone, {}, 1),
    ],
)
def test_a_trace_is_right_at_other_sizes(kind, options, batch):
    model = kind(
        embed_dims=16,
        depths=(2, 2),
        num_heads=(1, 2),
        strides=(4, 2),
        **options,
    )
    model = randomize(model).double().eval().requires_grad_(False)
    trace = torch.jit.trace(model, doubles(batch, 3, 75, 100))
    for count, height, width in OTHER_SHAPES:
        img = doubles(count, 3, height, width)
        assert_near(trace(img), model(img), 1e-9)

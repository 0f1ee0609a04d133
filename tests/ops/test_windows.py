"""Compare the window geometry with tests/textbook.py, and the position bias with its definition."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swin_dense.ops.reference import merge, partition
from swin_dense.ops.windows import (
    Grid,
    central_offsets,
    log_spaced_offsets,
    relative_position_bias,
    slots_of_windows,
    window_grid,
)
from tests import textbook


@st.composite
def grids(draw):
    """Draw sizes, windows and shifts, including maps smaller than a window and non-square windows."""
    size = draw(st.integers(1, 30)), draw(st.integers(1, 30))
    window = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    shift = tuple(draw(st.integers(0, side - 1)) for side in window)
    return Grid(size, window, shift)


@given(grids(), st.integers(0, 3))
def test_merge_undoes_partition(grid, batch):
    size, window, shift = grid
    x = torch.randn(batch, *size, 5)
    rows, columns = window_grid(*size, window)
    tokens, regions = slots_of_windows(grid, torch.device('cpu'))
    assert tokens.shape == regions.shape == (rows * columns, window[0] * window[1])
    slots = partition(x, window, tokens)
    assert torch.equal(merge(slots, grid), x)
    windows = slots.unflatten(1, tokens.shape)
    assert torch.equal(windows, textbook.partition(x, window, shift))
    assert torch.equal(textbook.merge(windows, size, window, shift), x)


@pytest.mark.parametrize(
    'window',
    [
        (1, 1),
        (2, 3),
        (7, 7),
        (4, 1),
    ],
)
def test_relative_position_bias_looks_up_the_offset_of_every_pair(window):
    height, width = window
    table = torch.randn((2 * height - 1) * (2 * width - 1), 3)
    bias = relative_position_bias(table, window)
    tokens = list(itertools.product(range(height), range(width)))
    for (q, (qy, qx)), (k, (ky, kx)) in itertools.product(enumerate(tokens), repeat=2):
        row = (qy - ky + height - 1) * (2 * width - 1) + (qx - kx + width - 1)
        assert torch.equal(bias[:, q, k], table[row])


@pytest.mark.parametrize('smaller', [(1, 1), (2, 5), (3, 2), (4, 5)])
def test_a_smaller_window_has_the_biases_of_its_offsets(smaller):
    height, width = smaller
    table = torch.randn(7 * 9, 3)
    whole = relative_position_bias(table, (4, 5)).view(3, 4, 5, 4, 5)
    inside = whole[:, :height, :width, :height, :width].reshape(3, height * width, -1)
    assert torch.equal(relative_position_bias(central_offsets(table, (4, 5), smaller), smaller), inside)


@pytest.mark.parametrize('trained', [(4, 3), (8, 1), (2, 2)])
def test_offsets_on_a_logarithmic_scale(trained):
    """As the code of Swin V2 computes them: sign(d) log8(1 + |8 d / farthest|), row by row."""
    window = 4, 3
    expected = []
    for offset in itertools.product(range(-3, 4), range(-2, 3)):
        relative = [8 * step / max(side - 1, 1) for step, side in zip(offset, trained, strict=True)]
        expected.append([math.copysign(math.log(1 + abs(step), 8), step) for step in relative])
    torch.testing.assert_close(log_spaced_offsets(window, trained), torch.tensor(expected))

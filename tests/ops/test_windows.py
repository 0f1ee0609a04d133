"""Compare the window geometry with tests/textbook.py, and the position bias with its definition."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swin_dense.ops.reference import merge, partition
from swin_dense.ops.windows import Grid, relative_position_bias, window_grid
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
    windows = partition(x, grid)
    rows, columns = window_grid(*size, window)
    assert windows.shape == (batch, rows * columns, window[0] * window[1], 5)
    assert torch.equal(merge(windows, grid), x)
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

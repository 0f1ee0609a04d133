"""Compare the window geometry with tests/textbook.py, and with definitions that enumerate all pairs of tokens."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swin_dense.ops.reference import merge, partition
from swin_dense.ops.windows import Grid, region_ids, relative_position_bias, window_grid
from tests import textbook


@st.composite
def grids(draw):
    """Draw sizes, windows and shifts, including maps smaller than a window and non-square windows."""
    size = draw(st.tuples(st.integers(1, 30), st.integers(1, 30)))
    window = draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
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


@given(grids())
def test_partition_follows_the_definition_for_every_token(grid):
    (height, width), window, shift = grid
    x = torch.arange(1, height * width + 1).view(1, height, width, 1)
    windows = partition(x, grid)[0, :, :, 0]
    rows, columns = window_grid(height, width, window)
    expected = torch.zeros_like(windows)
    for row, column, i, j in itertools.product(range(rows), range(columns), range(window[0]), range(window[1])):
        y = (row * window[0] + i + shift[0]) % (rows * window[0])
        x_ = (column * window[1] + j + shift[1]) % (columns * window[1])
        if y < height and x_ < width:
            expected[row * columns + column, i * window[1] + j] = x[0, y, x_, 0]
    assert torch.equal(windows, expected)


@given(grids())
def test_region_ids_separate_tokens_that_the_roll_made_adjacent(grid):
    (height, width), window, shift = grid
    ids = region_ids(grid)
    rows, columns = window_grid(height, width, window)

    wrapped_rows = torch.arange(rows * window[0]) + shift[0] >= rows * window[0]
    wrapped_columns = torch.arange(columns * window[1]) + shift[1] >= columns * window[1]
    for n, (row, column) in enumerate(itertools.product(range(rows), range(columns))):
        wrapped_row = wrapped_rows[row * window[0] :][: window[0], None]
        wrapped_column = wrapped_columns[column * window[1] :][None, : window[1]]
        wrapped = (2 * wrapped_row.int() + wrapped_column.int()).flatten()
        assert torch.equal(ids[n][:, None] == ids[n], wrapped[:, None] == wrapped)


@pytest.mark.parametrize('window', [(1, 1), (2, 3), (7, 7), (4, 1)])
def test_relative_position_bias_looks_up_the_offset_of_every_pair(window):
    height, width = window
    table = torch.randn((2 * height - 1) * (2 * width - 1), 3)
    bias = relative_position_bias(table, window)
    tokens = list(itertools.product(range(height), range(width)))
    for (q, (qy, qx)), (k, (ky, kx)) in itertools.product(enumerate(tokens), repeat=2):
        row = (qy - ky + height - 1) * (2 * width - 1) + (qx - kx + width - 1)
        assert torch.equal(bias[:, q, k], table[row])

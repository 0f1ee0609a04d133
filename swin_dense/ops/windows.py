"""Window geometry by index arithmetic: the mapping between the tokens of a map and the slots of its shifted windows.

A map of any size is padded at the right and bottom to a multiple of the window, rolled by minus the shift, and cut into
windows. As in the official detection code, the window is never clamped and the shift is never dropped, however small
the map. Rows and columns are independent, so every index table is an outer sum of two short ones.

All functions are pure. A graph recorded from them is valid for every size, because sizes are used only as operands of
``+``, ``*``, ``//`` and comparisons, on non-negative integers.

Suffixes name the axes: B batch, H and W the grid in tokens, C channels, N windows per image, T tokens per window.
Windows and shifts are (height, width) in tokens.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

Pair = tuple[int, int]

# Added to the scores of pairs from different regions, as in the official code.
REGION_PENALTY = -100.0


class WindowSpec(NamedTuple):
    """The settings of window attention.

    Attributes:
        num_heads: A, which divides C.
        window: (height, width) in tokens.
        shift: (height, width) in tokens by which the windows are shifted, each less than the window.
        scale: factor on the query-key product.
        dropout: probability to drop an attention weight.
    """

    num_heads: int
    window: Pair
    shift: Pair
    scale: float
    dropout: float = 0.0

    @property
    def tokens(self) -> int:
        """T, the number of tokens per window."""
        return self.window[0] * self.window[1]


def window_grid(height: int, width: int, window: Pair) -> Pair:
    """Return the number of windows that cover a map: (rows, columns)."""
    # Not -(-height // window[0]): runtimes of exported graphs differ in the division of negative numbers.
    return (height + window[0] - 1) // window[0], (width + window[1] - 1) // window[1]


def sources(count: int, window: int, shift: int, device: torch.device) -> Tensor:
    """Return, along one axis, the row of the padded map for each slot of each window: (count, window)."""
    source = torch.arange(count * window, device=device).reshape(count, window) + shift
    return torch.where(source >= count * window, source - count * window, source)


def slots(side: int, count: int, window: int, shift: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return, along one axis, the window index and the position within the window of each row: (side,) each."""
    slot = torch.arange(side, device=device) - shift
    slot = torch.where(slot < 0, slot + count * window, slot)
    return slot // window, slot % window


def partition(x_BHWC: Tensor, window: Pair, shift: Pair, padding_C: Tensor | None = None) -> Tensor:
    """Cut a map into windows, with ``padding_C``, or zeros if None, in padding slots.

    Returns:
        (B, N, T, C), windows and tokens both in row-major order.
    """
    height, width, channels = x_BHWC.shape[1:]
    rows, columns = window_grid(height, width, window)
    y = sources(rows, window[0], shift[0], x_BHWC.device)[:, None, :, None]
    x = sources(columns, window[1], shift[1], x_BHWC.device)[None, :, None, :]
    if padding_C is None:
        padding_C = x_BHWC.new_zeros(channels)
    return take(x_BHWC, y, x, padding_C).reshape(x_BHWC.shape[0], rows * columns, window[0] * window[1], channels)


def merge(x_BNTC: Tensor, size: Pair, window: Pair, shift: Pair) -> Tensor:
    """Undo :func:`partition` for a map of the given (height, width), dropping the padding.

    Returns:
        (B, H, W, C).
    """
    rows, columns = window_grid(*size, window)
    row, y = slots(size[0], rows, window[0], shift[0], x_BNTC.device)
    column, x = slots(size[1], columns, window[1], shift[1], x_BNTC.device)
    window_HW = row[:, None] * columns + column
    slot_HW = window_HW * (window[0] * window[1]) + y[:, None] * window[1] + x
    return x_BNTC.flatten(1, 2).index_select(1, slot_HW.flatten()).reshape(-1, *size, x_BNTC.shape[3])


def region_ids(height: int, width: int, window: Pair, shift: Pair, device: torch.device | None = None) -> Tensor:
    """Return the region of each slot; slots of one window in the same region were neighbours before the roll.

    The roll moves the first ``shift`` rows and columns to the opposite edge, so the last row and the last column of
    windows contain tokens from both edges. Only tokens of the same region may attend to each other.

    Returns:
        (N, T) integers.
    """

    def along(count: int, window: int, shift: int) -> Tensor:
        position = torch.arange(count * window, device=device).reshape(count, window)
        return (position >= (count - 1) * window).long() + (position >= count * window - shift).long()

    rows, columns = window_grid(height, width, window)
    row = along(rows, window[0], shift[0])
    column = along(columns, window[1], shift[1])
    ids = 3 * row[:, None, :, None] + column[None, :, None, :]
    return ids.reshape(rows * columns, window[0] * window[1])


def take(x_BHWC: Tensor, y: Tensor, x: Tensor, padding_C: Tensor) -> Tensor:
    """Return the tokens at (y, x), which are broadcast, with ``padding_C`` outside of the map: (B, tokens, C)."""
    height, width = x_BHWC.shape[1:3]
    is_token = (y < height) & (x < width)
    raster = torch.where(is_token, y * width + x, 0)
    return torch.where(is_token.reshape(-1, 1), x_BHWC.flatten(1, 2).index_select(1, raster.flatten()), padding_C)


def central_offsets(table: Tensor, window: Pair, smaller: Pair) -> Tensor:
    """Return the rows of a window's bias table for the offsets that occur in a smaller window."""
    offsets = table.reshape(2 * window[0] - 1, 2 * window[1] - 1, -1)
    rows, columns = (slice(side - less, side + less - 1) for side, less in zip(window, smaller, strict=True))
    return offsets[rows, columns].flatten(0, 1)


def relative_position_bias(table: Tensor, window: Pair) -> Tensor:
    """Expand a bias table over all pairs of tokens of one window.

    Entry (a, q, k) comes from the table's row for the offset of token q from token k, in the order of the official
    ``relative_position_index``. The lookup is a sliding view of the table and needs no index buffer.

    Args:
        table: ((2 * window height - 1) * (2 * window width - 1), A).
        window: (height, width) in tokens.

    Returns:
        (A, T, T).

    Raises:
        ValueError: the shape of the table does not match the window.
    """
    height, width = window
    tokens = height * width
    if table.shape[0] != (2 * height - 1) * (2 * width - 1):
        raise bias_table_error(table, window)
    offsets = table.reshape(2 * height - 1, 2 * width - 1, -1)
    views = offsets.unfold(0, height, 1).unfold(1, width, 1)  # (qy, qx, A, reversed ky, reversed kx)
    return views.permute(2, 0, 1, 3, 4).flip(3, 4).reshape(-1, tokens, tokens)


def bias_table_error(table: Tensor, window: Pair) -> ValueError:
    """Return the error for a bias table that does not have one row per offset in a window."""
    rows = (2 * window[0] - 1) * (2 * window[1] - 1)
    return ValueError(
        f'the bias table of a window of {window[0]} x {window[1]} must have the shape ({rows}, heads), '
        f'got {tuple(table.shape)}; a backbone for other windows is built with window_size='
    )


def log_spaced_offsets(window: Pair, trained: Pair, device: torch.device | None = None) -> Tensor:
    """Return the offsets of a window's bias table in the log-spaced coordinates of Swin V2.

    The outermost offsets of the window used in training are -1.06 and 1.06, which is log8(1 + 8).

    Args:
        window: (height, width) in tokens of the table.
        trained: (height, width) in tokens of the window used in training.
        device: device of the result.

    Returns:
        ((2 * window height - 1) * (2 * window width - 1), 2) in float32, in which the published weights were trained.
    """
    sides = []
    for side, trained_side in zip(window, trained, strict=True):
        offsets = torch.arange(1 - side, side, dtype=torch.float32, device=device)
        offsets = offsets / max(trained_side - 1, 1) * 8
        sides.append(offsets.sign() * (offsets.abs() + 1).log2() / math.log2(8))
    return torch.stack(torch.meshgrid(*sides, indexing='ij'), dim=-1).flatten(0, 1)

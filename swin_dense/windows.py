"""Window geometry: how a feature map of any size is cut into shifted windows and put together again.

All functions are pure. Suffixes name the axes: B batch, H and W the grid in tokens, C channels, N windows per
image, T tokens per window. Windows and shifts are (height, width) in tokens. The rules are those of the official
detection code: pad right and bottom to a multiple of the window, then roll by minus the shift, then partition;
the window is never clamped and the shift never dropped, however small the map.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

Pair = tuple[int, int]


def window_grid(height: int, width: int, window: Pair) -> Pair:
    """Return how many windows cover a map: (rows, columns)."""
    # A negative number would be divided differently by runtimes of graphs that are recorded here.
    return (height + window[0] - 1) // window[0], (width + window[1] - 1) // window[1]


def partition(x_BHWC: Tensor, window: Pair, shift: Pair = (0, 0)) -> Tensor:
    """Cut a map into windows, padding it with zeros at the right and the bottom.

    Returns:
        (B, N, T, C), windows and tokens both in row-major order.
    """
    batch, height, width, channels = x_BHWC.shape
    rows, columns = window_grid(height, width, window)
    x_BHWC = F.pad(x_BHWC, (0, 0, 0, columns * window[1] - width, 0, rows * window[0] - height))
    if any(shift):
        x_BHWC = x_BHWC.roll((-shift[0], -shift[1]), dims=(1, 2))
    grid = x_BHWC.reshape(batch, rows, window[0], columns, window[1], channels)
    return grid.transpose(2, 3).reshape(batch, rows * columns, window[0] * window[1], channels)


def merge(x_BNTC: Tensor, size: Pair, window: Pair, shift: Pair = (0, 0)) -> Tensor:
    """Undo :func:`partition` for a map of the given (height, width), dropping the padding.

    Returns:
        (B, H, W, C).
    """
    batch, _, _, channels = x_BNTC.shape
    rows, columns = window_grid(*size, window)
    grid = x_BNTC.reshape(batch, rows, columns, window[0], window[1], channels).transpose(2, 3)
    x_BHWC = grid.reshape(batch, rows * window[0], columns * window[1], channels)
    if any(shift):
        x_BHWC = x_BHWC.roll(shift, dims=(1, 2))
    # A slice would do, but its strides tie a compiled graph to sizes with padding or to those without.
    return F.pad(x_BHWC, (0, 0, 0, size[1] - x_BHWC.shape[2], 0, size[0] - x_BHWC.shape[1]))


def region_ids(height: int, width: int, window: Pair, shift: Pair, device: torch.device | None = None) -> Tensor:
    """Number the regions of the rolled map that were neighbours before the roll.

    The roll carries the first ``shift`` rows and columns to the far side, so the last row and column of windows
    hold tokens from opposite edges; only tokens of the same region may attend to each other.

    Returns:
        (N, T) integers.
    """

    def along(length: int, window: int, shift: int) -> Tensor:
        position = torch.arange(length, device=device)
        if shift == 0:
            return torch.zeros_like(position)
        return (position >= length - window).long() + (position >= length - shift).long()

    rows, columns = window_grid(height, width, window)
    row = along(rows * window[0], window[0], shift[0])
    column = along(columns * window[1], window[1], shift[1])
    ids_HW = 3 * row[:, None] + column[None, :]
    return partition(ids_HW[None, :, :, None], window)[0, :, :, 0]


def central_offsets(table: Tensor, window: Pair, smaller: Pair) -> Tensor:
    """Return the rows of a bias table, of a window, that a smaller window needs: those of the offsets within it."""
    if smaller == window:
        return table
    offsets = table.reshape(2 * window[0] - 1, 2 * window[1] - 1, -1)
    rows, columns = (slice(side - less, side + less - 1) for side, less in zip(window, smaller, strict=True))
    return offsets[rows, columns].flatten(0, 1)


def relative_position_bias(table: Tensor, window: Pair) -> Tensor:
    """Expand a bias table over all pairs of tokens of one window.

    Entry (a, q, k) is the table's row for the offset of token q from token k, the order of the official
    ``relative_position_index``. The lookup is a sliding view of the table, so no index buffer exists.

    Args:
        table: ((2 * window height - 1) * (2 * window width - 1), A).

    Returns:
        (A, T, T).
    """
    height, width = window
    tokens = height * width
    offsets = table.reshape(2 * height - 1, 2 * width - 1, -1)
    views = offsets.unfold(0, height, 1).unfold(1, width, 1)  # (qy, qx, A, reversed ky, reversed kx)
    return views.permute(2, 0, 1, 3, 4).flip(3, 4).reshape(-1, tokens, tokens)


def log_spaced_offsets(window: Pair, trained: Pair, device: torch.device | None = None) -> Tensor:
    """Return the offsets of a window's bias table on a logarithmic scale, the coordinates of Swin V2.

    The outermost offsets of the window that the scale was trained with are -1.06 and 1.06, that is log8(1 + 8).

    Args:
        window: the window of the table.
        trained: the window of the scale.
        device: of the result.

    Returns:
        ((2 * window height - 1) * (2 * window width - 1), 2) in float32, in which the published weights were trained.
    """
    sides = []
    for side, trained_side in zip(window, trained, strict=True):
        offsets = torch.arange(1 - side, side, dtype=torch.float32, device=device)
        offsets = offsets / max(trained_side - 1, 1) * 8
        sides.append(offsets.sign() * (offsets.abs() + 1).log2() / math.log2(8))
    return torch.stack(torch.meshgrid(*sides, indexing='ij'), dim=-1).flatten(0, 1)

"""Infer windows from buffers, and resize tables and the weights of image channels."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from swin_dense.ops.layout import resize_position
from swin_dense.ops.windows import Size

# Outside of these, a coordinate buffer is damaged. The outermost coordinate is 1.06 if the window is that of the
# training.
_SMALLEST_COORDINATE, _LARGEST_COORDINATE = 1e-5, 100
_TRAINED_SIDES = range(2, 1 << 16)


def window_of_index(index: Tensor, length: int) -> Size | None:
    """Return the window of a ``relative_position_index`` buffer, T x T entries, for a table of ``length`` rows."""
    tokens = math.isqrt(index.numel())
    index = index.reshape(-1)
    for height in range(1, tokens + 1):
        width = tokens // height
        fits = height * width == tokens and (2 * height - 1) * (2 * width - 1) == length
        # The pair of the first and the last token in the first row has row offset 0 and the largest column offset.
        if fits and index[width - 1] == (height - 1) * (2 * width - 1):
            return height, width
    return None


def windows_of_coordinates(coordinates: Tensor) -> tuple[Size | None, Size | None]:
    """Return the window of a ``relative_coords_table`` buffer of V2, and that of the training, to which it is scaled.

    The buffer is (1, 2 * window height - 1, 2 * window width - 1, 2). None is a window that it does not determine.
    """
    if coordinates.ndim != 4 or coordinates.shape[3] != 2:
        return None, None
    height, width = ((rows + 1) // 2 for rows in coordinates.shape[1:3])
    trained_height = _trained_side(coordinates[..., 0], height)
    trained_width = _trained_side(coordinates[..., 1], width)
    if trained_height is None or trained_width is None:
        return (height, width), None
    return (height, width), (trained_height, trained_width)


def _trained_side(coordinates: Tensor, side: int) -> int | None:
    """Return the side of the window of the training, from coordinates of V2 along that side; None if they are damaged.

    The outermost of them is log2(1 + 8 r) / log2(8), where r = (side - 1) / (trained side - 1).
    """
    outermost = coordinates.double().abs().max().item()
    if not _SMALLEST_COORDINATE < outermost < _LARGEST_COORDINATE:
        return None
    ratio = math.expm1(outermost * math.log(8)) / 8
    trained = round(1 + (side - 1) / ratio)
    return trained if trained in _TRAINED_SIDES else None


def offsets(window: Size) -> Size:
    """Return the number of relative offsets in a window, (rows, columns) of its bias table."""
    return 2 * window[0] - 1, 2 * window[1] - 1


def resize_table(table: Tensor, old: Size, new: Size) -> Tensor:
    """Interpolate a bias table ((2 * height - 1) * (2 * width - 1), A) from one window to another, in tokens."""
    resized = resize_position(table[None], offsets(old), offsets(new))
    return resized[0].flatten(0, 1).contiguous().to(table.dtype)


def adapt_channels(weight: Tensor, channels: int) -> Tensor:
    """Repeat or drop channels of a patch projection (C, channels, p, p), and scale them, as timm does.

    The response to grey images is kept for 1 channel and for multiples of the given number.
    """
    given = weight.shape[1]
    if channels == 1:
        return weight.sum(1, keepdim=True)
    return weight[:, torch.arange(channels) % given] * (given / channels)

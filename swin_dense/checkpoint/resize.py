"""Infer windows from buffers, and resize weights that depend on windows, grids or image channels."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from swin_dense.ops.windows import Pair


def window_of_index(index: Tensor, length: int) -> Pair | None:
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


def window_of_coordinates(coordinates: Tensor) -> Pair:
    """Return the window of a coordinate buffer from its shape."""
    return (coordinates.shape[-3] + 1) // 2, (coordinates.shape[-2] + 1) // 2


def trained_window(coordinates: Tensor) -> Pair | None:
    """Return the pretraining window to which a coordinate buffer is scaled, or None if its values do not determine it.

    The buffer ``relative_coords_table`` is (1, 2 * window height - 1, 2 * window width - 1, 2).
    """
    sides = []
    for axis, side in enumerate(window_of_coordinates(coordinates)):
        outermost = coordinates[..., axis].abs().max().item()
        if not 0 < outermost < math.inf:
            return None
        sides.append(1 + round(8 * (side - 1) / (8**outermost - 1)))
    return sides[0], sides[1]


def offsets(window: Pair) -> Pair:
    """Return the number of relative offsets in a window, (rows, columns) of its bias table."""
    return 2 * window[0] - 1, 2 * window[1] - 1


def resize_table(table: Tensor, old: Pair, new: Pair) -> Tensor:
    """Interpolate a bias table ((2 * height - 1) * (2 * width - 1), A) from one window to another, in tokens."""
    maps = _at_least_float32(table).T.reshape(1, -1, *offsets(old))
    resized = _bicubic(maps, offsets(new))
    return resized.flatten(2)[0].T.contiguous().to(table.dtype)


def resize_position(position: Tensor, old: Pair, new: Pair) -> Tensor:
    """Resize an absolute position embedding (1, L, C) from one grid (H, W) to another by bicubic interpolation."""
    maps = _at_least_float32(position).transpose(1, 2).unflatten(2, old)
    resized = _bicubic(maps, new)
    return resized.flatten(2).transpose(1, 2).contiguous().to(position.dtype)


def adapt_channels(weight: Tensor, channels: int) -> Tensor:
    """Repeat the channels of a patch projection (C, channels, p, p), so that the response to grey images is kept."""
    given = weight.shape[1]
    if channels == 1:
        return weight.sum(1, keepdim=True)
    return weight[:, torch.arange(channels) % given] * (given / channels)


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _bicubic(maps: Tensor, size: Pair) -> Tensor:
    return F.interpolate(maps, size, mode='bicubic')

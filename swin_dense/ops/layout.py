"""The layout of maps, (B, H, W, C): padding, neighbours, positions, and the order of axes that a pyramid has.

A recorded graph must be valid for every size, so some functions have a separate branch for exporters.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from swin_dense.ops import context
from swin_dense.ops.windows import Size, window_grid


def pad_to_multiple(x: Tensor, unit: Size, axis: int = 1) -> Tensor:
    """Pad with zeros at the right and bottom to multiples of a height and a width.

    ``axis`` is that of the height: 1 for a map, (B, H, W, C), and 2 for an image, (B, c, h, w).
    """
    height, width = x.shape[axis : axis + 2]
    rows, columns = window_grid(height, width, unit)
    sides = (0, columns * unit[1] - width, 0, rows * unit[0] - height)
    # Padding by zero would only copy, but a recorded graph must be valid for other sizes.
    if not context.is_tracing() and not any(sides):
        return x
    return torch.constant_pad_nd(x, (0, 0) * (2 - axis) + sides)


def neighbours(x_BHWC: Tensor, stride: int) -> Tensor:
    """Join 2x2 tokens every ``stride`` tokens, with zeros beyond the map.

    Args:
        x_BHWC: a map.
        stride: stride in tokens.

    Returns:
        (B, ceil(H / stride), ceil(W / stride), 4C), ordered by channel and then row by row, as ``nn.Unfold`` does.
    """
    x_BHWC = pad_to_multiple(x_BHWC, (stride, stride))
    if stride != 2:
        x_BHWC = _with_copies(x_BHWC, stride)
    rows = x_BHWC.unflatten(1, (-1, 2)).unbind(2)
    parts = [part for row in rows for part in row.unflatten(2, (-1, 2)).unbind(3)]
    return torch.stack(parts, -1).flatten(3)


def _with_copies(x_BHWC: Tensor, stride: int) -> Tensor:
    """Return a map in which the 2x2 tokens of each place, every ``stride`` tokens, are neighbours of no other place."""
    rows, columns = window_grid(x_BHWC.shape[1], x_BHWC.shape[2], (stride, stride))
    if stride == 1:  # the last pair of rows begins in the last row of the map
        x_BHWC = F.pad(x_BHWC, (0, 0, 0, 1, 0, 1))
    step = torch.arange(2, device=x_BHWC.device)
    row = torch.arange(rows, device=x_BHWC.device)[:, None] * stride + step
    column = torch.arange(columns, device=x_BHWC.device)[:, None] * stride + step
    return x_BHWC.index_select(1, row.flatten()).index_select(2, column.flatten())


def resize_position(position: Tensor, grid: Size, size: Size) -> Tensor:
    """Resize an absolute position embedding bicubically, in float32 or higher precision.

    Args:
        position: (1, L, C).
        grid: (height, width) of the embedding, whose product is L.
        size: (height, width) of the map that the embedding is added to.

    Returns:
        (1, *size, C).
    """
    position = position.unflatten(1, grid)
    if not context.is_exporting() and grid == size:
        return position
    # Not every device supports interpolation in half precision.
    dtype = torch.promote_types(position.dtype, torch.float32)
    position = position.permute(0, 3, 1, 2).to(dtype)
    if context.is_exporting():
        resized = _resize_bicubic(position[0], size)[None]
    else:
        resized = F.interpolate(position, size, mode='bicubic')
    return resized.permute(0, 2, 3, 1)


def to_maps(x_BHWC: Tensor) -> Tensor:
    """Return tokens as contiguous maps, (B, C, H, W)."""
    # Tensor.contiguous would branch on whether a side is 1, which an exported graph must not do.
    return x_BHWC.permute(0, 3, 1, 2).clone(memory_format=torch.contiguous_format)


def _resize_bicubic(x_CHW: Tensor, size: Size) -> Tensor:
    """Resize a map as ``F.interpolate(mode='bicubic')`` does, by weighted sums of four rows and of four columns."""
    channels, height, width = x_CHW.shape
    row, weight = _bicubic_taps(height, size[0], x_CHW)
    rows = x_CHW.index_select(1, row.flatten())
    rows = rows.reshape(channels, size[0], 4, width)
    x_CHW = (rows * weight[:, :, None]).sum(2)
    column, weight = _bicubic_taps(width, size[1], x_CHW)
    columns = x_CHW.index_select(2, column.flatten())
    columns = columns.reshape(channels, *size, 4)
    return (columns * weight).sum(3)


def _bicubic_taps(
    inputs: int,
    outputs: int,
    like: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the indices and weights of the four inputs of every output along one axis: (outputs, 4) each."""
    steep = -0.75  # coefficient of the cubic kernel in torch
    centre = torch.arange(outputs, device=like.device, dtype=like.dtype)
    centre = (centre + 0.5) * inputs / outputs
    source = (centre - 0.5)[:, None]
    tap = source.floor() + torch.arange(-1, 3, device=like.device)
    distance = (source - tap).abs()
    near = ((steep + 2) * distance - (steep + 3)) * distance * distance + 1
    far = ((distance - 5) * distance + 8) * distance * steep - 4 * steep
    weight = torch.where(distance <= 1, near, far)
    index = tap.clamp(0, inputs - 1).long()
    return index, weight

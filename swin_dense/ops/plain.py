"""The operations of a Swin in plain ATen, for exporters, torch.func and gradients of gradients.

:func:`window_attention` is the attention backend 'reference'; the other functions serve the rest of the network. Most
functions have a separate branch for exporters, because an exported graph must be valid for every size. This branch
gathers tokens by computed indices (:mod:`swin_dense.ops.windows`), because runtimes differ in how they handle slices,
padding by zero and negative numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swin_dense.ops import context
from swin_dense.ops.windows import (
    REGION_PENALTY,
    Pair,
    WindowSpec,
    outer,
    region_ids,
    slots,
    sources,
    window_grid,
)

# Maps tokens, (..., C), to their queries, keys and values, (..., 3C).
Projection = Callable[[Tensor], Tensor]


def window_attention(
    x: Tensor,
    project: Projection,
    relative_bias: Tensor | None,
    spec: WindowSpec,
    attn_drop: nn.Module,
) -> Tensor:
    """See :func:`swin_dense.ops.window_attention`; ``attn_drop`` maps the attention weights, (B * N, A, T, T)."""
    size = x.shape[1], x.shape[2]
    heads = spec.num_heads
    qkv_BNTC = project(partition(x, spec.window, spec.shift))
    _, windows, tokens, channels = qkv_BNTC.shape
    channels //= 3
    # The batch is -1 in every reshape: a file for one size then computes no shapes. Core ML allows at most five axes.
    shape = -1, windows, tokens, heads, channels // heads
    parts = qkv_BNTC.chunk(3, -1)
    q, k, v = (part.reshape(shape).transpose(2, 3) for part in parts)  # (B, N, A, T, D) each
    scores = (q * spec.scale) @ k.transpose(3, 4)
    if relative_bias is not None:
        scores = scores + relative_bias.to(scores.dtype)
    if any(spec.shift):
        ids_NT = region_ids(*size, spec.window, spec.shift, x.device)
        is_apart = ids_NT[:, None, :, None] != ids_NT[:, None, None, :]
        scores = scores + REGION_PENALTY * is_apart.to(scores.dtype)
    # The module for dropout takes the windows of all images as one batch.
    weights = scores.softmax(-1)
    weights = weights.reshape(-1, heads, tokens, tokens)
    weights = attn_drop(weights)
    weights = weights.reshape(-1, windows, heads, tokens, tokens)
    out_BNTAD = (weights @ v).transpose(2, 3)
    out_BNTC = out_BNTAD.reshape(-1, windows, tokens, channels)
    return merge(out_BNTC, size, spec.window, spec.shift)


def partition(x: Tensor, window: Pair, shift: Pair) -> Tensor:
    """Pad a map, (B, H, W, C), with zeros, roll it by minus the shift and cut it into windows, (B, N, T, C)."""
    row = sources(x.shape[1], window[0], shift[0], x.device)
    column = sources(x.shape[2], window[1], shift[1], x.device)
    return _take(x, row, column)


def merge(x: Tensor, size: Pair, window: Pair, shift: Pair) -> Tensor:
    """Undo :func:`partition` for a map of the given (height, width): (B, N, T, C) to (B, H, W, C)."""
    tokens = x.shape[2]
    _, columns = window_grid(*size, window)
    window_row, y_in_window = slots(size[0], window[0], shift[0], x.device)
    window_column, x_in_window = slots(size[1], window[1], shift[1], x.device)
    # Slots are numbered window by window, and row by row in a window.
    slot_of_row = window_row * columns * tokens + y_in_window * window[1]
    slot_of_column = window_column * tokens + x_in_window
    slot_HW = slot_of_row[:, None] + slot_of_column
    out = x.flatten(1, 2)
    out = out.index_select(1, slot_HW.flatten())
    return out.unflatten(1, size)


def _take(x: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """Gather the tokens of windows from a map, with zeros outside of it.

    Args:
        x: (B, H, W, C).
        row: (rows, h), the rows of the map in each row of windows.
        column: (columns, w), likewise.

    Returns:
        (B, rows * columns, h * w, C).
    """
    _, height, width, _ = x.shape
    is_outside_y = (row >= height).long()
    is_outside_x = (column >= width).long()
    is_outside = outer(is_outside_y, is_outside_x) > 0
    raster = outer(row * width, column)
    raster = raster.masked_fill(is_outside, 0)
    tokens = x.flatten(1, 2)
    tokens = tokens.index_select(1, raster.flatten())
    tokens = tokens.unflatten(1, raster.shape)
    return tokens.masked_fill(is_outside[:, :, None], 0)


def pad_to_patches(img: Tensor, side: int) -> Tensor:
    """Pad an image, (B, c, h, w), with zeros at the right and bottom to a multiple of ``side``, the patch size."""
    _, _, height, width = img.shape
    rows, columns = window_grid(height, width, (side, side))
    right = columns * side - width
    bottom = rows * side - height
    return F.pad(img, (0, right, 0, bottom))


def pad_to_windows(x: Tensor, window: Pair) -> Tensor:
    """Pad a map, (B, H, W, C), with zeros at the right and bottom to a multiple of the window."""
    rows, columns = window_grid(x.shape[1], x.shape[2], window)
    return _pad(x, rows * window[0], columns * window[1])


def neighbours(x: Tensor, stride: int) -> Tensor:
    """Join 2x2 tokens every ``stride`` tokens, with zeros beyond the map.

    Args:
        x: (B, H, W, C).
        stride: stride in tokens.

    Returns:
        (B, ceil(H / stride), ceil(W / stride), 4C), ordered by channel and then row by row, as ``nn.Unfold`` does.
    """
    rows, columns = window_grid(x.shape[1], x.shape[2], (stride, stride))
    channels = x.shape[3]
    if stride == 2:
        x = _pad(x, rows * 2, columns * 2)
        # Two neighbours in a row of the map are 2C numbers in a row of memory.
        pairs = x.reshape(-1, 2, columns, 2 * channels).transpose(1, 2)
        cells = pairs.clone(memory_format=torch.contiguous_format)  # not reshape: see to_maps
    else:
        cells = _take_neighbours(x, stride, (rows, columns))
    # Copying first by neighbour, and then by channel, is two to four times as fast as one copy.
    by_neighbour = cells.reshape(-1, rows, columns, 4, channels)
    return by_neighbour.transpose(3, 4).flatten(3)


def _take_neighbours(x: Tensor, stride: int, grid: Pair) -> Tensor:
    """Return the 2x2 tokens of each place of the grid, which may overlap: (B, rows * columns, 4, C)."""
    step = torch.arange(2, device=x.device)
    row = torch.arange(grid[0], device=x.device) * stride
    column = torch.arange(grid[1], device=x.device) * stride
    return _take(x, row[:, None] + step, column[:, None] + step)


def _pad(x: Tensor, height: int, width: int) -> Tensor:
    """Pad a map, (B, H, W, C), with zeros at the right and bottom to a size, or cut it there."""
    bottom = height - x.shape[1]
    right = width - x.shape[2]
    # Padding by zero would only copy, but a recorded graph must be valid for other sizes.
    if not context.is_tracing() and bottom == right == 0:
        return x
    return F.pad(x, (0, 0, 0, right, 0, bottom))


def resize_position(position: Tensor, grid: Pair, size: Pair) -> Tensor:
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


def to_maps(x: Tensor) -> Tensor:
    """Return tokens, (B, H, W, C), as contiguous maps, (B, C, H, W)."""
    # Tensor.contiguous would branch on whether a side is 1, which an exported graph must not do.
    return x.permute(0, 3, 1, 2).clone(memory_format=torch.contiguous_format)


def _resize_bicubic(x_CHW: Tensor, size: Pair) -> Tensor:
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

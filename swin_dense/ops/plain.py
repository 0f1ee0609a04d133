"""The operations of a Swin in plain ATen, for compilers, exporters, torch.func and gradients of gradients.

:func:`window_attention` is the attention backend 'reference'; the other functions serve the rest of the network. Most
functions have a separate branch for exporters, because an exported graph must be valid for every size. This branch
gathers tokens by computed indices (:mod:`swin_dense.ops.windows`), because runtimes differ in how they handle slices,
padding by zero and negative numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from swin_dense.ops import context
from swin_dense.ops.windows import REGION_PENALTY, Pair, WindowSpec, merge, partition, region_ids, take, window_grid


def unsupported_reason(qkv: Tensor, spec: WindowSpec) -> str | None:
    return None


def window_attention(
    qkv: Tensor,
    relative_bias: Tensor | None,
    pad_kv: Tensor | None,
    spec: WindowSpec,
    on_weights: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """See :func:`swin_dense.ops.window_attention`; ``on_weights`` takes and returns the weights, (B * N, A, T, T)."""
    height, width, channels = qkv.shape[1], qkv.shape[2], qkv.shape[3] // 3
    rows, columns = window_grid(height, width, spec.window)
    padding_C = qkv.new_zeros(3 * channels) if pad_kv is None else F.pad(pad_kv, (channels, 0)).to(qkv.dtype)
    windows = partition(qkv, spec.window, spec.shift, padding_C)
    q_BNTAD, k_BNTAD, v_BNTAD = (
        part.reshape(-1, rows * columns, spec.tokens, spec.num_heads, channels // spec.num_heads)
        for part in windows.chunk(3, 3)
    )
    scores = (q_BNTAD * spec.scale).transpose(2, 3) @ k_BNTAD.permute(0, 1, 3, 4, 2)
    if relative_bias is not None:
        scores = scores + relative_bias.to(scores.dtype)
    if any(spec.shift):
        ids_NT = region_ids(height, width, spec.window, spec.shift, qkv.device)
        is_apart = ids_NT[:, None, :, None] != ids_NT[:, None, None, :]
        scores = scores + REGION_PENALTY * is_apart.to(scores.dtype)
    weights = scores.softmax(-1)
    if spec.dropout:  # dropout with rate 0 would still be a node of the graph, and some runtimes do not support it
        weights = F.dropout(weights, spec.dropout)
    if on_weights is not None:
        weights = on_weights(weights.flatten(0, 1)).reshape(weights.shape)
    out = (weights @ v_BNTAD.transpose(2, 3)).transpose(2, 3).flatten(3)
    return merge(out, (height, width), spec.window, spec.shift)


def pad_to_patches(img: Tensor, side: int) -> Tensor:
    """Pad an image, (B, c, h, w), with zeros at the right and bottom to a multiple of ``side``, the patch size."""
    rows, columns = window_grid(img.shape[2], img.shape[3], (side, side))
    pads = columns * side - img.shape[3], rows * side - img.shape[2]
    return F.pad(img, (0, pads[0], 0, pads[1])) if context.is_tracing() or any(pads) else img


def to_channels_last(img: Tensor) -> Tensor:
    """Return an image whose convolution writes channels last, so that its permutation to (B, H, W, C) needs no copy."""
    if context.is_exporting() or context.is_transformed():  # torch.func.vmap does not support memory formats
        return img
    return img.contiguous(memory_format=torch.channels_last)


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
    if context.is_exporting():
        return _take_neighbours(x, stride, (rows, columns))
    x = _pad(x, (rows - 1) * stride + 2, (columns - 1) * stride + 2)
    pairs = x.unfold(1, 2, stride).unfold(2, 2, stride).permute(0, 1, 2, 4, 5, 3)  # (B, H', W', row, column, C)
    # Copying first by neighbour, and then by channel, is two to four times as fast as one copy.
    return pairs.flatten(3, 4).transpose(3, 4).flatten(3)


def _take_neighbours(x: Tensor, stride: int, grid: Pair) -> Tensor:
    """Do the same for an exporter."""
    step = torch.arange(2, device=x.device)
    y_source, x_source = (torch.arange(side, device=x.device)[:, None] * stride + step for side in grid)
    joined = take(x, y_source[:, None, :, None], x_source[None, :, None, :], x.new_zeros(x.shape[3]))
    return joined.reshape(-1, *grid, 4, x.shape[3]).transpose(3, 4).flatten(3)


def _pad(x: Tensor, height: int, width: int) -> Tensor:
    """Pad a map, (B, H, W, C), with zeros at the right and bottom to a size, or cut it there."""
    pads = height - x.shape[1], width - x.shape[2]
    # A recorded graph must be valid for other sizes, so it always pads; otherwise, padding by zero would only copy.
    return F.pad(x, (0, 0, 0, pads[1], 0, pads[0])) if context.is_tracing() or any(pads) else x


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
    position = position.permute(0, 3, 1, 2).to(torch.promote_types(position.dtype, torch.float32))
    if context.is_exporting():
        return _resize_bicubic(position[0], size)[None].permute(0, 2, 3, 1)
    return F.interpolate(position, size, mode='bicubic').permute(0, 2, 3, 1)


def to_maps(x: Tensor) -> Tensor:
    """Return tokens, (B, H, W, C), as contiguous maps, (B, C, H, W)."""
    # Tensor.contiguous would branch on whether a side is 1, which an exported graph must not do.
    return x.permute(0, 3, 1, 2).clone(memory_format=torch.contiguous_format)


def _resize_bicubic(x_CHW: Tensor, size: Pair) -> Tensor:
    """Resize a map as ``F.interpolate(mode='bicubic')`` does, by weighted sums of four rows and of four columns."""
    channels, height, width = x_CHW.shape
    row, weight = _bicubic_taps(height, size[0], x_CHW)
    x_CHW = (x_CHW.index_select(1, row.flatten()).reshape(channels, size[0], 4, width) * weight[:, :, None]).sum(2)
    column, weight = _bicubic_taps(width, size[1], x_CHW)
    return (x_CHW.index_select(2, column.flatten()).reshape(channels, *size, 4) * weight).sum(3)


def _bicubic_taps(inputs: int, outputs: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices and weights of the four inputs of every output along one axis: (outputs, 4) each."""
    steep = -0.75  # coefficient of the cubic kernel in torch
    source = (torch.arange(outputs, device=like.device, dtype=like.dtype) + 0.5) * inputs / outputs - 0.5
    tap = source.floor()[:, None] + torch.arange(-1, 3, device=like.device)
    distance = (source[:, None] - tap).abs()
    near = ((steep + 2) * distance - (steep + 3)) * distance * distance + 1
    far = ((distance - 5) * distance + 8) * distance * steep - 4 * steep
    return tap.clamp(0, inputs - 1).long(), torch.where(distance <= 1, near, far)

"""A Swin's geometry for graphs that are recorded once and hold for every size: traces, exports.

Recorded code must not branch on a size, and runtimes differ in what they make of negative numbers, of slices and of
padding by nothing. So here every token is looked up where it lies: one gather pads, rolls and cuts, and another one
puts together and crops. Sizes only enter as operands of ``+``, ``*``, ``//`` and comparisons of non-negative integers.

Suffixes and conventions are those of :mod:`swin_dense.windows`, whose functions these equal.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from swin_dense.ops.reference import REGION_PENALTY
from swin_dense.windows import Pair, window_grid


def window_attention(
    qkv: Tensor,
    relative_bias: Tensor | None,
    pad_kv: Tensor | None,
    num_heads: int,
    window_size: Pair,
    shift: Pair,
    scale: float,
    dropout_p: float,
) -> Tensor:
    """See :func:`swin_dense.ops.window_attention`."""
    height, width, channels = qkv.shape[1], qkv.shape[2], qkv.shape[3] // 3
    rows, columns = window_grid(height, width, window_size)
    tokens = window_size[0] * window_size[1]
    slot_C = qkv.new_zeros(3 * channels) if pad_kv is None else F.pad(pad_kv, (channels, 0)).to(qkv.dtype)
    windows = partition(qkv, window_size, shift, slot_C)
    q_BNTAD, k_BNTAD, v_BNTAD = (
        part.reshape(-1, rows * columns, tokens, num_heads, channels // num_heads) for part in windows.chunk(3, 3)
    )
    scores = (q_BNTAD * scale).transpose(2, 3) @ k_BNTAD.permute(0, 1, 3, 4, 2)
    if relative_bias is not None:
        scores = scores + relative_bias.to(scores.dtype)
    if any(shift):
        ids_NT = region_ids(height, width, window_size, shift, qkv.device)
        is_apart = ids_NT[:, None, :, None] != ids_NT[:, None, None, :]
        scores = scores + REGION_PENALTY * is_apart.to(scores.dtype)
    weights = scores.softmax(-1)
    if dropout_p:  # a dropout of nothing would still be a node, and one that some runtimes refuse
        weights = F.dropout(weights, dropout_p)
    out = (weights @ v_BNTAD.transpose(2, 3)).transpose(2, 3).flatten(3)
    return merge(out, (height, width), window_size, shift)


def partition(x_BHWC: Tensor, window: Pair, shift: Pair, slot_C: Tensor) -> Tensor:
    """Cut a map into windows, with ``slot_C`` in the slots that hold no token.

    Returns:
        (B, N, T, C).
    """
    height, width, channels = x_BHWC.shape[1:]
    rows, columns = window_grid(height, width, window)
    y = _sources(rows, window[0], shift[0], x_BHWC.device)[:, None, :, None]
    x = _sources(columns, window[1], shift[1], x_BHWC.device)[None, :, None, :]
    return _take(x_BHWC, y, x, slot_C).reshape(-1, rows * columns, window[0] * window[1], channels)


def merge(x_BNTC: Tensor, size: Pair, window: Pair, shift: Pair) -> Tensor:
    """Undo :func:`partition` for a map of the given (height, width), dropping the padding.

    Returns:
        (B, H, W, C).
    """
    rows, columns = window_grid(*size, window)
    row, y = _slots(size[0], rows, window[0], shift[0], x_BNTC.device)
    column, x = _slots(size[1], columns, window[1], shift[1], x_BNTC.device)
    window_HW = row[:, None] * columns + column
    slot_HW = window_HW * (window[0] * window[1]) + y[:, None] * window[1] + x
    return x_BNTC.flatten(1, 2).index_select(1, slot_HW.flatten()).reshape(-1, *size, x_BNTC.shape[3])


def region_ids(height: int, width: int, window: Pair, shift: Pair, device: torch.device) -> Tensor:
    """Number the regions of the rolled map that were neighbours before the roll.

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


def neighbours(x_BHWC: Tensor, stride: int) -> Tensor:
    """Join 2x2 tokens every ``stride`` tokens: top left, bottom left, top right, bottom right, zeros beyond the map.

    Returns:
        (B, ceil(H / stride), ceil(W / stride), 4C).
    """
    height, width, channels = x_BHWC.shape[1:]
    rows, columns = window_grid(height, width, (stride, stride))
    step = torch.arange(2, device=x_BHWC.device)
    y = torch.arange(rows, device=x_BHWC.device)[:, None] * stride + step
    x = torch.arange(columns, device=x_BHWC.device)[:, None] * stride + step
    joined = _take(x_BHWC, y[:, None, None, :], x[None, :, :, None], x_BHWC.new_zeros(channels))
    return joined.reshape(-1, rows, columns, 4 * channels)


def resize_bicubic(x_CHW: Tensor, size: Pair) -> Tensor:
    """Resize a map as ``F.interpolate(mode='bicubic')`` does, as weighted sums of four rows and of four columns.

    Returns:
        (C, *size), in the dtype of the map.
    """
    channels, height, width = x_CHW.shape
    row, weight = _bicubic_taps(height, size[0], x_CHW)
    x_CHW = (x_CHW.index_select(1, row.flatten()).reshape(channels, size[0], 4, width) * weight[:, :, None]).sum(2)
    column, weight = _bicubic_taps(width, size[1], x_CHW)
    return (x_CHW.index_select(2, column.flatten()).reshape(channels, *size, 4) * weight).sum(3)


def _take(x_BHWC: Tensor, y: Tensor, x: Tensor, slot_C: Tensor) -> Tensor:
    """Return the tokens at (y, x), broadcast against each other, or ``slot_C`` beyond the map: (B, numbers, C)."""
    height, width = x_BHWC.shape[1:3]
    is_token = (y < height) & (x < width)
    raster = torch.where(is_token, y * width + x, 0)
    return torch.where(is_token.reshape(-1, 1), x_BHWC.flatten(1, 2).index_select(1, raster.flatten()), slot_C)


def _sources(count: int, window: int, shift: int, device: torch.device) -> Tensor:
    """Return, along one axis, which row of the padded map each slot of each window shows: (count, window)."""
    source = torch.arange(count * window, device=device).reshape(count, window) + shift
    return torch.where(source >= count * window, source - count * window, source)


def _slots(side: int, count: int, window: int, shift: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return, along one axis, in which window each row of the map lies, and where within it: (side,) each."""
    slot = torch.arange(side, device=device) - shift
    slot = torch.where(slot < 0, slot + count * window, slot)
    return slot // window, slot % window


def _bicubic_taps(inputs: int, outputs: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return which four inputs along one axis make up every output, and their weights: (outputs, 4) each."""
    steep = -0.75  # torch's choice of the cubic
    source = (torch.arange(outputs, device=like.device, dtype=like.dtype) + 0.5) * inputs / outputs - 0.5
    tap = source.floor()[:, None] + torch.arange(-1, 3, device=like.device)
    distance = (source[:, None] - tap).abs()
    near = ((steep + 2) * distance - (steep + 3)) * distance * distance + 1
    far = ((distance - 5) * distance + 8) * distance * steep - 4 * steep
    return tap.clamp(0, inputs - 1).long(), torch.where(distance <= 1, near, far)

"""Window attention in composable ATen operations, for exporters, torch.func and gradients of gradients.

Tokens are gathered by computed indices (:mod:`swin_dense.ops.windows`), because a graph that is recorded from them must
be valid for every size.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from swin_dense.ops import layout
from swin_dense.ops.windows import (
    Grid,
    Size,
    WindowSpec,
    region_masks,
    relative_position_bias,
    slots_of_tokens,
    slots_of_windows,
)

# Maps tokens, (..., C), to their queries, keys and values, (..., 3C).
Projection = Callable[[Tensor], Tensor]


def attend_by_plain_operations(
    x_BHWC: Tensor,
    project: Projection,
    table_PA: Tensor | None,
    spec: WindowSpec,
    attn_drop: nn.Module,
) -> Tensor:
    """See :func:`swin_dense.ops.window_attention`; ``attn_drop`` maps the attention weights, (B * N, A, T, T)."""
    grid = Grid(x_BHWC.shape[1:3], spec.window, spec.shift)
    tokens_NT, regions_NT = slots_of_windows(grid, x_BHWC.device)
    bias_ATT = None if table_PA is None else relative_position_bias(table_PA, spec.window)
    masks_N1TT = region_masks(regions_NT) if any(spec.shift) else None
    qkv_BSC = project(partition(x_BHWC, spec.window, tokens_NT))
    return merge(attend(qkv_BSC, bias_ATT, masks_N1TT, spec, attn_drop), grid)


def attend(
    qkv_BSC: Tensor,
    bias_ATT: Tensor | None,
    masks_N1TT: Tensor | None,
    spec: WindowSpec,
    attn_drop: nn.Module,
) -> Tensor:
    """Attend within windows: ``softmax(scale * q @ k.T + bias + mask) @ v``; the softmax is in float32 or higher.

    Args:
        qkv_BSC: queries, keys and values of the slots of all windows, one after the other, (B, S, 3C).
        bias_ATT: position bias or None.
        masks_N1TT: the mask of each window of an image, or None.
        spec: the settings.
        attn_drop: maps the attention weights, (M, A, T, T).

    Returns:
        (B, S, C).
    """
    qkv_MTC = qkv_BSC.flatten(0, 1).unflatten(0, (-1, math.prod(spec.window)))
    qkv_MT3AD = qkv_MTC.unflatten(2, (3, spec.num_heads, -1))  # heads may have been pruned
    q_MATD, k_MATD, v_MATD = (part.transpose(1, 2) for part in qkv_MT3AD.unbind(2))
    scores_MATT = (q_MATD * spec.scale) @ k_MATD.transpose(2, 3)
    scores_MATT = scores_MATT.to(torch.promote_types(scores_MATT.dtype, torch.float32))
    if bias_ATT is not None:
        scores_MATT = scores_MATT + bias_ATT
    if masks_N1TT is not None:
        scores_MATT = (scores_MATT.unflatten(0, (-1, masks_N1TT.shape[0])) + masks_N1TT).flatten(0, 1)
    out_MATD = attn_drop(scores_MATT.softmax(-1).to(v_MATD.dtype)) @ v_MATD
    return out_MATD.transpose(1, 2).flatten(0, 1).unflatten(0, (-1, qkv_BSC.shape[1])).flatten(2)


def partition(x_BHWC: Tensor, window: Size, tokens_NT: Tensor) -> Tensor:
    """Pad a map with zeros, roll it and cut it into windows, by the token in each of their slots: (B, S, C)."""
    padded = layout.pad_to_multiple(x_BHWC, window)
    return padded.flatten(1, 2).index_select(1, tokens_NT.flatten())


def merge(x_BSC: Tensor, grid: Grid) -> Tensor:
    """Undo :func:`partition`: (B, H, W, C)."""
    slots_HW = slots_of_tokens(grid, x_BSC.device)
    return x_BSC.index_select(1, slots_HW.flatten()).unflatten(1, grid.size)

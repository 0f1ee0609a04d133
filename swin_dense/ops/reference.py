"""Window attention in composable ATen operations, for exporters, torch.func and gradients of gradients.

Tokens are gathered by computed indices (:mod:`swin_dense.ops.windows`), because a graph that is recorded from them must
be valid for every size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from swin_dense.ops import layout
from swin_dense.ops.windows import (
    Grid,
    WindowSpec,
    region_ids,
    region_masks,
    relative_position_bias,
    slots_of_tokens,
    tokens_of_slots,
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
    _, height, width, _ = x_BHWC.shape
    grid = Grid((height, width), spec.window, spec.shift)
    x_BNTC = partition(x_BHWC, grid)
    bias_ATT = None if table_PA is None else relative_position_bias(table_PA, spec.window)
    masks_N1TT = region_masks(region_ids(grid, x_BHWC.device)) if any(spec.shift) else None
    qkv_BNTC = project(x_BNTC)
    _, num_windows, num_tokens, channels = qkv_BNTC.shape
    # Heads may have been pruned. The batch is -1 in every reshape: a file for one size then computes no shapes.
    qkv_MT3AD = qkv_BNTC.reshape(-1, num_tokens, 3, spec.num_heads, channels // 3 // spec.num_heads)
    out_MATD = attend(qkv_MT3AD, bias_ATT, masks_N1TT, spec.scale, attn_drop)
    out_BNTC = out_MATD.transpose(1, 2).reshape(-1, num_windows, num_tokens, channels // 3)
    return merge(out_BNTC, grid)


def attend(
    qkv_MT3AD: Tensor,
    bias_ATT: Tensor | None,
    masks_N1TT: Tensor | None,
    scale: float,
    drop: Callable[[Tensor], Tensor],
) -> Tensor:
    """Attend within windows: ``softmax(scale * q @ k.T + bias + mask) @ v``; the softmax is in float32 or higher.

    Args:
        qkv_MT3AD: queries, keys and values, image by image.
        bias_ATT: position bias or None.
        masks_N1TT: the mask of each window of an image, or None.
        scale: factor on the query-key product.
        drop: maps the attention weights, (M, A, T, T).

    Returns:
        (M, A, T, D).
    """
    q_MATD, k_MATD, v_MATD = (part.transpose(1, 2) for part in qkv_MT3AD.unbind(2))
    scores_MATT = (q_MATD * scale) @ k_MATD.transpose(2, 3)
    scores_MATT = scores_MATT.to(torch.promote_types(scores_MATT.dtype, torch.float32))
    if bias_ATT is not None:
        scores_MATT = scores_MATT + bias_ATT
    if masks_N1TT is not None:
        scores_BNATT = scores_MATT.unflatten(0, (-1, masks_N1TT.shape[0])) + masks_N1TT
        scores_MATT = scores_BNATT.flatten(0, 1)
    weights_MATT = drop(scores_MATT.softmax(-1).to(v_MATD.dtype))
    return weights_MATT @ v_MATD


def partition(x_BHWC: Tensor, grid: Grid) -> Tensor:
    """Pad a map with zeros, roll it by minus the shift and cut it into windows, (B, N, T, C)."""
    tokens_NT = tokens_of_slots(grid, x_BHWC.device)
    padded = layout.pad_to_multiple(x_BHWC, grid.window).flatten(1, 2)
    return padded.index_select(1, tokens_NT.flatten()).unflatten(1, tokens_NT.shape)


def merge(x_BNTC: Tensor, grid: Grid) -> Tensor:
    """Undo :func:`partition`: (B, H, W, C)."""
    slots_HW = slots_of_tokens(grid, x_BNTC.device)
    return x_BNTC.flatten(1, 2).index_select(1, slots_HW.flatten()).unflatten(1, grid.size)

"""Window attention in composable ATen operations, for exporters, torch.func and gradients of gradients.

Tokens are gathered by computed indices (:mod:`swin_dense.ops.windows`), because a graph that is recorded from them must
be valid for every size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from swin_dense.ops import layout
from swin_dense.ops.windows import REGION_PENALTY, Pair, WindowSpec, region_ids, slots_of_tokens, tokens_of_slots

# Maps tokens, (..., C), to their queries, keys and values, (..., 3C).
Projection = Callable[[Tensor], Tensor]


def window_attention(
    x_BHWC: Tensor,
    project: Projection,
    bias_ATT: Tensor | None,
    spec: WindowSpec,
    attn_drop: nn.Module,
) -> Tensor:
    """See :func:`swin_dense.ops.window_attention`; ``attn_drop`` maps the attention weights, (B * N, A, T, T)."""
    _, height, width, _ = x_BHWC.shape
    qkv_BNTC = project(partition(x_BHWC, spec.window, spec.shift))
    _, num_windows, num_tokens, channels = qkv_BNTC.shape
    channels //= 3  # fewer than those of the map where heads were pruned
    # The batch is -1 in every reshape: a file for one size then computes no shapes. Core ML allows at most five axes.
    shape_BNTAD = -1, num_windows, num_tokens, spec.num_heads, channels // spec.num_heads
    q_BNATD, k_BNATD, v_BNATD = (part.reshape(shape_BNTAD).transpose(2, 3) for part in qkv_BNTC.chunk(3, -1))
    regions_NT = region_ids(height, width, spec.window, spec.shift, x_BHWC.device) if any(spec.shift) else None

    def drop(weights_BNATT: Tensor) -> Tensor:
        weights = attn_drop(weights_BNATT.reshape(-1, spec.num_heads, num_tokens, num_tokens))
        return weights.reshape(-1, num_windows, spec.num_heads, num_tokens, num_tokens)

    out_BNATD = attend(q_BNATD, k_BNATD, v_BNATD, bias_ATT, regions_NT, spec.scale, drop)
    out_BNTC = out_BNATD.transpose(2, 3).reshape(-1, num_windows, num_tokens, channels)
    return merge(out_BNTC, (height, width), spec.window, spec.shift)


def attend(
    q_BNATD: Tensor,
    k_BNATD: Tensor,
    v_BNATD: Tensor,
    bias_ATT: Tensor | None,
    regions_NT: Tensor | None,
    scale: float,
    drop: Callable[[Tensor], Tensor],
) -> Tensor:
    """Attend within windows: ``softmax(scale * q @ k.T + bias + mask) @ v``; the softmax is in float32 or higher.

    Args:
        q_BNATD: queries.
        k_BNATD: keys.
        v_BNATD: values.
        bias_ATT: position bias or None.
        regions_NT: only tokens of the same region attend to each other; None for one region.
        scale: factor on the query-key product.
        drop: maps the attention weights, (B, N, A, T, T).

    Returns:
        (B, N, A, T, D).
    """
    scores_BNATT = (q_BNATD * scale) @ k_BNATD.transpose(3, 4)
    scores_BNATT = scores_BNATT.to(torch.promote_types(scores_BNATT.dtype, torch.float32))
    if bias_ATT is not None:
        scores_BNATT = scores_BNATT + bias_ATT.to(scores_BNATT.dtype)
    if regions_NT is not None:
        is_apart_N1TT = regions_NT[:, None, :, None] != regions_NT[:, None, None, :]
        scores_BNATT = scores_BNATT + REGION_PENALTY * is_apart_N1TT.to(scores_BNATT.dtype)
    weights_BNATT = drop(scores_BNATT.softmax(-1).to(v_BNATD.dtype))
    return weights_BNATT @ v_BNATD


def partition(x_BHWC: Tensor, window: Pair, shift: Pair) -> Tensor:
    """Pad a map with zeros, roll it by minus the shift and cut it into windows, (B, N, T, C)."""
    tokens_NT = tokens_of_slots(x_BHWC.shape[1], x_BHWC.shape[2], window, shift, x_BHWC.device)
    padded = layout.pad_to_multiple(x_BHWC, window).flatten(1, 2)
    return padded.index_select(1, tokens_NT.flatten()).unflatten(1, tokens_NT.shape)


def merge(x_BNTC: Tensor, size: Pair, window: Pair, shift: Pair) -> Tensor:
    """Undo :func:`partition` for a map of the given (height, width), in tokens: (B, H, W, C)."""
    slots_HW = slots_of_tokens(*size, window, shift, x_BNTC.device)
    return x_BNTC.flatten(1, 2).index_select(1, slots_HW.flatten()).unflatten(1, size)

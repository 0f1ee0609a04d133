"""Window attention in plain ATen operations, for exporters, torch.func and gradients of gradients.

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
    x: Tensor,
    project: Projection,
    relative_bias: Tensor | None,
    spec: WindowSpec,
    attn_drop: nn.Module,
) -> Tensor:
    """See :func:`swin_dense.ops.window_attention`; ``attn_drop`` maps the attention weights, (B * N, A, T, T)."""
    size = x.shape[1], x.shape[2]
    qkv_BNTC = project(partition(x, spec.window, spec.shift))
    _, windows, tokens, channels = qkv_BNTC.shape
    channels //= 3
    # The batch is -1 in every reshape: a file for one size then computes no shapes. Core ML allows at most five axes.
    shape = -1, windows, tokens, spec.num_heads, channels // spec.num_heads
    q, k, v = (part.reshape(shape).transpose(2, 3) for part in qkv_BNTC.chunk(3, -1))
    regions_NT = region_ids(*size, spec.window, spec.shift, x.device) if any(spec.shift) else None

    def drop(weights_BNATT: Tensor) -> Tensor:
        weights = attn_drop(weights_BNATT.reshape(-1, spec.num_heads, tokens, tokens))
        return weights.reshape(-1, windows, spec.num_heads, tokens, tokens)

    out_BNATD = attend(q, k, v, relative_bias, regions_NT, spec.scale, drop)
    out_BNTC = out_BNATD.transpose(2, 3).reshape(-1, windows, tokens, channels)
    return merge(out_BNTC, size, spec.window, spec.shift)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    relative_bias: Tensor | None,
    regions_NT: Tensor | None,
    scale: float,
    drop: Callable[[Tensor], Tensor],
) -> Tensor:
    """Attend within windows: ``softmax(scale * q @ k.T + bias + mask) @ v``; the softmax is in float32 or higher.

    Args:
        q: (B, N, A, T, D), as ``k`` and ``v``.
        k: likewise.
        v: likewise.
        relative_bias: (A, T, T) or None.
        regions_NT: only tokens of the same region attend to each other; None for one region.
        scale: factor on the query-key product.
        drop: maps the attention weights, (B, N, A, T, T).

    Returns:
        (B, N, A, T, D).
    """
    scores = (q * scale) @ k.transpose(3, 4)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if relative_bias is not None:
        scores = scores + relative_bias.to(scores.dtype)
    if regions_NT is not None:
        is_apart = regions_NT[:, None, :, None] != regions_NT[:, None, None, :]
        scores = scores + REGION_PENALTY * is_apart.to(scores.dtype)
    weights = drop(scores.softmax(-1).to(v.dtype))
    return weights @ v


def partition(x: Tensor, window: Pair, shift: Pair) -> Tensor:
    """Pad a map, (B, H, W, C), with zeros, roll it by minus the shift and cut it into windows, (B, N, T, C)."""
    tokens_NT = tokens_of_slots(x.shape[1], x.shape[2], window, shift, x.device)
    padded = layout.pad_to_windows(x, window).flatten(1, 2)
    return padded.index_select(1, tokens_NT.flatten()).unflatten(1, tokens_NT.shape)


def merge(x: Tensor, size: Pair, window: Pair, shift: Pair) -> Tensor:
    """Undo :func:`partition` for a map of the given (height, width): (B, N, T, C) to (B, H, W, C)."""
    slots_HW = slots_of_tokens(*size, window, shift, x.device)
    out = x.flatten(1, 2).index_select(1, slots_HW.flatten())
    return out.unflatten(1, size)

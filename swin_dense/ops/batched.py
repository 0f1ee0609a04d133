"""Window attention by batched matrix products, forward and backward, over rows of one head each.

Tokens come as rows, and the padding token is one more row behind them. One gather then brings every head of every
window together, (3, N, A, T, D), without padding, rolling or permuting, and one gather brings the results back. On a
CPU that is faster than torch's fused kernel, which gains little from a second core for sequences as short as a window.
Large windows go forward through that kernel, as their weights are dear to store.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from swin_dense.ops.plan import CACHE_BYTES, Cache, plan_windows
from swin_dense.windows import Pair

# What a direction is found with, of a vector of no length too; that of torch.nn.functional.normalize.
SMALLEST_LENGTH = 1e-12


@dataclass(frozen=True)
class Layout:
    """Where the rows of a batch of B maps of L tokens in all are found, head by head.

    Attributes:
        heads: A.
        window_tokens: T.
        masks: windows that share a region mask, as (number of windows, (T, T) or None), in window order.
        gather: (3 * N * A * T,) row of qkv, ((L + 1) * 3 * A, D), for every place of (3, N, A, T).
        gather_out: (N * A * T,) row of the output, ((L + 1) * A, D), for every place of (N, A, T).
        scatter: (L * 3 * A,) the inverse of ``gather``, without the padding token.
        scatter_out: (L * A,) the inverse of ``gather_out``, without the padding token.
        padding: (2, A, P) the P places among (3, N, A, T) of each head's padding keys, and of its padding values.
    """

    heads: int
    window_tokens: int
    masks: tuple[tuple[int, Tensor | None], ...]
    gather: Tensor
    gather_out: Tensor
    scatter: Tensor
    scatter_out: Tensor
    padding: Tensor

    @property
    def bytes(self) -> int:
        masks = [mask for _, mask in self.masks if mask is not None]
        tensors = [self.gather, self.gather_out, self.scatter, self.scatter_out, self.padding, *masks]
        return sum(tensor.nbytes for tensor in tensors)


def layout_of(size: tuple[int, int, int], window: Pair, shift: Pair, heads: int) -> Layout:
    """Return the layout of a batch of maps, (B, height, width). Its tensors are shared: leave them as they are."""
    return _cache.get(size, window, shift, heads)


class Attended(NamedTuple):
    """What the windows of a map hold after attention.

    Attributes:
        heads: (3, N * A, T, D) queries, keys and values; queries and keys at length 1 where directions are compared.
        lengths: (2, N * A, T, 1) which queries and keys had before, or None where products are compared.
        weights: (N * A, T, T) of the attention, or None where windows have more than twice as many tokens as a head has
            channels: there they are dearer to store than to compute again.
    """

    heads: Tensor
    lengths: Tensor | None
    weights: Tensor | None


def attend(
    qkv: Tensor, bias: Tensor, layout: Layout, scale: float, cosine_scales: Tensor | None
) -> tuple[Tensor, Attended]:
    """Attend within windows.

    Args:
        qkv: (L + 1, 3C) queries, keys and values; those of a padding token in the last row.
        bias: (A, T, T) added to the scores of every window.
        layout: of the map.
        scale: factor on the scores.
        cosine_scales: (A,) where the score is the cosine of the angle between query and key, the factor of each head
            on it; None where it is their product.

    Returns:
        The output, (L, C), and what :func:`attend_backward` starts from.
    """
    heads = qkv.view(-1, qkv.shape[1] // 3 // layout.heads).index_select(0, layout.gather)
    heads = heads.view(3, -1, layout.window_tokens, heads.shape[1])
    lengths = None
    if cosine_scales is not None:
        directions = heads[:2]
        lengths = torch.linalg.vector_norm(directions, dim=-1, keepdim=True).clamp_min_(SMALLEST_LENGTH)
        directions /= lengths
    weights = None
    if layout.window_tokens <= 2 * heads.shape[3]:
        weights = attention_weights(heads, bias, layout, scale, cosine_scales)
        out = torch.bmm(weights, heads[2])
    else:
        out = _attend_without_weights(heads, bias, layout, scale, cosine_scales)
    out = out.view(-1, out.shape[2]).index_select(0, layout.scatter_out).view(len(qkv) - 1, -1)
    return out, Attended(heads, lengths, weights)


def attend_backward(
    grad_out: Tensor, attended: Attended, bias: Tensor, layout: Layout, scale: float, cosine_scales: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return gradients: of qkv without its last row, (L, 3C), of the padding token's k and v, (2C,), bias and factors.

    Where directions are compared, that of the padding token's k is zero, as its key is.

    Args:
        grad_out: (L + 1, C), zeros in the last row.
        attended: from :func:`attend`.
        bias: as in :func:`attend`, and so are the others.
        layout: of the map.
        scale: factor on the scores.
        cosine_scales: as in :func:`attend`.
    """
    heads, lengths, weights = attended
    if weights is None:
        weights = attention_weights(heads, bias, layout, scale, cosine_scales)
    dim = heads.shape[3]
    q, k, v = heads
    grad_heads = grad_out.view(-1, dim).index_select(0, layout.gather_out).view_as(v)
    grad_weights = torch.bmm(grad_heads, v.transpose(1, 2))
    grad_scores = torch.ops.aten._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
    grads = torch.empty_like(heads)
    torch.baddbmm(q, grad_scores, k, beta=0, alpha=scale, out=grads[0])
    torch.baddbmm(k, grad_scores.transpose(1, 2), _scaled(q, cosine_scales), beta=0, alpha=scale, out=grads[1])
    torch.bmm(weights.transpose(1, 2), grad_heads, out=grads[2])
    grad_scales = None
    if cosine_scales is not None and lengths is not None:
        directions, grad_directions = heads[:2], grads[:2]
        along = (directions * grad_directions).sum(-1, keepdim=True)
        grad_scales = along[0].view(-1, layout.heads, layout.window_tokens).sum((0, 2))
        grad_directions.addcmul_(directions, along, value=-1).div_(lengths)
        grads[0] = _scaled(grads[0], cosine_scales)
    rows = grads.view(-1, dim)
    grad_qkv = rows.index_select(0, layout.scatter).view(len(grad_out) - 1, -1)
    grad_pad = rows[layout.padding].sum(2)
    if cosine_scales is not None:
        grad_pad[0] = 0
    grad_bias = grad_scores.view(-1, layout.heads, *grad_scores.shape[1:]).sum(0)
    return grad_qkv, grad_pad.flatten(), grad_bias, grad_scales


def attention_weights(
    heads: Tensor, bias: Tensor, layout: Layout, scale: float, cosine_scales: Tensor | None
) -> Tensor:
    """Return the weights of :func:`attend` alone, of the heads that it returns."""
    q, k, _ = heads
    scores = q.new_empty(len(q), layout.window_tokens, layout.window_tokens)
    groups = scores.view(-1, *bias.shape).split([windows for windows, _ in layout.masks])
    for group, (_, mask) in zip(groups, layout.masks, strict=True):
        group.copy_(bias if mask is None else bias + mask)
    return scores.baddbmm_(_scaled(q, cosine_scales), k.transpose(1, 2), alpha=scale).softmax(-1)


def _attend_without_weights(
    heads: Tensor, bias: Tensor, layout: Layout, scale: float, cosine_scales: Tensor | None
) -> Tensor:
    """Return the output of the heads, (N * A, T, D), by torch's kernel, which stores no weights."""
    q, k, v = (x.unflatten(0, (-1, layout.heads)) for x in (_scaled(heads[0], cosine_scales), heads[1], heads[2]))
    outs, first = [], 0
    for windows, mask in layout.masks:
        group, score_bias = slice(first, first + windows), bias if mask is None else bias + mask
        outs.append(
            F.scaled_dot_product_attention(q[group], k[group], v[group], attn_mask=score_bias[None], scale=scale)
        )
        first += windows
    return torch.cat(outs).flatten(0, 1)


def _scaled(q: Tensor, cosine_scales: Tensor | None) -> Tensor:
    """Return queries, (N * A, T, D), times the factors of their heads."""
    if cosine_scales is None:
        return q
    return (q.view(-1, len(cosine_scales), *q.shape[1:]) * cosine_scales.view(-1, 1, 1)).view_as(q)


@torch.inference_mode(False)  # a cached inference tensor could not be used in training later
def _build(size: tuple[int, int, int], window: Pair, shift: Pair, heads: int) -> Layout:
    batch, height, width = size
    plan = plan_windows(height, width, window, shift, torch.device('cpu'))
    window_tokens, tokens = window[0] * window[1], batch * height * width
    first = torch.arange(batch, device='cpu').view(-1, 1, 1) * (height * width)
    slots, masks = [], []
    for group in plan.groups:
        raster = group.tokens.view(1, -1, window_tokens) + first
        raster.flatten(1)[:, group.padding] = tokens
        slots.append(raster.flatten(0, 1))
        masks.append((len(slots[-1]), group.mask))
    slots_NT = torch.cat(slots)
    head = torch.arange(heads, device='cpu').view(-1, 1)
    part = torch.arange(3, device='cpu').view(-1, 1, 1, 1)
    gather_out = slots_NT[:, None] * heads + head
    gather = (slots_NT[:, None] * 3 + part) * heads + head
    windows, inside = (slots_NT == tokens).nonzero(as_tuple=True)
    padding = ((part[1:, 0] * len(slots_NT) + windows) * heads + head) * window_tokens + inside
    return Layout(
        heads=heads,
        window_tokens=window_tokens,
        masks=tuple(masks),
        gather=gather.flatten().int(),
        gather_out=gather_out.flatten().int(),
        scatter=_inverse(gather.flatten(), tokens * 3 * heads),
        scatter_out=_inverse(gather_out.flatten(), tokens * heads),
        padding=padding.int(),
    )


def _inverse(gather: Tensor, rows: int) -> Tensor:
    scatter = torch.empty(int(gather.max()) + 1, dtype=torch.int32, device='cpu')
    scatter[gather] = torch.arange(len(gather), dtype=torch.int32, device='cpu')
    return scatter[:rows].clone()


_cache = Cache(CACHE_BYTES, _build)

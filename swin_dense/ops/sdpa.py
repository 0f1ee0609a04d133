"""Window attention through torch's scaled_dot_product_attention, on any device.

One gather rolls the padded map and cuts it into windows, and a second one undoes it. Both are permutations, so the
gradient of each is the other one, whereas autograd would add the gradients one by one to zeros. Windows are ordered by
their mask: only those at the edges of a shifted map have one.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from swin_dense.ops import plain
from swin_dense.ops.windows import REGION_PENALTY, Pair, WindowSpec, outer, region_ids, sources

# Plans of eight image sizes: each of a model's four stages needs two. They take a hundredth of the memory of a map.
MAX_PLANS = 64
# Attention kernels of older versions of torch for CUDA fail on more; the number of blocks of a grid has 16 bits.
MAX_WINDOWS = 65_535


@dataclass(frozen=True)
class Plan:
    """The order of the tokens of a padded map in its windows.

    Attributes:
        order: (N * T,) the token of each slot, as its raster index.
        raster: (N * T,) the inverse permutation.
        sizes: number of slots of each group of windows with the same mask.
        masks: (1, 1, T, T) that is added to the scores of each group, or None.
    """

    order: Tensor
    raster: Tensor
    sizes: list[int]
    masks: list[Tensor | None]


@functools.lru_cache(MAX_PLANS)
@torch.inference_mode(False)  # an inference tensor could not be used in training later
def plan_windows(height: int, width: int, window: Pair, shift: Pair, device: torch.device) -> Plan:
    """Return the plan for maps of height x width tokens. It is cached, so its tensors must not be modified."""
    cpu = torch.device('cpu')  # another one may be torch's default
    row = sources(height, window[0], shift[0], cpu)
    column = sources(width, window[1], shift[1], cpu)
    order_NT = outer(row * column.numel(), column)
    regions_NT = region_ids(height, width, window, shift, cpu)
    kind_N = regions_NT.amax(1)
    orders: list[Tensor] = []
    masks: list[Tensor | None] = []
    for kind in kind_N.unique():
        members = kind_N == kind
        orders.append(order_NT[members].flatten())
        regions_T = regions_NT[members][0]
        is_apart = regions_T[:, None] != regions_T
        mask = (is_apart * REGION_PENALTY).to(device)[None, None]
        masks.append(mask if is_apart.any() else None)
    order = torch.cat(orders)
    raster = torch.empty_like(order)
    raster[order] = torch.arange(len(order), device=cpu)
    return Plan(order.int().to(device), raster.int().to(device), [len(group) for group in orders], masks)


def window_attention(
    x: Tensor, project: plain.Projection, relative_bias: Tensor | None, spec: WindowSpec, dropout: float
) -> Tensor:
    """See :func:`swin_dense.ops.window_attention`; ``dropout`` is the rate of dropped attention weights."""
    height, width = x.shape[1], x.shape[2]
    plan = plan_windows(height, width, spec.window, spec.shift, x.device)
    x = plain.pad_to_windows(x, spec.window)
    qkv = project(_Permute.apply(x.flatten(1, 2), plan.order, plan.raster))
    tokens, channels = math.prod(spec.window), qkv.shape[2] // 3
    if relative_bias is None:
        relative_bias = qkv.new_zeros(1, tokens, tokens)
    bias = relative_bias[None].to(qkv.dtype)
    outs = []
    for group, mask in zip(qkv.split(plan.sizes, 1), plan.masks, strict=True):
        # Of several images, a group of one window would be a view, which keeps all groups beside their copies.
        windows = group.contiguous().view(-1, tokens, 3, spec.num_heads, channels // spec.num_heads)
        added = bias if mask is None else bias + mask.to(qkv.dtype)
        out = _attend(windows, added, spec.scale, dropout)
        outs.append(out.transpose(1, 2).reshape(*group.shape[:2], channels))
    out = outs[0] if len(outs) == 1 else torch.cat(outs, 1)
    return _Permute.apply(out, plan.raster, plan.order).unflatten(1, x.shape[1:3])[:, :height, :width]


def _attend(windows: Tensor, added: Tensor, scale: float, dropout: float) -> Tensor:
    """Attend within windows, (n, T, 3, A, D), a limited number at a time: (n, A, T, D)."""
    if len(windows) > MAX_WINDOWS:
        return torch.cat([_attend(part, added, scale, dropout) for part in windows.split(MAX_WINDOWS)])
    q, k, v = windows.permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=added, dropout_p=dropout, scale=scale)


class _Permute(torch.autograd.Function):
    """Reorder tokens, (B, tokens, C), by a permutation and its inverse."""

    @staticmethod
    def forward(ctx, x, order, inverse):
        ctx.inverse = inverse
        return x.index_select(1, order)

    @staticmethod
    def backward(ctx, grad):
        return grad.index_select(1, ctx.inverse), None, None

"""Window attention through torch's scaled_dot_product_attention, on any device.

One gather does padding, roll and partition, and another gather undoes them. Only the windows at the edges of a shifted
map get a mask; see :mod:`swin_dense.ops.plan`. This does not change any value. Each gather is the inverse of the
other, so their backward passes are gathers too, whereas autograd would scatter-add into zeros.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from swin_dense.ops import context
from swin_dense.ops.plan import Group, Plan, plan_windows
from swin_dense.ops.windows import WindowSpec


def unsupported_reason(qkv: Tensor, spec: WindowSpec) -> str | None:
    return context.plain_reason(qkv)


def window_attention(qkv: Tensor, relative_bias: Tensor | None, pad_kv: Tensor | None, spec: WindowSpec) -> Tensor:
    """See :func:`swin_dense.ops.window_attention`."""
    batch, height, width, channels = qkv.shape[0], qkv.shape[1], qkv.shape[2], qkv.shape[3] // 3
    bias = None if relative_bias is None else relative_bias.to(qkv.dtype)
    if pad_kv is None:
        pad_kv = qkv.new_zeros(2 * channels)
    plan = plan_windows(height, width, spec.window, spec.shift, qkv.device)
    outs = []
    for group, slots in zip(plan.groups, _ToWindows.apply(qkv.flatten(1, 2), pad_kv.to(qkv.dtype), plan), strict=True):
        heads = slots.view(-1, spec.tokens, 3, spec.num_heads, channels // spec.num_heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mask = _score_bias(bias, group, qkv.dtype)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=spec.dropout, scale=spec.scale)
        outs.append(out.transpose(1, 2).reshape(batch, len(group.tokens), channels))
    return _ToRaster.apply(plan, *outs).view(batch, height, width, channels)


class _ToWindows(torch.autograd.Function):
    """Gather (B, H * W, 3C) and the key and value of padding, (2C,), into (B, n * T, 3C) for each group of the plan."""

    @staticmethod
    def forward(ctx, qkv, pad_kv, plan: Plan):
        ctx.plan = plan
        slot = F.pad(pad_kv, (qkv.shape[2] - len(pad_kv), 0))
        return tuple(_gather(qkv, group, slot) for group in plan.groups)

    @staticmethod
    def backward(ctx, *grads):
        grad_qkv = _in_raster_order(ctx.plan, grads) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return grad_qkv, None, None
        channels = grads[0].shape[2] // 3
        in_padding = [
            grad.index_select(1, group.padding)[:, :, channels:].sum((0, 1))
            for grad, group in zip(grads, ctx.plan.groups, strict=True)
        ]
        return grad_qkv, torch.stack(in_padding).sum(0), None


class _ToRaster(torch.autograd.Function):
    """Gather (B, n * T, C) for each group of the plan into (B, H * W, C)."""

    @staticmethod
    def forward(ctx, plan: Plan, *groups):
        ctx.plan = plan
        return _in_raster_order(plan, groups)

    @staticmethod
    def backward(ctx, grad):
        return None, *(_gather(grad, group, grad.new_zeros(grad.shape[2])) for group in ctx.plan.groups)


def _gather(x: Tensor, group: Group, slot: Tensor) -> Tensor:
    """Gather the slots of a group from x, (B, H * W, C), with ``slot``, (C,), in padding slots: (B, n * T, C)."""
    slots = x.index_select(1, group.tokens)
    if len(group.padding):
        slots = slots.index_copy_(1, group.padding, slot.expand(len(x), len(group.padding), -1))
    return slots


def _in_raster_order(plan: Plan, groups: tuple[Tensor, ...]) -> Tensor:
    in_window_order = groups[0] if len(groups) == 1 else torch.cat(groups, 1)
    return in_window_order.index_select(1, plan.slots)


def _score_bias(bias: Tensor | None, group: Group, dtype: torch.dtype) -> Tensor | None:
    if group.mask is None:
        return None if bias is None else bias[None]
    mask = group.mask.to(dtype)
    return mask[None, None] if bias is None else (bias + mask)[None]

"""Window attention through torch's scaled_dot_product_attention, on any device.

One gather rolls the padded map and cuts it into windows, and a second one undoes both and crops the map. Each is the
gradient of the other, whereas autograd would add the gradients one by one to zeros. Windows are ordered by their mask,
which only those at the edges of a shifted map have, so that those of an image with the same mask are a view. Images
stay the first axis, as hooks on the projection expect. On a CPU, a position bias that trains needs products in its
place.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from swin_dense.ops import context, layout, reference
from swin_dense.ops.linear import IS_FASTER_BY_ONEDNN
from swin_dense.ops.windows import (
    REGION_PENALTY,
    Pair,
    WindowSpec,
    region_ids,
    split_edge,
    tokens_of_slots,
    window_grid,
)
from swin_dense.utils import compat

# An operator that torch.compile does not look into. Without it, what is copied here is computed anew for each pair of
# tokens, in a loop without vector instructions.
_stored = compat.custom_op('swin_dense::stored', mutates_args=(), schema='(Tensor x) -> Tensor')(torch.clone)
_stored.register_fake(torch.clone)
_stored.register_autograd(lambda ctx, grad: grad, setup_context=lambda ctx, inputs, output: None)

# Plans of eight image sizes: each of a model's four stages needs two. They take a few hundredths of a map's memory.
MAX_PLANS = 64
# Attention kernels of older versions of torch for CUDA fail on more; the number of blocks of a grid has 16 bits.
MAX_WINDOWS = 65_535
# In numbers. On a GPU, torch's attention copies a mask whose rows do not begin at multiples of it, at every call.
ROW_ALIGNMENT = 8


class Plan(NamedTuple):
    """Where the tokens of a map are in its windows, which are ordered by their mask.

    Attributes:
        size: (height, width) of the map in tokens.
        window: (height, width) in tokens.
        token_of_slot: (N * T,), as its raster index in the padded map.
        slot_of_token: (H * W,).
        groups: number of windows of each group with the same mask.
        masks: (groups, 1, T, T) that are added to the scores.
        regions: (N, T) the region of each slot; only tokens of the same region attend to each other.
    """

    size: Pair
    window: Pair
    token_of_slot: Tensor
    slot_of_token: Tensor
    groups: list[int]
    masks: Tensor
    regions: Tensor


def plan_windows(
    height: int,
    width: int,
    window: Pair,
    shift: Pair,
    device: torch.device,
) -> Plan:
    """Return the plan for maps of height x width tokens."""
    rows, columns = window_grid(height, width, window)

    def by_mask(windows_NT: Tensor) -> list[Tensor]:
        """Return the windows inside, at the right, at the bottom and in the corner, as far as their masks differ."""
        grid = windows_NT.unflatten(0, (rows, columns))
        bands = grid.split(split_edge(rows, shift[0]))
        return [group.flatten(0, 1) for band in bands for group in band.split(split_edge(columns, shift[1]), 1)]

    tokens = by_mask(tokens_of_slots(height, width, window, shift, device))
    regions = by_mask(region_ids(height, width, window, shift, device))
    token_of_slot = torch.cat(tokens).flatten()
    slot_of_token = torch.empty_like(token_of_slot)
    slot_of_token[token_of_slot] = torch.arange(len(token_of_slot), device=device)
    slot_of_token = slot_of_token.view(-1, columns * window[1])[:height, :width]
    # A view for widths without padding, and a copy for others, would be two graphs of torch.compile.
    slot_of_token = slot_of_token.clone(memory_format=torch.contiguous_format).flatten()
    regions_GT = torch.stack([group[0] for group in regions])
    masks = REGION_PENALTY * (regions_GT[:, None, :, None] != regions_GT[:, None, None])
    sizes = [len(group) for group in tokens]
    size = (height, width)
    return Plan(size, window, token_of_slot.int(), slot_of_token.int(), sizes, masks, torch.cat(regions))


# The tensors of a cached plan must not be modified. An inference tensor could not be used in training later.
cached_plan = functools.lru_cache(MAX_PLANS)(torch.inference_mode(False)(plan_windows))


def window_attention(
    x: Tensor,
    project: reference.Projection,
    relative_bias: Tensor | None,
    spec: WindowSpec,
    dropout: float,
) -> Tensor:
    """See :func:`swin_dense.ops.window_attention`; ``dropout`` is the rate of dropped attention weights."""
    # torch.compile traces how a plan is made, so that its graph is valid for other sizes.
    find_plan: Callable[..., Plan] = plan_windows if context.is_recording() else cached_plan
    if x.is_cuda:
        find_plan = gpu_plan
    plan = find_plan(x.shape[1], x.shape[2], spec.window, spec.shift, x.device)
    qkv = project(_Move.apply(x, plan, True))
    heads = qkv.unflatten(2, (3, spec.num_heads, -1))
    # On a CPU, torch's kernel gives a mask, here the position bias, no gradient, and what torch does instead is slower
    # than the parts of attention. So is the kernel in bfloat16 on AMD processors.
    trains_bias = relative_bias is not None and relative_bias.requires_grad
    is_slow = trains_bias or (IS_FASTER_BY_ONEDNN and qkv.dtype == torch.bfloat16)
    attend = _attend_by_products if is_slow and x.is_cpu else _attend_by_groups
    out = attend(heads, plan, relative_bias, spec, dropout)
    return _Move.apply(out, plan, False)


def _attend_by_groups(
    heads: Tensor,
    plan: Plan,
    relative_bias: Tensor | None,
    spec: WindowSpec,
    dropout: float,
) -> Tensor:
    """Attend within windows, (B, N * T, 3, A, D), those with the same mask at once: (B, N * T, C)."""
    added = plan.masks
    if relative_bias is not None:
        added = added + relative_bias if any(spec.shift) else relative_bias[None]
    added = added.to(heads.dtype)
    if not added.is_cpu:
        added = _with_aligned_rows(added)
    windows = heads.unflatten(1, (-1, math.prod(plan.window)))
    outs = []
    for group, mask in zip(windows.split(plan.groups, 1), added, strict=True):
        out = _attend(group.flatten(0, 1), mask[None], spec.scale, dropout)
        outs.append(out.transpose(1, 2).flatten(2).unflatten(0, group.shape[:2]))
    out = outs[0] if len(outs) == 1 else torch.cat(outs, 1)
    return out.flatten(1, 2)


def _attend(
    windows: Tensor,
    added: Tensor,
    scale: float,
    dropout: float,
) -> Tensor:
    """Attend within windows, (n, T, 3, A, D), a limited number at a time: (n, A, T, D)."""
    if len(windows) > MAX_WINDOWS:
        parts = windows.split(MAX_WINDOWS)
        return torch.cat([_attend(part, added, scale, dropout) for part in parts])
    q, k, v = windows.permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=added, dropout_p=dropout, scale=scale)


def _with_aligned_rows(masks: Tensor) -> Tensor:
    tokens = masks.shape[-1]
    extra = -tokens % ROW_ALIGNMENT
    return F.pad(masks, (0, extra))[..., :tokens] if extra else masks


def _attend_by_products(
    heads: Tensor,
    plan: Plan,
    relative_bias: Tensor | None,
    spec: WindowSpec,
    dropout: float,
) -> Tensor:
    """Do the same by two products of all windows at once, and a softmax between them."""
    windows = heads.unflatten(1, (-1, math.prod(plan.window)))
    q, k, v = windows.permute(3, 0, 1, 4, 2, 5)
    regions = plan.regions if any(spec.shift) else None
    if context.is_recording():
        relative_bias = _stored_or_none(relative_bias)
        regions = _stored_or_none(regions)
    out_BNATD = reference.attend(q, k, v, relative_bias, regions, spec.scale, functools.partial(F.dropout, p=dropout))
    return out_BNATD.transpose(2, 3).flatten(3).flatten(1, 2)


def _stored_or_none(x: Tensor | None) -> Tensor | None:
    return None if x is None else _stored(x)


class _Move(torch.autograd.Function):
    """Move the tokens of a map, (B, H, W, C), into their windows, (B, N * T, C), or back without the padding."""

    @staticmethod
    def forward(ctx, x, plan, into_windows):
        ctx.plan = plan
        ctx.into_windows = into_windows
        return _moved(x, plan, into_windows)

    @staticmethod
    def backward(ctx, grad):
        return _moved(grad, ctx.plan, not ctx.into_windows), None, None


def _moved(x: Tensor, plan: Plan, into_windows: bool) -> Tensor:
    if into_windows:
        padded = layout.pad_to_multiple(x, plan.window)
        tokens = padded.reshape(-1, len(plan.token_of_slot), x.shape[3])
        return tokens.index_select(1, plan.token_of_slot)
    tokens = x.index_select(1, plan.slot_of_token)
    return tokens.reshape(-1, *plan.size, x.shape[2])


_gpu_plans: dict[tuple[Any, ...], Plan] = {}
# A CUDA graph reads the memory of the plans with which it was captured whenever it is replayed.
_captured_plans: dict[tuple[Any, ...], Plan] = {}


def gpu_plan(*geometry: Any) -> Plan:
    """Return the plan for the arguments of :func:`plan_windows` from a cache that knows of CUDA graphs."""
    plan = _gpu_plans.get(geometry)
    is_captured = torch.cuda.is_current_stream_capturing()
    if plan is None:
        with torch.inference_mode(False):
            plan = plan_windows(*geometry)
        if is_captured:
            return plan  # its tensors have values when the graph is replayed, which computes them anew
        if len(_gpu_plans) == MAX_PLANS:
            _gpu_plans.clear()
        _gpu_plans[geometry] = plan
    if is_captured:
        _captured_plans[geometry] = plan
    return plan

"""Window attention through torch's scaled_dot_product_attention, on any device.

One gather rolls the padded map and cuts it into windows, and a second one undoes both and crops the map. Each is the
gradient of the other, whereas autograd would add the gradients one by one to zeros. Windows are ordered by their mask,
which only those at the edges of a shifted map have, and then by their image, so that those with the same mask are a
view. On a CPU, a position bias that trains needs products in its place.
"""

from __future__ import annotations

import functools
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
    """Where the tokens of maps are in their windows, which are ordered by mask, place and image.

    Attributes:
        window: (height, width) in tokens.
        token_of_slot: (N * B, T), as its raster index in the padded maps.
        slot_of_token: (B, H, W).
        groups: number of windows of each group with the same mask.
        masks: (groups, 1, T, T) that are added to the scores.
        regions: (N, T) the region of each slot; only tokens of the same region attend to each other.
    """

    window: Pair
    token_of_slot: Tensor
    slot_of_token: Tensor
    groups: list[int]
    masks: Tensor
    regions: Tensor


def plan_windows(
    size: tuple[int, ...],
    window: Pair,
    shift: Pair,
    device: torch.device,
) -> Plan:
    """Return the plan for maps of the size (B, H, W) in tokens."""
    batch, height, width = size
    rows, columns = window_grid(height, width, window)
    regions = region_ids(height, width, window, shift, device)
    # Windows with the same largest region have the same regions, and the same mask.
    by_mask = regions.amax(1).argsort(stable=True)
    regions = regions[by_mask]
    tokens = tokens_of_slots(height, width, window, shift, device)[by_mask]
    first_tokens = torch.arange(batch, device=device) * tokens.numel()
    token_of_slot = (tokens[:, None] + first_tokens[:, None]).flatten(0, 1)
    slots = torch.arange(token_of_slot.numel(), device=device)
    slot_of_token = torch.empty_like(slots)
    slot_of_token[token_of_slot.flatten()] = slots
    slot_of_token = slot_of_token.view(batch, rows * window[0], columns * window[1])[:, :height, :width]
    groups = []
    group_regions = []
    first = 0
    for row_count in split_edge(rows, shift[0]):
        for column_count in split_edge(columns, shift[1]):
            group_regions.append(regions[first])
            groups.append(row_count * column_count * batch)
            first += row_count * column_count
    regions_GT = torch.stack(group_regions)
    masks = REGION_PENALTY * (regions_GT[:, None, :, None] != regions_GT[:, None, None])
    return Plan(window, token_of_slot.int(), slot_of_token.int(), groups, masks, regions)


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
    plan = find_plan(x.shape[:3], spec.window, spec.shift, x.device)
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
    """Attend within windows, (N * B, T, 3, A, D), those with the same mask at once: (N * B, T, C)."""
    added = plan.masks
    if relative_bias is not None:
        added = added + relative_bias if any(spec.shift) else relative_bias[None]
    added = added.to(heads.dtype)
    if not added.is_cpu:
        added = _with_aligned_rows(added)
    outs = []
    for windows, mask in zip(heads.split(plan.groups), added, strict=True):
        q, k, v = windows.permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[None], dropout_p=dropout, scale=spec.scale)
        outs.append(out.transpose(1, 2).flatten(2))
    return outs[0] if len(outs) == 1 else torch.cat(outs)


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
    windows = heads.unflatten(0, (len(plan.regions), -1))
    q, k, v = windows.permute(3, 1, 0, 4, 2, 5)
    regions = plan.regions if any(spec.shift) else None
    if context.is_recording():
        relative_bias = _stored_or_none(relative_bias)
        regions = _stored_or_none(regions)
    out_BNATD = reference.attend(q, k, v, relative_bias, regions, spec.scale, functools.partial(F.dropout, p=dropout))
    return out_BNATD.permute(1, 0, 3, 2, 4).flatten(3).flatten(0, 1)


def _stored_or_none(x: Tensor | None) -> Tensor | None:
    return None if x is None else _stored(x)


class _Move(torch.autograd.Function):
    """Move the tokens of maps, (B, H, W, C), into their windows, (N * B, T, C), or back without the padding."""

    @staticmethod
    def forward(ctx, x, plan, into_windows):
        ctx.plan = plan
        ctx.into_windows = into_windows
        return _moved(x, plan, into_windows)

    @staticmethod
    def backward(ctx, grad):
        return _moved(grad, ctx.plan, not ctx.into_windows), None, None


def _moved(x: Tensor, plan: Plan, into_windows: bool) -> Tensor:
    index = plan.slot_of_token
    if into_windows:
        index = plan.token_of_slot
        x = layout.pad_to_windows(x, plan.window)
    return F.embedding(index, x.reshape(-1, x.shape[-1]))  # index_select by an index of any shape


_gpu_plans: dict[tuple[Any, ...], Plan] = {}
# A CUDA graph reads the memory of the plans with which it was captured whenever it is replayed.
_captured_plans: dict[tuple[Any, ...], Plan] = {}


def gpu_plan(*geometry: Any) -> Plan:
    """Return the plan for the arguments of :func:`plan_windows` from a cache that knows of CUDA graphs.

    Its groups have at most ``MAX_WINDOWS`` windows.
    """
    plan = _gpu_plans.get(geometry)
    is_captured = torch.cuda.is_current_stream_capturing()
    if plan is None:
        with torch.inference_mode(False):
            plan = _with_limited_groups(plan_windows(*geometry))
        if is_captured:
            return plan  # its tensors have values when the graph is replayed, which computes them anew
        if len(_gpu_plans) == MAX_PLANS:
            _gpu_plans.clear()
        _gpu_plans[geometry] = plan
    if is_captured:
        _captured_plans[geometry] = plan
    return plan


def _with_limited_groups(plan: Plan) -> Plan:
    groups = []
    masks = []
    for count, mask in zip(plan.groups, plan.masks, strict=True):
        for first in range(0, max(count, 1), MAX_WINDOWS):
            groups.append(min(count - first, MAX_WINDOWS))
            masks.append(mask)
    return plan._replace(groups=groups, masks=torch.stack(masks))

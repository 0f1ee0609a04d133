"""The backend 'sdpa': windows by one gather, attention by torch's or plain operations, and the map by a second gather.

The first gather rolls the padded map and cuts it into windows, the second undoes both and crops the map. Each is the
gradient of the other, whereas autograd would add the gradients one by one to zeros. Images stay the first axis, as
hooks on the projection expect. torch's scaled_dot_product_attention runs once for each group of windows with the same
mask. Where it takes longer on a CPU, as for a position bias that trains, two products and a softmax take its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swin_dense.ops import context, layout, reference
from swin_dense.ops.linear import IS_FASTER_BY_ONEDNN
from swin_dense.ops.windows import Grid, Plan, WindowSpec, plan_windows, region_masks, relative_position_bias
from swin_dense.utils import compat

# An operator that torch.compile does not look into. Without it, what is copied here is computed anew for each pair of
# tokens, in a loop without vector instructions.
_stored = compat.custom_op('swin_dense::stored', mutates_args=(), schema='(Tensor x) -> Tensor')(torch.clone)
_stored.register_fake(torch.clone)
_stored.register_autograd(lambda ctx, grad: grad, setup_context=lambda ctx, inputs, output: None)

# In bytes, of all but the last plan. Those of an image of 800 x 1344 pixels, two for each of four stages, take 3 MB.
MAX_PLAN_BYTES = 2**26
# Attention kernels of older versions of torch for CUDA fail on more; the number of blocks of a grid has 16 bits.
MAX_WINDOWS = 65_535
# In numbers. On a GPU, torch's attention copies a mask whose rows do not begin at multiples of it, at every call.
ROW_ALIGNMENT = 8

# Their tensors must not be modified.
_plans: dict[tuple[Grid, torch.device, int], Plan] = {}
# A CUDA graph reads the memory of the plans with which it was captured whenever it is replayed.
_captured_plans: dict[tuple[Grid, torch.device], Plan] = {}


def cached_plan(grid: Grid, device: torch.device, stream: int = 0) -> Plan:
    """Return the plan for the maps of a grid, which is made once for each stream of a GPU and kept within a limit."""
    key = grid, device, stream
    plan = _plans.get(key)
    if plan is None:
        kept = [part.nbytes for other in list(_plans.values()) for part in other if isinstance(part, Tensor)]
        if sum(kept) > MAX_PLAN_BYTES:
            _plans.clear()
        with torch.inference_mode(False):  # an inference tensor could not be used in training later
            plan = _plans[key] = plan_windows(grid, device)
    return plan


def gpu_plan(grid: Grid, device: torch.device) -> Plan:
    """Do the same on a GPU, where a stream's work does not wait for another stream's, and graphs are captured."""
    plan = _captured_plans.get((grid, device))
    if plan is not None:
        return plan
    if not torch.cuda.is_current_stream_capturing():
        return cached_plan(grid, device, torch.cuda.current_stream(device).cuda_stream)
    # torch waits for the device before it captures a graph, so the plans of all streams can be read.
    for key, plan in list(_plans.items()):
        if key[:2] == (grid, device):
            return _captured_plans.setdefault((grid, device), plan)
    return plan_windows(grid, device)  # its tensors have values when the graph is replayed, which computes them anew


def attend_by_torch(
    x_BHWC: Tensor,
    project: reference.Projection,
    table_PA: Tensor | None,
    spec: WindowSpec,
    attn_drop: nn.Module,
) -> Tensor:
    """See :func:`swin_dense.ops.window_attention`."""
    # torch.compile traces how a plan is made, so that its graph is valid for other sizes.
    find_plan: Callable[..., Plan] = gpu_plan if x_BHWC.is_cuda else cached_plan
    if context.is_tracing():
        find_plan = plan_windows
    _, height, width, _ = x_BHWC.shape
    plan = find_plan(Grid((height, width), spec.window, spec.shift), x_BHWC.device)
    bias_ATT = None if table_PA is None else relative_position_bias(table_PA, spec.window)
    qkv = project(_Move.apply(x_BHWC, plan, True))
    qkv_BS3AD = qkv.unflatten(2, (3, spec.num_heads, -1))
    # On a CPU, torch's kernel gives a mask, here the position bias, no gradient, and what torch does instead is slower
    # than the parts of attention. So is the kernel in bfloat16 on AMD processors.
    trains_bias = bias_ATT is not None and bias_ATT.requires_grad
    is_slow = trains_bias or (IS_FASTER_BY_ONEDNN and qkv.dtype == torch.bfloat16)
    attend = _attend_by_products if is_slow and x_BHWC.is_cpu else _attend_by_groups
    out_BSAD = attend(qkv_BS3AD, plan, bias_ATT, spec, attn_drop)
    return _Move.apply(out_BSAD.flatten(2), plan, False)


def _attend_by_groups(
    qkv_BS3AD: Tensor,
    plan: Plan,
    bias_ATT: Tensor | None,
    spec: WindowSpec,
    attn_drop: nn.Module,
) -> Tensor:
    """Attend within the windows with the same mask at once: (B, S, A, D)."""
    dropout: Any = attn_drop.p if attn_drop.training else 0.0
    masks = plan.masks
    if bias_ATT is not None:
        masks = masks + bias_ATT if any(spec.shift) else bias_ATT[None]
    masks = masks.to(qkv_BS3AD.dtype)
    attend: Any = F.scaled_dot_product_attention
    if not masks.is_cpu:
        attend = _attend_to_parts
        masks = _with_aligned_rows(masks)
    tokens = math.prod(spec.window)
    outs = []
    for group, mask in zip(qkv_BS3AD.split(plan.groups, 1), masks, strict=True):
        # torch.compile would make a graph of its own where a group is one window, if windows were an axis.
        qkv_MT3AD = group.flatten(0, 1).unflatten(0, (-1, tokens))
        q, k, v = (part.transpose(1, 2) for part in qkv_MT3AD.unbind(2))
        out = attend(q, k, v, mask[None], dropout, scale=spec.scale)
        outs.append(out.transpose(1, 2).flatten(0, 1).unflatten(0, group.shape[:2]))
    return outs[0] if len(outs) == 1 else torch.cat(outs, 1)


def _attend_to_parts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    dropout_p: float,
    scale: float,
) -> Tensor:
    """Attend within a limited number of windows at a time, (M, A, T, D)."""
    if len(q) > MAX_WINDOWS:
        parts = zip(q.split(MAX_WINDOWS), k.split(MAX_WINDOWS), v.split(MAX_WINDOWS), strict=True)
        return torch.cat([_attend_to_parts(*part, mask, dropout_p, scale) for part in parts])
    return F.scaled_dot_product_attention(q, k, v, mask, dropout_p=dropout_p, scale=scale)


def _with_aligned_rows(masks: Tensor) -> Tensor:
    tokens = masks.shape[-1]
    extra = -tokens % ROW_ALIGNMENT
    return F.pad(masks, (0, extra))[..., :tokens] if extra else masks


def _attend_by_products(
    qkv_BS3AD: Tensor,
    plan: Plan,
    bias_ATT: Tensor | None,
    spec: WindowSpec,
    attn_drop: nn.Module,
) -> Tensor:
    """Do the same by two products of all windows at once, and a softmax between them."""
    is_tracing = context.is_tracing()
    if is_tracing and bias_ATT is not None:
        bias_ATT = _stored(bias_ATT)
    masks_N1TT = None
    if any(spec.shift):
        masks_N1TT = region_masks(_stored(plan.regions) if is_tracing else plan.regions)
    qkv_MT3AD = qkv_BS3AD.flatten(0, 1).unflatten(0, (-1, math.prod(spec.window)))
    out_MATD = reference.attend(qkv_MT3AD, bias_ATT, masks_N1TT, spec.scale, attn_drop)
    return out_MATD.transpose(1, 2).flatten(0, 1).unflatten(0, qkv_BS3AD.shape[:2])


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
    # Not flatten and unflatten, which batched gradients do not support.
    if into_windows:
        padded = layout.pad_to_multiple(x, plan.grid.window)
        tokens = padded.reshape(-1, len(plan.token_of_slot), x.shape[3])
        return tokens.index_select(1, plan.token_of_slot)
    tokens = x.index_select(1, plan.slot_of_token)
    return tokens.reshape(-1, *plan.grid.size, x.shape[2])

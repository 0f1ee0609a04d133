"""The backend 'sdpa': windows by one gather, attention by torch's or plain operations, and the map by a second gather.

The first gather rolls the padded map and cuts it into windows, the second undoes both and crops the map. Each is the
gradient of the other, whereas autograd would add the gradients one by one to zeros. Images stay the first axis, as
hooks on the projection expect. torch's scaled_dot_product_attention runs once for each group of windows with the same
mask. Where it takes longer on a CPU, as for a position bias that trains, two products and a softmax take its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swin_dense.ops import context, layout, reference
from swin_dense.ops.linear import IS_FASTER_BY_ONEDNN
from swin_dense.ops.reference import Projection
from swin_dense.ops.windows import Grid, Plan, WindowSpec, plan_windows, region_masks, relative_position_bias
from swin_dense.utils import compat, private

# An operator that torch.compile does not look into. Without it, torch.compile computes the copied values anew for
# each pair of tokens, in a loop without vector instructions.
_opaque_copy = compat.custom_op('swin_dense::stored', mutates_args=(), schema='(Tensor x) -> Tensor')(torch.clone)
_opaque_copy.register_fake(torch.clone)
_opaque_copy.register_autograd(lambda ctx, grad: grad, setup_context=lambda ctx, inputs, output: None)

# Attention kernels of older versions of torch for CUDA fail on more; the number of blocks of a grid has 16 bits.
MAX_WINDOWS = 65_535
# In numbers. On a GPU, torch's attention copies a mask whose rows do not begin at multiples of it, at every call.
ROW_ALIGNMENT = 8

# In bytes, of all but the last plan. Those of an image of 800 x 1344 pixels, two for each of four stages, take 3 MB.
MAX_PLAN_BYTES = 2**26


class _Plans(dict[Any, Plan]):
    """The plan of each grid and device, and stream of a GPU, made once; callers must not modify it."""

    def __missing__(self, key: Any) -> Plan:
        # The tables of a plan take at most twice as much as its regions.
        kept = sum(3 * plan.regions.nbytes + plan.masks.nbytes for plan in list(self.values()))
        if kept > MAX_PLAN_BYTES:
            self.clear()
        with torch.inference_mode(False):  # an inference tensor could not be used in training later
            plan = self[key] = plan_windows(*key[:2])
        return plan


_plans = _Plans()
# A CUDA graph reads the memory of the plans with which it was captured whenever it is replayed.
_captured_plans: dict[tuple[Grid, torch.device], Plan] = {}


def gpu_plan(grid: Grid, device: torch.device) -> Plan:
    """Return a plan on a GPU, where a stream's work does not wait for another stream's, and graphs are captured."""
    plan = _captured_plans.get((grid, device))
    if plan is not None:
        return plan
    if not torch.cuda.is_current_stream_capturing():
        return _plans[grid, device, private.current_raw_stream(device.index)]
    # torch waits for the device before it captures a graph, so the plans of all streams can be read.
    for key, plan in list(_plans.items()):
        if key[:2] == (grid, device):
            return _captured_plans.setdefault((grid, device), plan)
    return plan_windows(grid, device)  # its tensors have values when the graph is replayed, which computes them anew


def attend_by_torch(
    x_BHWC: Tensor,
    project: Projection,
    table_PA: Tensor | None,
    spec: WindowSpec,
    attn_drop: nn.Module,
    is_tracing: bool,
) -> Tensor:
    """See :func:`swin_dense.ops.window_attention`. ``is_tracing`` is the answer of :func:`context.is_tracing`."""
    place = Grid(x_BHWC.shape[1:3], spec.window, spec.shift), x_BHWC.device
    if is_tracing:
        plan = plan_windows(*place)  # so that the graph of torch.compile is valid for other sizes
    else:
        plan = gpu_plan(*place) if x_BHWC.is_cuda else _plans[place]
    bias_ATT = None if table_PA is None else relative_position_bias(table_PA, spec.window)
    move = _Move.apply if torch.is_grad_enabled() else partial(_Move.forward, None)
    qkv_BSC = project(move(x_BHWC, plan, True))
    # On a CPU, torch's kernel gives a mask, here the position bias, no gradient, and the fallback of torch is slower
    # than the parts of attention. So is the kernel in bfloat16 on AMD processors. Weights to drop are drawn in another
    # order there, and a checkpoint that computes the maps again, now with gradients, must drop the same.
    is_slow = (bias_ATT is not None and bias_ATT.requires_grad) or (attn_drop.training and attn_drop.p)
    attend = _attend_by_groups
    if x_BHWC.is_cpu and (is_slow or (IS_FASTER_BY_ONEDNN and qkv_BSC.dtype == torch.bfloat16)):
        attend = _attend_by_products
    return move(attend(qkv_BSC, plan, bias_ATT, spec, attn_drop), plan, False)


def _attend_by_groups(
    qkv_BSC: Tensor,
    plan: Plan,
    bias_ATT: Tensor | None,
    spec: WindowSpec,
    attn_drop: nn.Module,
) -> Tensor:
    """Attend within the windows with the same mask at once: (B, S, C)."""
    dropout: Any = attn_drop.p if attn_drop.training else 0.0
    if qkv_BSC.is_cuda:
        sizes, masks = _groups_on_gpu(qkv_BSC, plan, bias_ATT, spec, dropout)
    else:
        masks_GATT = plan.masks if bias_ATT is None else plan.masks + bias_ATT
        sizes, masks = plan.groups, masks_GATT.to(qkv_BSC.dtype).split(1)
    outs = []
    for group_BSC, mask in zip(qkv_BSC.split_with_sizes(sizes, 1), masks, strict=True):
        batch, slots, channels = group_BSC.shape
        # torch.compile would make a graph of its own where a group is one window, if windows were an axis.
        qkv = group_BSC.flatten(0, 1).reshape(-1, mask.shape[2], 3, spec.num_heads, channels // 3 // spec.num_heads)
        q, k, v = qkv.unbind(2)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, mask, dropout, scale=spec.scale)
        outs.append(out.transpose(1, 2).flatten(0, 1).reshape(batch, slots, channels // 3))
    return outs[0] if len(outs) == 1 else torch.cat(outs, 1)


def _groups_on_gpu(
    qkv_BSC: Tensor,
    plan: Plan,
    bias_ATT: Tensor | None,
    spec: WindowSpec,
    dropout: float,
) -> tuple[list[int], Sequence[Tensor]]:
    """Return the sizes in slots of groups, and their masks, (1 or windows, A, T, T), for which a GPU needs few calls.

    All windows are one group with a mask each: a call costs the host more than reading masks costs a GPU. But for the
    gradient of a position bias autograd would keep these masks, and with dropout the weights that are dropped must not
    depend on gradients, as above. The windows with the same mask are a group there.
    """
    masks_GATT = plan.masks
    if bias_ATT is not None:
        masks_GATT = masks_GATT + bias_ATT if any(spec.shift) else bias_ATT[None]
    batch, tokens = qkv_BSC.shape[0], masks_GATT.shape[2]
    masks_GATT = torch.constant_pad_nd(masks_GATT.to(qkv_BSC.dtype), (0, -tokens % ROW_ALIGNMENT))
    most = max(1, MAX_WINDOWS // max(1, batch))  # windows of an image in one call
    sizes, masks = [], []
    if len(plan.groups) == 1 or masks_GATT.requires_grad or dropout:
        for size, mask in zip(plan.groups, masks_GATT[:, None, :, :, :tokens].unbind(), strict=True):
            for start in range(0, size, most * tokens):
                sizes.append(min(most * tokens, size - start))
                masks.append(mask)
    else:
        for start in range(0, plan.group_of_window.shape[0], most):
            groups = plan.group_of_window[start : start + most]
            sizes.append(groups.shape[0] * tokens)
            masks.append(masks_GATT.index_select(0, groups.expand(batch, -1).flatten())[..., :tokens])
    return sizes, masks


def _attend_by_products(
    qkv_BSC: Tensor,
    plan: Plan,
    bias_ATT: Tensor | None,
    spec: WindowSpec,
    attn_drop: nn.Module,
) -> Tensor:
    """Do the same by two products of all windows at once, and a softmax between them."""
    regions_NT = plan.regions
    if context.is_tracing():
        regions_NT = _opaque_copy(regions_NT)
        bias_ATT = None if bias_ATT is None else _opaque_copy(bias_ATT)
    masks_N1TT = region_masks(regions_NT) if any(spec.shift) else None
    return reference.attend(qkv_BSC, bias_ATT, masks_N1TT, spec, attn_drop)


class _Move(torch.autograd.Function):
    """Move the tokens of a map, (B, H, W, C), into their windows, (B, N * T, C), or back without the padding.

    Without gradients, a call of ``forward`` without ``ctx`` costs the host less.
    """

    @staticmethod
    def forward(ctx, x, plan, into_windows):
        if ctx is not None:
            ctx.way_back = plan, not into_windows
        # Not flatten and unflatten, which batched gradients do not support.
        if into_windows:
            padded = layout.pad_to_multiple(x, plan.grid.window)
            return padded.reshape(-1, plan.token_of_slot.shape[0], x.shape[3]).index_select(1, plan.token_of_slot)
        return x.index_select(1, plan.slot_of_token).reshape(-1, *plan.grid.size, x.shape[2])

    @staticmethod
    def backward(ctx, grad):
        return _Move.apply(grad, *ctx.way_back), None, None

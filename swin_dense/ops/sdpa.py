"""Window attention through torch's scaled_dot_product_attention: the default.

Three things make it cheaper than the textbook, and none changes a number:

- Padding, roll and partition are one gather of the real tokens, their inverses another.
- The region mask of a window depends only on whether it lies in the last row and in the last column of windows. So
  there are four masks whatever the size of the map, and the windows of the inside, nearly all, need none.
- Where padding falls is known per size, so the padding tokens' keys and values are written in place.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from swin_dense.ops.reference import REGION_PENALTY
from swin_dense.windows import Pair, partition, region_ids, window_grid


@dataclass(frozen=True)
class _Group:
    """The windows of one map that share a region mask.

    Attributes:
        tokens: (n * T,) raster position of every slot of the group's n windows; arbitrary in padding slots.
        padding: the slots that hold no real token.
        mask: (T, T) the region penalty, or None where the group needs none.
    """

    tokens: Tensor
    padding: Tensor
    mask: Tensor | None


@dataclass(frozen=True)
class _Plan:
    """How one size of map is cut into windows.

    Attributes:
        groups: the windows by region mask; their slots one after the other make up the window order.
        slots: (H * W,) where in window order each raster position is found.
    """

    groups: tuple[_Group, ...]
    slots: Tensor


def reason_not_to_run(qkv: Tensor, window_size: Pair, num_heads: int, dropout_p: float) -> str | None:
    return None


def window_attention(
    qkv: Tensor,
    relative_bias: Tensor | None,
    pad_kv: Tensor | None,
    num_heads: int,
    window_size: Pair,
    shift: Pair,
    scale: float,
    dropout_p: float,
) -> Tensor:
    """See :func:`swin_dense.ops.window_attention`."""
    batch, height, width, channels = qkv.shape[0], qkv.shape[1], qkv.shape[2], qkv.shape[3] // 3
    plan = _plan(int(height), int(width), window_size, shift, qkv.device)
    tokens = window_size[0] * window_size[1]
    pad = None if pad_kv is None else F.pad(pad_kv, (channels, 0)).to(qkv.dtype)
    bias = None if relative_bias is None else relative_bias.to(qkv.dtype)

    raster = qkv.flatten(1, 2)
    outputs = []
    for group in plan.groups:
        windows = _gather(raster, group, pad)
        heads = windows.reshape(-1, tokens, 3, num_heads, channels // num_heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=_score_bias(bias, group.mask, qkv.dtype), dropout_p=dropout_p, scale=scale
        )
        outputs.append(out.transpose(1, 2).reshape(batch, len(group.tokens), channels))
    in_window_order = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)
    return in_window_order.index_select(1, plan.slots).reshape(batch, height, width, channels)


def _gather(raster: Tensor, group: _Group, pad: Tensor | None) -> Tensor:
    """Return the group's slots, (B, n * T, 3C), with ``pad`` (3C,) or zeros in those without a real token."""
    windows = raster.index_select(1, group.tokens)
    if not len(group.padding):
        return windows
    if pad is None:
        return windows.index_fill_(1, group.padding, 0.0)
    return windows.index_copy_(1, group.padding, pad.expand(raster.shape[0], len(group.padding), -1))


def _score_bias(bias: Tensor | None, mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None:
        return None if bias is None else bias[None]
    mask = mask.to(dtype)
    return mask[None, None] if bias is None else (bias + mask)[None]


def _plan(height: int, width: int, window: Pair, shift: Pair, device: torch.device) -> _Plan:
    # Tensors made while a graph is being recorded belong to that graph, so they must not outlive it in a cache.
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return _build_plan(height, width, window, shift, device)
    return _cached_plan(height, width, window, shift, device)


# A plan of a stage-1 map of 800 x 1344 takes 1.1 MB, and a forward pass needs two per stage.
@functools.lru_cache(maxsize=64)
def _cached_plan(height: int, width: int, window: Pair, shift: Pair, device: torch.device) -> _Plan:
    with torch.inference_mode(False):  # a cached inference tensor could not be used in training later
        return _build_plan(height, width, window, shift, device)


def _build_plan(height: int, width: int, window: Pair, shift: Pair, device: torch.device) -> _Plan:
    rows, columns = window_grid(height, width, window)
    raster = torch.arange(1, height * width + 1, device=device).view(1, height, width, 1)
    tokens_NT = partition(raster, window, shift)[0, :, :, 0] - 1  # -1 in padding slots

    is_last_row = torch.arange(rows, device=device) == rows - 1 if shift[0] else torch.zeros(rows, device=device)
    is_last_column = (
        torch.arange(columns, device=device) == columns - 1 if shift[1] else torch.zeros(columns, device=device)
    )
    kinds = (2 * is_last_row.long()[:, None] + is_last_column.long()[None, :]).flatten()
    ids_NT = region_ids(height, width, window, shift, device)

    groups = []
    for kind in range(4):
        members = (kinds == kind).nonzero()[:, 0]
        if len(members):
            tokens = tokens_NT[members].flatten()
            ids = ids_NT[members[0]]
            mask = REGION_PENALTY * (ids[:, None] != ids[None, :]).float() if kind else None
            groups.append(_Group(tokens.clamp(min=0), (tokens < 0).nonzero()[:, 0], mask))
    order = torch.cat([tokens_NT[(kinds == kind).nonzero()[:, 0]].flatten() for kind in range(4)])
    slots = torch.empty(height * width, dtype=torch.long, device=device)
    is_real = order >= 0
    slots[order[is_real]] = torch.arange(len(order), device=device)[is_real]
    return _Plan(tuple(groups), slots)

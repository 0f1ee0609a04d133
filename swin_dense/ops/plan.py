"""Index tables between the raster order of a map and its windows, cached per map size.

The CPU computes a plan with the index arithmetic of :mod:`swin_dense.ops.windows`. The tables are copied to a GPU in
one asynchronous copy from pinned memory.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swin_dense.ops.windows import REGION_PENALTY, Pair, region_ids, sources, window_grid

# Enough for eight image sizes, because each of a model's four stages needs two plans. The plans of one image size take
# about a hundredth of the memory of the first stage.
MAX_PLANS = 64
_CPU = torch.device('cpu')


@dataclass(frozen=True)
class Group:
    """The windows of a map that share a region mask.

    Attributes:
        tokens: (n * T,) raster index of every slot of the n windows; 0 for padding slots.
        padding: indices of the padding slots.
        mask: (T, T) region penalty, or None if the windows have only one region.
    """

    tokens: Tensor
    padding: Tensor
    mask: Tensor | None


@dataclass(frozen=True)
class Plan:
    """Index tables for the windows of one map size.

    The region mask of a window depends only on whether it is in the last row and in the last column of windows, so
    there are at most four groups. The inner windows, which are nearly all windows, need no mask.

    Attributes:
        groups: the windows grouped by region mask; their concatenated slots define the window order.
        slots: (H * W,) index in window order of each raster position.
    """

    groups: tuple[Group, ...]
    slots: Tensor


def plan_windows(height: int, width: int, window: Pair, shift: Pair, device: torch.device) -> Plan:
    """Return the plan of a map of height x width tokens. Its tensors are cached and must not be modified.

    Raises:
        RuntimeError: a CUDA graph is being captured, and no plan for this size exists yet.
    """
    key = height, width, window, shift, device
    return _plan_on_gpu(*key) if device.type == 'cuda' else _cached(*key, None)


def _plan_on_gpu(height: int, width: int, window: Pair, shift: Pair, device: torch.device) -> Plan:
    """Return a plan of the current stream, because using a tensor that another one copies or frees is not safe."""
    key = height, width, window, shift, device
    if torch.cuda.is_current_stream_capturing():
        return _captured_plan(*key)
    _alive[key] = plan = _cached(*key, torch.cuda.current_stream(device).cuda_stream)
    return plan


@functools.lru_cache(MAX_PLANS)
@torch.inference_mode(False)  # an inference tensor could not be used in training later
def _cached(height: int, width: int, window: Pair, shift: Pair, device: torch.device, stream: int | None) -> Plan:
    return _build(height, width, window, shift, device)


def _captured_plan(height: int, width: int, window: Pair, shift: Pair, device: torch.device) -> Plan:
    """Return a plan for a CUDA graph and keep it forever, because the graph reads it at every replay."""
    key = height, width, window, shift, device
    if key not in _captured:
        # A plan of any stream may be used, because the warm-up run that must precede a capture has finished.
        plan = _alive.get(key)
        if plan is None:
            raise RuntimeError(
                f'a CUDA graph is being captured, but no plan exists for a map of {height} x {width} tokens in windows '
                f'of {window[0]} x {window[1]}; run the model once with this size before capturing'
            )
        _captured[key] = plan
    return _captured[key]


# The most recently used plan of each size, from any stream, while the cache holds it.
_alive: weakref.WeakValueDictionary[tuple, Plan] = weakref.WeakValueDictionary()
_captured: dict[tuple, Plan] = {}


def _build(height: int, width: int, window: Pair, shift: Pair, device: torch.device) -> Plan:
    """Build a plan; a shift separates the last row and the last column of windows, which gives up to four groups."""
    rows, columns = window_grid(height, width, window)
    y, x = (sources(*along, _CPU) for along in ((rows, window[0], shift[0]), (columns, window[1], shift[1])))
    regions = region_ids(height, width, window, shift, _CPU).view(rows, columns, -1)
    tables, masks, order = [], [], []
    for row in _inside_and_last(rows, shift[0]):
        for column in _inside_and_last(columns, shift[1]):
            group_y, group_x = y[row, None, :, None], x[None, column, None, :]
            is_padding = ((group_y >= height) | (group_x >= width)).flatten()
            raster = (group_y * width + group_x).flatten().masked_fill_(is_padding, height * width)
            order.append(raster)
            tables += [raster.masked_fill(is_padding, 0).int(), is_padding.nonzero().flatten()]
            masks.append(_mask(regions[row.start, column.start]))
    slots = torch.empty(height * width + 1, dtype=torch.int32, device=_CPU)
    slots[torch.cat(order)] = torch.arange(rows * columns * window[0] * window[1], dtype=torch.int32, device=_CPU)
    tables += [slots[:-1].clone(), *(mask for mask in masks if mask is not None)]
    tensors = iter(_to_device(tables, device))
    pairs = [(next(tensors), next(tensors)) for _ in masks]
    in_raster_order = next(tensors)
    groups = (Group(*pair, None if mask is None else next(tensors)) for pair, mask in zip(pairs, masks, strict=True))
    return Plan(tuple(groups), in_raster_order)


def _inside_and_last(count: int, shift: int) -> list[slice]:
    """Return the ranges of window rows that share a region mask: one without a shift, otherwise inner rows and last."""
    return [slice(0, count - 1), slice(count - 1, count)] if shift and count > 1 else [slice(0, count)]


def _mask(regions: Tensor) -> Tensor | None:
    """Return the region penalty, (T, T), of a window with these regions, (T,), or None if it has only one region."""
    is_apart = regions[:, None] != regions[None, :]
    return is_apart * torch.tensor(REGION_PENALTY, device=_CPU) if is_apart.any() else None


def _to_device(tables: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy the tables to the device; on a GPU, by one asynchronous copy."""
    if device.type != 'cuda':
        return [table.to(device) for table in tables]
    packed = _pack(tables).pin_memory().to(device, non_blocking=True)
    return _unpack(packed, tables)


_ALIGNMENT = 16  # bytes


def _pack(tables: Sequence[Tensor]) -> Tensor:
    packed = torch.empty(sum(-(-table.nbytes // _ALIGNMENT) * _ALIGNMENT for table in tables), dtype=torch.uint8)
    for view, table in zip(_unpack(packed, tables), tables, strict=True):
        view.copy_(table)
    return packed


def _unpack(packed: Tensor, tables: Sequence[Tensor]) -> list[Tensor]:
    """Return views of ``packed`` with the dtypes and shapes of the tables."""
    views, start = [], 0
    for table in tables:
        views.append(packed[start : start + table.nbytes].view(table.dtype).view(table.shape))
        start += -(-table.nbytes // _ALIGNMENT) * _ALIGNMENT
    return views

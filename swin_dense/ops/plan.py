"""Where every token of a map is found among its windows, worked out once per size of map."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from swin_dense.ops.reference import REGION_PENALTY
from swin_dense.windows import Pair, partition, region_ids, window_grid

# A plan of the first stage of an 800 x 1344 image takes 1.1 MB; a forward pass needs about four per stage.
CACHE_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Group:
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
class Plan:
    """How one size of map is cut into windows.

    The region mask of a window depends only on whether it lies in the last row and in the last column of windows. So
    there are at most four groups, and the windows of the inside, nearly all, need no mask.

    Attributes:
        groups: the windows by region mask; their slots one after the other make up the window order.
        slots: (H * W,) where in window order each raster position is found.
    """

    groups: tuple[Group, ...]
    slots: Tensor

    @property
    def bytes(self) -> int:
        tensors = [self.slots, *(t for group in self.groups for t in (group.tokens, group.padding, group.mask))]
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


class _HasBytes(Protocol):
    @property
    def bytes(self) -> int: ...


Built = TypeVar('Built', bound=_HasBytes)


class Cache(Generic[Built]):
    """What was built and used last, up to a number of bytes, for any number of threads."""

    def __init__(self, capacity: int, build: Callable[..., Built]) -> None:
        self._capacity = capacity
        self._build = build
        self._used = 0
        self._entries: OrderedDict[tuple, Built] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, *key) -> Built:
        """Return ``build(*key)``, built or kept."""
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
                return self._entries[key]
        built = self._build(*key)
        with self._lock:
            if key not in self._entries:
                self._entries[key] = built
                self._used += built.bytes
            while self._used > self._capacity and len(self._entries) > 1:
                self._used -= self._entries.popitem(last=False)[1].bytes
        return built

    @property
    def bytes(self) -> int:
        return self._used


def plan_windows(height: int, width: int, window: Pair, shift: Pair, device: torch.device) -> Plan:
    """Return the plan of a map of height x width tokens. Its tensors are shared: leave them as they are."""
    return _cache.get(height, width, window, shift, device)


@torch.inference_mode(False)  # a cached inference tensor could not be used in training later
def _build(height: int, width: int, window: Pair, shift: Pair, device: torch.device) -> Plan:
    rows, columns = window_grid(height, width, window)
    raster = torch.arange(1, height * width + 1, device=device).view(1, height, width, 1)
    tokens_NT = partition(raster, window, shift)[0, :, :, 0] - 1  # -1 in padding slots
    ids_NT = region_ids(height, width, window, shift, device)

    is_last_row = torch.arange(rows, device=device) == (rows - 1 if shift[0] else -1)
    is_last_column = torch.arange(columns, device=device) == (columns - 1 if shift[1] else -1)
    kinds_N = (2 * is_last_row[:, None] + is_last_column[None, :].int()).flatten()
    members = [windows for kind in range(4) if len(windows := (kinds_N == kind).nonzero()[:, 0])]

    groups = []
    for windows in members:
        tokens = tokens_NT[windows].flatten()
        ids = ids_NT[windows[0]]
        is_apart = ids[:, None] != ids[None, :]
        mask = REGION_PENALTY * is_apart.float() if is_apart.any() else None
        groups.append(Group(tokens.clamp(min=0).int(), (tokens < 0).nonzero()[:, 0], mask))
    order = tokens_NT[torch.cat(members)].flatten()
    slots = torch.empty(height * width, dtype=torch.int32, device=device)
    is_real = order >= 0
    slots[order[is_real]] = torch.arange(len(order), device=device, dtype=torch.int32)[is_real]
    return Plan(tuple(groups), slots)


_cache = Cache(CACHE_BYTES, _build)

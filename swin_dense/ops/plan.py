"""Where every token of a map is found among its windows, worked out once per size of map.

A plan is index arithmetic of the host, in closed form: rows and columns are independent of each other, so every table
is an outer sum of two short ones. It reaches a GPU in one copy from pinned memory, for which nobody waits.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from swin_dense.ops import gpu
from swin_dense.ops.reference import REGION_PENALTY
from swin_dense.windows import Pair, window_grid

# A plan of the first stage of an 800 x 1344 image takes 1.1 MB; a forward pass needs about four per stage.
CACHE_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Group:
    """The windows of one map that share a region mask.

    Attributes:
        tokens: (n * T,) raster position of every slot of the group's n windows; 0 in padding slots.
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
        self._entries: OrderedDict[tuple[tuple, Hashable], Built] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, *key, owner: Hashable = None) -> Built:
        """Return ``build(*key)``, built or kept. Every owner has one of its own."""
        with self._lock:
            if (key, owner) in self._entries:
                self._entries.move_to_end((key, owner))
                return self._entries[key, owner]
        built = self._build(*key)
        with self._lock:
            if (key, owner) not in self._entries:
                self._entries[key, owner] = built
                self._used += built.bytes
            while self._used > self._capacity and len(self._entries) > 1:
                self._used -= self._entries.popitem(last=False)[1].bytes
        return built

    def find(self, *key) -> Built | None:
        """Return what any owner has of this key."""
        with self._lock:
            return next((built for (other, _), built in self._entries.items() if other == key), None)

    @property
    def bytes(self) -> int:
        return self._used


def plan_windows(height: int, width: int, window: Pair, shift: Pair, device: torch.device) -> Plan:
    """Return the plan of a map of height x width tokens. Its tensors are shared: leave them as they are.

    On a GPU every stream has its own: what one stream copies or frees, another may only touch when both have met.

    Raises:
        RuntimeError: a CUDA graph is being captured and there is no plan of this size yet.
    """
    key = height, width, window, shift, device
    if not gpu.is_capturing(device):
        return _cache.get(*key, owner=gpu.stream(device))
    # Whoever captures has run the model before, and waited for it. The graph reads the plan as long as it lives, which
    # nobody tells us, so the plan lives on.
    if key not in _captured:
        plan = _cache.find(*key)
        if plan is None:
            raise RuntimeError(
                f'a CUDA graph is being captured, and there is no plan yet of a map of {height} x {width} tokens in '
                f'windows of {window[0]} x {window[1]}; run the model once with this size before capturing'
            )
        _captured[key] = plan
    return _captured[key]


def _build(height: int, width: int, window: Pair, shift: Pair, device: torch.device) -> Plan:
    """Cut rows, and columns, into those of the inside and, under a shift, the last; groups are the four products."""
    positions = [_positions(side, along, by) for side, along, by in zip((height, width), window, shift, strict=True)]
    tables: list[np.ndarray] = []
    slots = np.empty((height, width), np.int32)
    start = 0
    masks = []
    for y, wrapped_y in positions[0]:
        for x, wrapped_x in positions[1]:
            tokens, padding = _window_order(y, x, height, width)
            # Where a token is found is the sum of a number of its row and a number of its column, too.
            window_y, inner_y = np.divmod(np.arange(y.size), window[0])
            window_x, inner_x = np.divmod(np.arange(x.size), window[1])
            of_rows = (window_y * len(x) * window[0] + inner_y) * window[1]
            of_columns = window_x * window[0] * window[1] + inner_x
            real_y, real_x = y.reshape(-1) < height, x.reshape(-1) < width
            block = start + of_rows[real_y, None] + of_columns[None, real_x]
            slots[y.reshape(-1)[real_y, None], x.reshape(-1)[None, real_x]] = block
            start += tokens.size
            tables += [tokens, padding]
            masks.append(_mask(window, wrapped_y, wrapped_x))
    tables += [slots.reshape(-1), *(mask for mask in masks if mask is not None)]
    tensors = iter(_to_device(tables, device))
    pairs = [(next(tensors), next(tensors)) for _ in masks]
    in_raster_order = next(tensors)
    groups = (Group(*pair, None if mask is None else next(tensors)) for pair, mask in zip(pairs, masks, strict=True))
    return Plan(tuple(groups), in_raster_order)


def _window_order(y: np.ndarray, x: np.ndarray, height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the raster position of every slot of windows at rows y and columns x, and which slots are padding."""
    tokens = (y[:, None, :, None] * width + x[None, :, None, :]).reshape(-1)
    is_out_y, is_out_x = y >= height, x >= width
    if not (is_out_y.any() or is_out_x.any()):
        return tokens, np.empty(0, np.int64)
    padding = np.flatnonzero(is_out_y[:, None, :, None] | is_out_x[None, :, None, :])
    tokens[padding] = 0
    return tokens, padding


def _positions(side: int, window: int, shift: int) -> list[tuple[np.ndarray, int]]:
    """Return positions along one side, (windows, window), of the windows inside and of the last, where it wraps around.

    A position of ``side`` or more is padding. With each comes how many of the last positions are from the other end.
    """
    windows = window_grid(side, side, (window, window))[0]
    rolled = ((np.arange(windows * window, dtype=np.int32) + shift) % (windows * window)).reshape(windows, window)
    parts = [(rolled[:-1], 0), (rolled[-1:], shift)] if shift else [(rolled, 0)]
    return [part for part in parts if len(part[0])]


def _mask(window: Pair, wrapped_y: int, wrapped_x: int) -> np.ndarray | None:
    """Return the region penalty, (T, T), of windows whose last rows and columns come from the opposite edges."""
    if not (wrapped_y or wrapped_x):
        return None
    is_wrapped_y = np.arange(window[0]) >= window[0] - wrapped_y
    is_wrapped_x = np.arange(window[1]) >= window[1] - wrapped_x
    region = (2 * is_wrapped_y[:, None] + is_wrapped_x[None, :]).reshape(-1)
    return np.where(region[:, None] != region[None, :], np.float32(REGION_PENALTY), np.float32(0))


def _to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Return the arrays as tensors; they reach a GPU as one copy that is under way when this returns."""
    if device.type != 'cuda':
        return [torch.from_numpy(array).to(device) for array in arrays]
    packed = _pack(arrays).pin_memory().to(device, non_blocking=True)
    return _unpack(packed, arrays)


_ALIGNMENT = 16  # bytes


def _pack(arrays: Sequence[np.ndarray]) -> Tensor:
    packed = torch.empty(sum(-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays), dtype=torch.uint8)
    for view, array in zip(_unpack(packed, arrays), arrays, strict=True):
        view.copy_(torch.from_numpy(array))
    return packed


def _unpack(packed: Tensor, arrays: Sequence[np.ndarray]) -> list[Tensor]:
    """Return views of ``packed`` with the dtypes and shapes of the arrays."""
    views, start = [], 0
    for array in arrays:
        dtype = torch.from_numpy(array).dtype
        views.append(packed[start : start + array.nbytes].view(dtype).view(array.shape))
        start += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    return views


# Plans that CUDA graphs read.
_captured: dict[tuple, Plan] = {}
_cache = Cache(CACHE_BYTES, torch.inference_mode(False)(_build))  # an inference tensor could not be trained with later

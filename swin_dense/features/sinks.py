"""Collect the features of an image from its tiles: maps, in memory or in files, or one vector per level."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib.format import open_memmap
from torch import Tensor

from swin_dense.features.extraction import Blocks, Maps
from swin_dense.ops.windows import Size
from swin_dense.utils.atomic import atomic_path, file_at, remove, reserve
from swin_dense.utils.choices import POOLINGS

Shape = tuple[int, int, int]
_GEM_FLOOR = 1e-6
Make = Callable[[Mapping[int, Shape], Tensor], Callable[[int], Any]]


class MapSink:
    """Assemble the maps in arrays, which ``make`` allocates when the first block arrives.

    It is :func:`in_memory` or a result of the functions below. It takes the shapes by stride, and a tensor with the
    dtype and device of the maps, and returns a function from a stride to the array of that level.
    """

    def __init__(self, image_size: Size, make: Make) -> None:
        self._image_size = image_size
        self._make = make
        self._shapes: dict[int, Shape] = {}

    def write(self, blocks: Blocks) -> None:
        if not self._shapes:
            for stride, (_, _, values) in blocks.items():
                height, width = (-(-side // stride) for side in self._image_size)
                self._shapes[stride] = (len(values), height, width)
            self._array_of = self._make(self._shapes, values)
        for stride, (rows, columns, values) in blocks.items():
            array = self._array_of(stride)
            array[:, rows, columns] = values if isinstance(array, Tensor) else _to_numpy(values)

    def levels(self) -> dict[int, Tensor]:
        """Return {stride: (C, rows, columns)}; maps in files are writable views of these files."""
        arrays = {stride: self._array_of(stride) for stride in self._shapes}
        # Not torch.as_tensor, which copies to the default device.
        return {stride: x if isinstance(x, Tensor) else torch.from_numpy(x) for stride, x in arrays.items()}


def in_memory(shapes: Mapping[int, Shape], like: Tensor) -> Callable[[int], Any]:
    """Allocate the maps in memory."""
    return {stride: like.new_empty(shape) for stride, shape in shapes.items()}.__getitem__


@contextlib.contextmanager
def in_npy_files(folder: Path) -> Iterator[Make]:
    """Allocate one ``stride_<s>.npy`` per level in a folder.

    The files replace those of an earlier image when the block ends; a ``Pyramid`` of the earlier image remains valid.
    If the block raises, the folder is unchanged.
    """
    folder.mkdir(parents=True, exist_ok=True)
    earlier = [file_at(path) for path in folder.glob('stride_*.npy')]
    with contextlib.ExitStack() as unfinished:

        def make(shapes: Mapping[int, Shape], like: Tensor) -> Callable[[int], Any]:
            paths = {}
            for stride, shape in shapes.items():
                path = unfinished.enter_context(atomic_path(folder / f'stride_{stride}.npy'))
                open_memmap(path, 'w+', _to_numpy(like[:0]).dtype, shape)
                reserve(path, path.stat().st_size)
                paths[stride] = path
            # Reopened for every block, because pages stay in memory as long as a file is mapped.
            return lambda stride: open_memmap(paths[stride], 'r+')

        yield make
        for path in earlier:  # the folder must never contain levels of two images
            remove(path)


def _to_numpy(values: Tensor) -> np.ndarray:
    """Return a numpy array; bfloat16, which numpy lacks, is reinterpreted as int16."""
    values = values.detach().cpu()
    if values.dtype == torch.bfloat16:
        values = values.view(torch.int16)
    return values.numpy()


class PooledSink:
    """Pool each level of an image to one vector; ``pool`` is a key of ``POOLINGS``.

    Like :class:`MapSink`, it takes the blocks of one tile at a time; those of all calls cover every level once.
    """

    def __init__(self, pool: str) -> None:
        self._power = POOLINGS[pool]
        self._totals: dict[int, Tensor] = {}
        self._cells: Counter[int] = Counter()

    def write(self, blocks: Blocks) -> None:
        for stride, (_, _, values) in blocks.items():
            cells = values.double() if self._power == 1 else values.double().clamp(min=_GEM_FLOOR) ** self._power
            self._totals[stride] = self._totals.get(stride, 0) + cells.sum((1, 2))
            self._cells[stride] += values[0].numel()

    def levels(self) -> dict[int, Tensor]:
        """Return the vectors by stride, {stride: (C,)}, in float64 on the CPU."""
        return {s: ((total / self._cells[s]) ** (1 / self._power)).cpu() for s, total in self._totals.items()}


def pooled(maps: Maps, pool: str) -> dict[int, Tensor]:
    """Pool the maps of a whole image as :class:`PooledSink` does."""
    sink = PooledSink(pool)
    sink.write({stride: (slice(None), slice(None), level) for stride, level in maps.items()})
    return sink.levels()

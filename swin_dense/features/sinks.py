"""Collect the feature maps of an image, or what is pooled of them, from its tiles; write and read files of maps."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib.format import open_memmap
from torch import Tensor

from swin_dense.features import ome_zarr
from swin_dense.features.inference import Blocks
from swin_dense.ops.windows import Pair
from swin_dense.utils.atomic import reserve, written_whole

_SAFETENSORS_NAMES = {torch.float32: 'F32', torch.float16: 'F16', torch.bfloat16: 'BF16'}
Shape = tuple[int, int, int]
Make = Callable[[Mapping[int, Shape], Tensor], Callable[[int], Any]]


def level_size(image_size: Pair, stride: int) -> Pair:
    """Return (height, width) in cells of a level of an image."""
    return -(-image_size[0] // stride), -(-image_size[1] // stride)


class MapSink:
    """Assemble the maps in arrays, which ``make`` allocates when the first block arrives.

    It is :func:`in_memory`, or what the functions below return, and is called with the shapes by stride and a tensor
    with the dtype and device of the maps. It returns a function from a stride to the array of that level.
    """

    def __init__(self, image_size: Pair, make: Make) -> None:
        self._image_size = image_size
        self._make = make
        self._shapes: dict[int, Shape] = {}

    def write(self, blocks: Blocks) -> None:
        if not self._shapes:
            for stride, (_, _, values) in blocks.items():
                self._shapes[stride] = (len(values), *level_size(self._image_size, stride))
            self._array_of = self._make(self._shapes, values)
        for stride, (rows, columns, values) in blocks.items():
            array = self._array_of(stride)
            array[:, rows, columns] = values if isinstance(array, Tensor) else _to_numpy(values)

    def levels(self) -> dict[int, Tensor]:
        """Return {stride: (C, rows, columns)}; maps in files are writable views of these files."""
        return {stride: torch.as_tensor(self._array_of(stride)) for stride in self._shapes}


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
    with contextlib.ExitStack() as unfinished:

        def make(shapes: Mapping[int, Shape], like: Tensor) -> Callable[[int], Any]:
            paths = {}
            for stride, shape in shapes.items():
                path = unfinished.enter_context(written_whole(folder / f'stride_{stride}.npy')).path
                open_memmap(path, 'w+', _to_numpy(like[:0]).dtype, shape)
                reserve(path, path.stat().st_size)
                paths[stride] = path
            # Reopened for every block, because pages stay in memory as long as a file is mapped.
            return lambda stride: open_memmap(paths[stride], 'r+')

        yield make
        for stale in folder.glob('stride_*.npy'):  # the folder must never contain levels of two images
            stale.unlink()


def in_safetensors(path: Path, attributes: Mapping[str, Any]) -> Make:
    """Allocate the maps in a safetensors file, with the attributes as JSON in its metadata.

    Its library writes a file at once, from memory, and its metadata in a random order. Here, tiles are written as they
    come, and equal maps give identical bytes.
    """

    def make(shapes: Mapping[int, Shape], like: Tensor) -> Callable[[int], Any]:
        header: dict[str, Any] = {'__metadata__': {key: json.dumps(value) for key, value in attributes.items()}}
        begins, end = {}, 0
        for stride, shape in shapes.items():
            begins[stride], end = end, end + math.prod(shape) * like.itemsize
            offsets = [begins[stride], end]
            header[str(stride)] = {'dtype': _SAFETENSORS_NAMES[like.dtype], 'shape': shape, 'data_offsets': offsets}
        text = json.dumps(header).encode()
        text += b' ' * (-len(text) % 8)
        beginning = len(text).to_bytes(8, 'little') + text
        path.write_bytes(beginning)
        reserve(path, len(beginning) + end)
        number = _to_numpy(like[:0]).dtype
        return lambda stride: np.memmap(path, number, 'r+', len(beginning) + begins[stride], shapes[stride])

    return make


def in_zarr(path: Path, attributes: Mapping[str, Any], chunk: Pair) -> Make:
    """Allocate the maps in an OME-Zarr folder, whose chunks cover (height, width) pixels of the image."""

    def make(shapes: Mapping[int, Shape], like: Tensor) -> Callable[[int], Any]:
        import zarr

        group = zarr.create_group(path, attributes={**attributes, **ome_zarr.describe_levels(shapes)})
        for stride, shape in shapes.items():
            group.create_array(
                str(stride),
                shape=shape,
                chunks=(shape[0], *(min(-(-side // stride), n) for side, n in zip(chunk, shape[1:], strict=True))),
                dtype=_to_numpy(like[:0]).dtype,
                dimension_names=ome_zarr.AXES,
                config={'write_empty_chunks': True},  # so that an absent chunk means an incomplete file
            )
        return lambda stride: group[str(stride)]

    return make


def map_sink(path: Path, image_size: Pair, attributes: Mapping[str, Any], tile: Pair) -> MapSink:
    """Return a sink that writes maps to a file or folder, in the format given by its suffix."""
    if path.suffix == '.zarr':
        return MapSink(image_size, in_zarr(path, attributes, tile))
    return MapSink(image_size, in_safetensors(path, attributes))


def _to_numpy(values: Tensor) -> np.ndarray:
    """Return a numpy array; bfloat16, which numpy lacks, is reinterpreted as int16."""
    values = values.detach().cpu()
    if values.dtype == torch.bfloat16:
        values = values.view(torch.int16)
    return values.numpy()


def read_attributes(path: Path) -> dict[str, Any]:
    """Return the attributes of a file written by :func:`map_sink`; empty if it is incomplete."""
    try:
        if path.suffix == '.zarr':
            import zarr

            group = zarr.open_group(path, mode='r')
            is_whole = all(array.nchunks_initialized == array.nchunks for _, array in group.arrays())
            return dict(group.attrs) if is_whole else {}
        from safetensors import safe_open

        with safe_open(path, 'pt') as file:  # raises if the file is shorter than its header declares
            return {key: json.loads(value) for key, value in file.metadata().items()}
    except Exception:  # damaged files can raise any exception
        return {}

"""The formats of feature files: written at once or in pieces, and what each says of its image."""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from swin_dense.atomic import reserve
from swin_dense.features import ome_zarr
from swin_dense.features.tiling import Blocks
from swin_dense.windows import Pair

_SIZE_KEY, _SOURCE_KEY = 'image_size', 'source'
_SAFETENSORS_NAMES = {torch.float32: 'F32', torch.float16: 'F16', torch.bfloat16: 'BF16'}


@dataclass(frozen=True)
class Record:
    """What a feature file says of its image.

    Attributes:
        image_size: (height, width) in pixels.
        source: (bytes, nanoseconds), the size and the time of the last change of the image file; None if not known.
    """

    image_size: Pair
    source: Pair | None = None


def save(path: Path, file_format: str, maps: Mapping[int, Tensor], record: Record) -> None:
    """Write maps {stride: any shape} into a file, or a folder, of a format."""
    _WRITERS[file_format](path, {str(stride): level.cpu() for stride, level in maps.items()}, record)


def save_in_pieces(
    path: Path, file_format: str, shapes: Mapping[int, tuple[int, ...]], dtype: torch.dtype, tile: Pair, record: Record
) -> Callable[[Blocks], None]:
    """Make a file, or a folder, of a format, and return what fills in the blocks of one tile.

    Args:
        path: where to.
        file_format: one that can be written so: 'safetensors' or 'zarr'.
        shapes: of the maps, by stride.
        dtype: of the maps.
        tile: (height, width) in pixels.
        record: what to say of the image.
    """
    return _PIECEWISE_WRITERS[file_format](path, shapes, dtype, tile, record)


def read_record(path: Path, file_format: str) -> Record | None:
    """Return what a feature file says of its image, or None if it is not there or not whole."""
    if not path.exists():
        return None
    try:
        said = _READERS[file_format](path)
        height, width = said[_SIZE_KEY]
        source = said.get(_SOURCE_KEY)
        return Record((int(height), int(width)), None if source is None else (int(source[0]), int(source[1])))
    except Exception:  # damaged files raise nearly anything
        return None


def _as_dict(record: Record) -> dict[str, Any]:
    source = {} if record.source is None else {_SOURCE_KEY: list(record.source)}
    return {_SIZE_KEY: list(record.image_size), **source}


def _save_safetensors(path: Path, maps: Mapping[str, Tensor], record: Record) -> None:
    dtype = next(iter(maps.values())).dtype
    header, _ = _safetensors_header({name: tuple(level.shape) for name, level in maps.items()}, dtype, record)
    with path.open('wb') as file:
        file.write(header)
        for level in maps.values():
            file.write(_bits(level).tobytes())


def _pieces_safetensors(
    path: Path, shapes: Mapping[int, tuple[int, ...]], dtype: torch.dtype, tile: Pair, record: Record
) -> Callable[[Blocks], None]:
    """Write the header, reserve the space, and fill in the blocks where they belong."""
    header, offsets = _safetensors_header({str(stride): shape for stride, shape in shapes.items()}, dtype, record)
    path.write_bytes(header)
    reserve(path, len(header) + sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize)

    def write(blocks: Blocks) -> None:
        for stride, (rows, columns, values) in blocks.items():
            bits = _bits(values)
            # Mapped anew per block: pages count while mapped.
            np.memmap(path, bits.dtype, 'r+', offsets[str(stride)], shapes[stride])[:, rows, columns] = bits

    return write


def _safetensors_header(
    shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, record: Record
) -> tuple[bytes, dict[str, int]]:
    """Return the beginning of a file, always the same bytes for the same maps, and where in it each map begins."""
    header: dict[str, Any] = {'__metadata__': {key: json.dumps(value) for key, value in _as_dict(record).items()}}
    begins, end = {}, 0
    for name, shape in shapes.items():
        begins[name], end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {'dtype': _SAFETENSORS_NAMES[dtype], 'shape': shape, 'data_offsets': [begins[name], end]}
    text = json.dumps(header).encode()
    text += b' ' * (-len(text) % 8)
    beginning = len(text).to_bytes(8, 'little') + text
    return beginning, {name: len(beginning) + begin for name, begin in begins.items()}


def _bits(values: Tensor) -> np.ndarray:
    """Return numbers as integers of the same bits, since numpy has no bfloat16."""
    return values.cpu().contiguous().view(torch.int16 if values.itemsize == 2 else torch.int32).numpy()


def _read_safetensors(path: Path) -> dict[str, Any]:
    from safetensors import safe_open

    with safe_open(path, 'pt') as file:  # which compares the length of the file with its header
        return {key: json.loads(value) for key, value in file.metadata().items()}


def _save_npz(path: Path, maps: Mapping[str, Tensor], record: Record) -> None:
    arrays: dict[str, Any] = {name: level.numpy() for name, level in maps.items()}
    arrays[_SIZE_KEY] = np.array(record.image_size)
    with path.open('wb') as file:  # given a path, numpy would append .npz to the temporary name
        np.savez(file, **arrays)
    with zipfile.ZipFile(path, 'a') as archive:
        archive.comment = json.dumps(_as_dict(record)).encode()


def _read_npz(path: Path) -> dict[str, Any]:
    with zipfile.ZipFile(path) as archive:  # its table of contents comes last
        said = json.loads(archive.comment or '{}')
    with np.load(path) as file:
        return {_SIZE_KEY: file[_SIZE_KEY].tolist(), **said}


def _save_zarr(path: Path, maps: Mapping[str, Tensor], record: Record) -> None:
    are_maps = all(level.ndim == len(ome_zarr.AXES) for level in maps.values())
    group = _zarr_group(path, record, ome_zarr.describe_levels(map(int, maps)) if are_maps else {})
    names = ome_zarr.AXES if are_maps else None
    for name, level in maps.items():
        group.create_array(
            name, data=level.numpy(), chunks=tuple(level.shape), dimension_names=names, config=_ZARR_CONFIG
        )


def _pieces_zarr(
    path: Path, shapes: Mapping[int, tuple[int, ...]], dtype: torch.dtype, tile: Pair, record: Record
) -> Callable[[Blocks], None]:
    group = _zarr_group(path, record, ome_zarr.describe_levels(shapes))
    arrays = {
        stride: group.create_array(
            str(stride),
            shape=shape,
            # One tile, which is written at once, fills one chunk.
            chunks=(shape[0], min(tile[0] // stride, shape[1]), min(tile[1] // stride, shape[2])),
            dtype=str(dtype).removeprefix('torch.'),
            dimension_names=ome_zarr.AXES,
            config=_ZARR_CONFIG,
        )
        for stride, shape in shapes.items()
    }

    def write(blocks: Blocks) -> None:
        for stride, (rows, columns, values) in blocks.items():
            arrays[stride][:, rows, columns] = values.cpu().numpy()

    return write


def _zarr_group(path: Path, record: Record, described: Mapping[str, Any]) -> Any:
    import zarr

    return zarr.create_group(path, attributes={**_as_dict(record), **described})


def _read_zarr(path: Path) -> dict[str, Any]:
    import zarr

    group = zarr.open_group(path, mode='r')
    for name, array in group.arrays():
        if array.nchunks_initialized != array.nchunks:
            raise ValueError(f'{name} lacks chunks')
    return dict(group.attrs)


_ZARR_CONFIG = {'write_empty_chunks': True}  # so that a chunk that is not there is missing
_WRITERS = {'safetensors': _save_safetensors, 'npz': _save_npz, 'zarr': _save_zarr}
_PIECEWISE_WRITERS = {'safetensors': _pieces_safetensors, 'zarr': _pieces_zarr}
_READERS = {'safetensors': _read_safetensors, 'npz': _read_npz, 'zarr': _read_zarr}
FORMATS = tuple(_WRITERS)

"""Feature files on disk: their names and formats, written whole or not at all, and the index of a folder of them."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from swin_dense import checks
from swin_dense.atomic import reserve, written_whole
from swin_dense.features.tiling import Blocks, level_size
from swin_dense.windows import Pair

# Beside the features, so that a rename never crosses file systems; removed at the end of a run.
_PARTIAL = '.partial'
_SIZE_KEY = 'image_size'
_SAFETENSORS_NAMES = {torch.float32: 'F32', torch.float16: 'F16', torch.bfloat16: 'BF16'}


class FeatureFolder:
    """A folder with one feature file per image.

    A file appears under its name only when it is complete, so whatever is there is finished. A file's bytes depend
    on the features alone.

    Args:
        root: the folder, made where it does not exist.
        file_format: 'safetensors', 'npz' or 'zarr'.

    Raises:
        ImportError: the package that the format belongs to is not installed.
    """

    def __init__(self, root: str | os.PathLike, file_format: str) -> None:
        checks.one_of('file_format', file_format, FORMATS)
        if file_format != 'npz' and find_spec(file_format) is None:
            raise ImportError(f'the format {file_format} needs the package of that name: pip install {file_format}')
        self.root = Path(root)
        self.file_format = file_format
        self.root.mkdir(parents=True, exist_ok=True)

    def path_of(self, image: str | os.PathLike) -> Path:
        """Return the feature file of an image: its name, and a hash of its absolute path against collisions."""
        absolute = os.path.abspath(image)
        digest = hashlib.sha256(os.fsencode(absolute)).hexdigest()[:16]
        # A million files in one folder are slow to list, and a name has at most 255 bytes.
        stem = os.fsencode(Path(absolute).stem)[:80].decode(errors='ignore')
        return self.root / 'features' / digest[:2] / f'{stem}-{digest}.{self.file_format}'

    def is_finished(self, image: str | os.PathLike) -> bool:
        """Return whether the features of an image are there."""
        return self.path_of(image).exists()

    def save(self, image: str | os.PathLike, maps: Mapping[int, Tensor], image_size: Pair) -> None:
        """Write the features of an image, {stride: any shape}."""
        with self.replacing(self.path_of(image)) as temporary:
            _WRITERS[self.file_format](temporary, {str(stride): level for stride, level in maps.items()}, image_size)

    @contextmanager
    def save_in_pieces(
        self, image: str | os.PathLike, channels: Mapping[int, int], image_size: Pair, dtype: torch.dtype, tile: Pair
    ) -> Iterator[Callable[[Blocks], None]]:
        """Write maps too large for memory: the block's value takes what one tile yields.

        Args:
            image: path of the image.
            channels: by stride.
            image_size: (height, width) in pixels.
            dtype: of the maps.
            tile: (height, width) in pixels.
        """
        shapes = {stride: (count, *level_size(image_size, stride)) for stride, count in channels.items()}
        with self.replacing(self.path_of(image)) as temporary:
            yield _PIECEWISE_WRITERS[self.file_format](temporary, shapes, image_size, dtype, tile)

    def image_size(self, image: str | os.PathLike) -> Pair:
        """Return (height, width) in pixels of a finished image."""
        return _SIZE_READERS[self.file_format](self.path_of(image))

    def write_text(self, name: str, text: str) -> None:
        """Write a small file into the folder, whole or not at all."""
        with self.replacing(self.root / name) as temporary:
            temporary.write_text(text, encoding='utf-8', errors='surrogateescape')

    def remove_leftovers(self) -> None:
        """Remove what a killed run had half written; call it while no other process writes into the folder."""
        shutil.rmtree(self.root / _PARTIAL, ignore_errors=True)

    @contextmanager
    def replacing(self, path: Path) -> Iterator[Path]:
        """Give a temporary path, and move what is written there to ``path`` if the block ends well."""
        beside = self.root / _PARTIAL
        beside.mkdir(exist_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path, beside) as unfinished:
            yield unfinished.path


def write_index(folder: FeatureFolder, images: Iterable[str]) -> int:
    """Write ``index.csv``, and ``index.parquet`` where pandas and pyarrow are installed; return the rows.

    A row is a finished image: its path, its feature file relative to the folder, height and width in pixels.
    """
    rows = []
    for image in images:
        if folder.is_finished(image):
            rows.append((image, folder.path_of(image).relative_to(folder.root).as_posix(), *folder.image_size(image)))
    columns = ('image', 'file', 'height', 'width')
    folder.write_text('index.csv', _csv(columns, rows))
    try:
        import pandas
        import pyarrow  # noqa: F401  (what pandas writes parquet with)
    except ImportError:
        return len(rows)
    with folder.replacing(folder.root / 'index.parquet') as temporary:
        # Parquet holds UTF-8 alone; a byte of a path that is not is spelt out.
        readable = [
            (image.encode(errors='surrogateescape').decode(errors='backslashreplace'), *row) for image, *row in rows
        ]
        pandas.DataFrame(readable, columns=list(columns)).to_parquet(temporary)
    return len(rows)


def write_failures(folder: FeatureFolder, failures: Mapping[str, str]) -> None:
    """Write ``failures.csv``, the images that could not be done and why, or remove it where there are none."""
    if failures:
        folder.write_text('failures.csv', _csv(('image', 'error'), sorted(failures.items())))
    else:
        (folder.root / 'failures.csv').unlink(missing_ok=True)


def check_settings(folder: FeatureFolder, settings: Mapping[str, Any]) -> None:
    """Record how the features are made in ``settings.json``, or compare with what is recorded.

    Raises:
        ValueError: the folder holds features that were made in another way.
    """
    path = folder.root / 'settings.json'
    text = json.dumps(settings, indent=2) + '\n'
    if not path.exists():
        folder.write_text(path.name, text)
        return
    recorded = json.loads(path.read_text(encoding='utf-8'))
    current = json.loads(text)
    different = sorted(key for key in recorded.keys() | current.keys() if recorded.get(key) != current.get(key))
    if different:
        details = ', '.join(f'{key} {recorded.get(key)!r} there, {current.get(key)!r} now' for key in different)
        raise ValueError(f'{folder.root} holds features made in another way ({details}); choose another folder')


def _csv(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator='\n')
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue()


def _save_safetensors(path: Path, maps: Mapping[str, Tensor], image_size: Pair) -> None:
    import safetensors.torch

    contents = {name: level.cpu().contiguous() for name, level in maps.items()}
    path.write_bytes(safetensors.torch.save(contents, {_SIZE_KEY: json.dumps(image_size)}))


def _save_npz(path: Path, maps: Mapping[str, Tensor], image_size: Pair) -> None:
    arrays: dict[str, Any] = {name: level.cpu().numpy() for name, level in maps.items()}
    arrays[_SIZE_KEY] = np.array(image_size)
    with path.open('wb') as file:  # given a path, numpy would append .npz to the temporary name
        np.savez(file, **arrays)


def _save_zarr(path: Path, maps: Mapping[str, Tensor], image_size: Pair) -> None:
    group = _zarr_group(path, image_size)
    for name, level in maps.items():
        group.create_array(name, data=level.cpu().numpy(), chunks=tuple(level.shape))


def _pieces_safetensors(
    path: Path, shapes: Mapping[int, tuple[int, ...]], image_size: Pair, dtype: torch.dtype, tile: Pair
) -> Callable[[Blocks], None]:
    """Write the header, reserve the space, and fill in the blocks where they belong."""
    header: dict[str, Any] = {'__metadata__': {_SIZE_KEY: json.dumps(image_size)}}
    begin = 0
    for stride, shape in shapes.items():
        end = begin + int(np.prod(shape)) * dtype.itemsize
        header[str(stride)] = {'dtype': _SAFETENSORS_NAMES[dtype], 'shape': shape, 'data_offsets': [begin, end]}
        begin = end
    text = json.dumps(header).encode()
    text += b' ' * (-len(text) % 8)
    start = 8 + len(text)
    with path.open('wb') as file:
        file.write(len(text).to_bytes(8, 'little') + text)
    reserve(path, start + begin)

    def write(blocks: Blocks) -> None:
        for stride, (rows, columns, values) in blocks.items():
            # Bits as they are, since numpy has no bfloat16. Mapped anew per block: pages count while mapped.
            bits = values.cpu().contiguous().view(torch.int16 if dtype.itemsize == 2 else torch.int32).numpy()
            offset = start + header[str(stride)]['data_offsets'][0]
            np.memmap(path, bits.dtype, 'r+', offset, shapes[stride])[:, rows, columns] = bits

    return write


def _pieces_zarr(
    path: Path, shapes: Mapping[int, tuple[int, ...]], image_size: Pair, dtype: torch.dtype, tile: Pair
) -> Callable[[Blocks], None]:
    group = _zarr_group(path, image_size)
    arrays = {
        stride: group.create_array(
            str(stride),
            shape=shape,
            # One tile, which is written at once, fills one chunk.
            chunks=(shape[0], min(tile[0] // stride, shape[1]), min(tile[1] // stride, shape[2])),
            dtype=str(dtype).removeprefix('torch.'),
        )
        for stride, shape in shapes.items()
    }

    def write(blocks: Blocks) -> None:
        for stride, (rows, columns, values) in blocks.items():
            arrays[stride][:, rows, columns] = values.cpu().numpy()

    return write


def _zarr_group(path: Path, image_size: Pair) -> Any:
    import zarr

    return zarr.create_group(path, attributes={_SIZE_KEY: list(image_size)})


def _safetensors_size(path: Path) -> Pair:
    from safetensors import safe_open

    with safe_open(path, 'pt') as file:
        height, width = json.loads(file.metadata()[_SIZE_KEY])
    return height, width


def _npz_size(path: Path) -> Pair:
    with np.load(path) as file:
        height, width = file[_SIZE_KEY].tolist()
    return height, width


def _zarr_size(path: Path) -> Pair:
    import zarr

    size: Any = zarr.open_group(path, mode='r').attrs[_SIZE_KEY]
    height, width = size
    return height, width


_WRITERS = {'safetensors': _save_safetensors, 'npz': _save_npz, 'zarr': _save_zarr}
_PIECEWISE_WRITERS = {'safetensors': _pieces_safetensors, 'zarr': _pieces_zarr}
_SIZE_READERS = {'safetensors': _safetensors_size, 'npz': _npz_size, 'zarr': _zarr_size}
FORMATS = tuple(_WRITERS)

"""A feature folder: a Parquet table with one row per image and, if maps are stored, one file per image."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from importlib.metadata import version as version_of_package
from pathlib import Path

import torch

from swin_dense.features.parts import Parts
from swin_dense.features.shards import ALL, Shard, digest_of
from swin_dense.features.sinks import FORMATS, PooledSink, Sink, map_sink, read_attributes
from swin_dense.features.sources import tar_of
from swin_dense.ops.windows import Pair
from swin_dense.utils import checks
from swin_dense.utils.atomic import remove, written_whole

ROWS_PER_PART = 4096
_SIZE_KEY, _VERSION_KEY = 'image_size', 'version'


class FeatureFolder:
    """The output folder of one shard of an extraction; see :class:`swin_dense.features.shards.Shard`.

    A file gets its final name only when it is complete and on disk.

    Args:
        root: the folder, created if it does not exist.
        levels: strides of the maps, in their order.
        pool: 'none' for one file of maps per image, or a key of ``POOLINGS`` for vectors in the table.
        file_format: format of the maps, 'safetensors' or 'zarr'.
        dtype: dtype of the vectors.
        shard: the shard of this process.
        rows_per_part: number of rows per Parquet file.
    """

    def __init__(
        self,
        root: str | os.PathLike,
        levels: Collection[int],
        pool: str = 'none',
        file_format: str = 'safetensors',
        dtype: torch.dtype = torch.float32,
        shard: Shard = ALL,
        rows_per_part: int = ROWS_PER_PART,
    ) -> None:
        import pyarrow

        checks.one_of('file_format', file_format, FORMATS)
        checks.integer('rows_per_part', rows_per_part)
        self.root = Path(root)
        self.pool = pool
        self._format = file_format
        self._dtype = dtype
        self._shard = shard
        self._partial = self.root / f'.partial-{shard}'
        shutil.rmtree(self._partial, ignore_errors=True)  # temporary files of a killed run
        self._partial.mkdir(parents=True)
        number = pyarrow.float16() if dtype == torch.float16 else pyarrow.float32()
        vectors = [(f'level_{stride}', pyarrow.list_(number)) for stride in levels]
        columns = [('file', pyarrow.string())] if pool == 'none' else vectors
        self._parts = Parts(self.root, shard, columns, rows_per_part, self._partial)

    def is_finished(self, name: str, version: str | None) -> bool:
        """Return whether this version of an image has features; None, a deleted image, matches any version."""
        if self.pool == 'none':
            recorded = (read_attributes(self.path_of(name)) or {}).get(_VERSION_KEY)
        else:
            recorded = self._parts.versions.get(readable(name))
        return recorded is not None and version in (None, recorded)

    def confirm(self, name: str, version: str | None) -> None:
        """Add the row of a finished image if it is missing: a run may have been killed between file and row."""
        if self.pool == 'none' and version is not None and self._parts.versions.get(readable(name)) != version:
            attributes = read_attributes(self.path_of(name)) or {}
            self._add(name, version, attributes[_SIZE_KEY], {'file': self._relative_path_of(name)})

    def path_of(self, name: str) -> Path:
        """Return the file of an image's maps, named by the image and a hash of its path, which avoids collisions."""
        # Subfolders, because a folder of a million files is slow to list; shortened, because names have at most 255
        # bytes.
        stem = os.fsencode(Path(name).stem)[:80].decode(errors='ignore')
        digest = digest_of(name)
        return self.root / 'features' / digest[:2] / f'{stem}-{digest}.{self._format}'

    @contextmanager
    def receive(self, name: str, version: str | None, image_size: Pair, tile: Pair | None = None) -> Iterator[Sink]:
        """Return a context manager that gives a sink for an image's maps; they are stored if the block does not raise.

        Args:
            name: name of the image.
            version: version of the image, obtained before it was read.
            image_size: (height, width) in pixels.
            tile: (height, width) in pixels of each block; None for the whole image.
        """
        if self.pool != 'none':
            pooled = PooledSink(self.pool)
            yield pooled
            vectors = {f'level_{stride}': x.numpy() for stride, x in pooled.vectors(self._dtype).items()}
            self._add(name, version, image_size, vectors)
            return
        path = self.path_of(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        attributes = {_SIZE_KEY: list(image_size), _VERSION_KEY: version}
        with written_whole(path, self._partial) as unfinished:
            yield map_sink(unfinished.path, image_size, attributes, tile or image_size)
            if path.is_dir():  # outdated or damaged; os.replace cannot replace a folder
                remove(path)
        self._add(name, version, image_size, {'file': self._relative_path_of(name)})

    def fail(self, name: str, version: str | None, error: str) -> None:
        """Record the error of an image that has no features."""
        self._parts.add({'path': readable(name), 'version': version, 'error': readable(error)})

    def flush(self) -> None:
        """Write the buffered rows."""
        self._parts.flush()

    def close(self) -> None:
        """Write the buffered rows, also after an error, and remove temporary files."""
        self._parts.flush()
        shutil.rmtree(self._partial, ignore_errors=True)

    def prune(self, names: Collection[str]) -> int:
        """Remove this shard's rows and files of all other images, and return the number of rows removed.

        Args:
            names: names of the images and tar files to keep.
        """
        kept = set(map(readable, names))
        gone = {path for path in self._parts.column('path') if path not in kept and tar_of(path) not in kept}
        self._parts.drop(gone)
        if self.pool == 'none':
            files = self._parts.column('file')
            for path in self.root.glob('features/*/*'):
                is_kept = path.relative_to(self.root).as_posix() in files
                if not is_kept and self._shard.owns(path.stem.rpartition('-')[2]):
                    remove(path)
        return len(gone)

    def _relative_path_of(self, name: str) -> str:
        return self.path_of(name).relative_to(self.root).as_posix()

    def _add(self, name: str, version: str | None, image_size: Pair, columns: dict) -> None:
        row = {'path': readable(name), 'version': version, 'height': image_size[0], 'width': image_size[1], **columns}
        self._parts.add(row)


def check_format(file_format: str) -> None:
    """Raise ImportError if the format is zarr and the installed zarr package is too old."""
    if file_format == 'zarr' and (found := version_of_package('zarr')).startswith('2.'):
        raise ImportError(
            f'the zarr format needs zarr 3, not {found}: pip install "zarr>=3", with Python 3.11 or later; '
            'safetensors needs neither'
        )


def readable(text: str) -> str:
    """Return a path as stored in the table: valid UTF-8, with invalid bytes escaped as in ``\\xff``."""
    return text.encode('utf-8', 'surrogateescape').decode('utf-8', 'backslashreplace')

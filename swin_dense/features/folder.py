"""A feature folder: a Parquet table with one row per image and, if maps are stored, one file per image.

The table and the files of maps are all that a later run knows: an image is finished if its file of maps, or with
pooling its row, is complete and records the version that the image has now.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.compute
import torch
from pyarrow import parquet

from swin_dense.features.inference import PooledSink
from swin_dense.features.listing import Item, tar_of
from swin_dense.features.shards import ALL, FORMAT, Shard, hash_of_name
from swin_dense.features.sinks import MapSink, map_sink, read_attributes
from swin_dense.ops.windows import Pair
from swin_dense.utils import checks
from swin_dense.utils.atomic import remove, written_whole
from swin_dense.utils.choices import ROWS_PER_PART

_SECONDS = 300.0  # after this time the buffered rows are written as a part, even if it is not full
_SIZE_KEY, _VERSION_KEY = 'image_size', 'version'  # in the attributes of maps
_PACKAGE_KEY = 'swin_dense'  # in the metadata of parts, with JSON


@dataclass(eq=False)
class FeatureFolder:
    """The output folder of one shard of an extraction; see :class:`swin_dense.features.shards.Shard`.

    A file gets its final name only when it is complete and on disk.
    """

    root: Path  # created if it does not exist
    levels: Collection[int]  # strides of the maps, in their order
    pool: str = 'none'  # for one file of maps per image, or a key of POOLINGS for vectors in the table
    file_format: str = 'safetensors'  # of the maps
    dtype: torch.dtype = torch.float32  # of the vectors
    shard: Shard = ALL
    rows_per_part: int = ROWS_PER_PART

    def __post_init__(self) -> None:
        self._partial = self.root / f'.partial-{self.shard}'
        shutil.rmtree(self._partial, ignore_errors=True)  # temporary files of a killed run
        self._partial.mkdir(parents=True)
        number = pyarrow.float16() if self.dtype == torch.float16 else pyarrow.float32()
        small, text = pyarrow.int32(), pyarrow.string()
        vectors = [(f'level_{stride}', pyarrow.list_(number)) for stride in self.levels]
        columns = [('path', text), ('error', text), ('height', small), ('width', small), ('version', text)]
        columns += [('file', text)] if self.pool == 'none' else vectors
        self._schema = pyarrow.schema(columns, {_PACKAGE_KEY: json.dumps({'format': FORMAT})})
        self._rows: list[dict[str, Any]] = []
        self._oldest = time.monotonic()
        self._next = 0
        # By path, the image version of each row in the written parts; None for a failed image.
        self._versions: dict[str, str | None] = {}
        for path in self._parts():
            self._next = 1 + int(path.stem.rpartition('-')[2])
            for row in _read(path, ['path', 'version', 'error']).to_pylist():
                self._versions[row['path']] = row['version'] if row['error'] is None else None

    def is_finished(self, name: str, version: str | None) -> bool:
        """Return whether this version of an image has features; None, a deleted image, matches any version."""
        has_maps = self.pool == 'none'
        recorded = self._attributes(name).get(_VERSION_KEY) if has_maps else self._versions.get(readable(name))
        return recorded is not None and version in (None, recorded)

    def without_maps(self, item: Item, error: str | None) -> None:
        """Record the error of an image that has no features; without one, it was finished before.

        The row of a finished image is added if it is missing: a run may have been killed between file and row.
        """
        if error is not None:
            self._add(item, error=readable(error))
        elif self.pool == 'none' and item.version not in (None, self._versions.get(readable(item.name))):
            self._add_maps(item, self._attributes(item.name)[_SIZE_KEY])

    def path_of(self, name: str) -> Path:
        """Return the file of an image's maps, named by the image and a hash of its path, which avoids collisions."""
        # Subfolders, because a folder of a million files is slow to list; shortened, because names have at most 255
        # bytes.
        stem = os.fsencode(Path(name).stem)[:80].decode(errors='ignore')
        suffix = hash_of_name(name)
        return self.root / 'features' / suffix[:2] / f'{stem}-{suffix}.{self.file_format}'

    @contextmanager
    def receive(self, item: Item, image_size: Pair, tile: Pair | None = None) -> Iterator[PooledSink | MapSink]:
        """Return a context manager that gives a sink for an image's maps; they are stored if the block does not raise.

        The version of the item was obtained before it was read. Each block covers a tile of this size, or the image.
        """
        if self.pool != 'none':
            sink = PooledSink(self.pool)
            yield sink
            vectors = {f'level_{stride}': x.to(self.dtype).numpy() for stride, x in sink.levels().items()}
            self._add(item, height=image_size[0], width=image_size[1], **vectors)
            return
        path = self.path_of(item.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        attributes = {'format': FORMAT, _SIZE_KEY: list(image_size), _VERSION_KEY: item.version}
        with written_whole(path, self._partial) as unfinished:
            yield map_sink(unfinished.path, image_size, attributes, tile or image_size)
            if path.is_dir():  # outdated or damaged; os.replace cannot replace a folder
                remove(path)
        self._add_maps(item, image_size)

    def close(self) -> None:
        """Write the buffered rows, also after an error, and remove temporary files."""
        self._flush()
        shutil.rmtree(self._partial, ignore_errors=True)

    def prune(self, names: Collection[str]) -> int:
        """Remove this shard's rows and files of all images and tar files but these; return the number of rows."""
        self._flush()
        kept = set(map(readable, names))
        gone = {path for path in self._column('path') if path not in kept and tar_of(path) not in kept}
        self._drop(gone)
        if self.pool == 'none':
            files = self._column('file')
            for path in self.root.glob('features/*/*'):
                is_kept = path.relative_to(self.root).as_posix() in files
                if not is_kept and self.shard.owns(path.stem.rpartition('-')[2]):
                    remove(path)
        return len(gone)

    def _attributes(self, name: str) -> dict[str, Any]:
        """Return the attributes of the maps of an image; empty if they are missing or incomplete."""
        path = self.path_of(name)
        attributes = read_attributes(path) if path.exists() else {}
        checks.file_format(str(path), attributes, FORMAT)
        return attributes

    def _add(self, item: Item, **columns: Any) -> None:
        """Add or replace the row of an image; missing columns are null."""
        self._rows.append({'path': readable(item.name), 'version': item.version, **columns})
        if len(self._rows) >= self.rows_per_part or time.monotonic() - self._oldest > _SECONDS:
            self._flush()

    def _add_maps(self, item: Item, image_size: Sequence[int]) -> None:
        height, width = image_size
        self._add(item, height=height, width=width, file=self.path_of(item.name).relative_to(self.root).as_posix())

    def _flush(self) -> None:
        """Write the buffered rows as a part."""
        self._oldest = time.monotonic()
        if not self._rows:
            return
        if replaced := {row['path'] for row in self._rows} & self._versions.keys():
            self._drop(replaced)
        table = pyarrow.Table.from_pylist(self._rows, self._schema)
        self._write(self.root / f'part-{self.shard}-{self._next:06}.parquet', table)
        self._next += 1
        self._rows = []

    def _drop(self, paths: Collection[str]) -> None:
        """Remove the rows of these images from the written parts."""
        unwanted = pyarrow.array(sorted(paths), pyarrow.string())
        for path in self._parts():
            table = _read(path)
            kept = table.filter(pyarrow.compute.invert(pyarrow.compute.is_in(table['path'], unwanted)))
            if not len(kept):
                path.unlink()
            elif len(kept) < len(table):
                self._write(path, kept)
        for name in paths:
            self._versions.pop(name, None)

    def _column(self, name: str) -> set[Any]:
        """Return the values of a column in all written parts."""
        return {value for path in self._parts() for value in _read(path, [name])[name].to_pylist()}

    def _parts(self) -> list[Path]:
        return sorted(self.root.glob(f'part-{self.shard}-*.parquet'))

    def _write(self, path: Path, table: Any) -> None:
        with written_whole(path, self._partial) as unfinished:
            parquet.write_table(table, unfinished.path)


def _read(path: Path, columns: list[str] | None = None) -> Any:
    """Return the table of a part, or only some of its columns."""
    try:
        file = parquet.ParquetFile(path)
        facts = json.loads((file.schema_arrow.metadata or {}).get(_PACKAGE_KEY.encode(), '{}'))
        table = file.read(columns)
    except (ValueError, KeyError, OSError) as error:  # pyarrow raises subclasses of ValueError for damaged files
        raise ValueError(f'{path} is damaged ({error}); remove it, then its images are extracted again') from error
    checks.file_format(str(path), facts, FORMAT)
    return table


def readable(text: str) -> str:
    """Return a path as stored in the table: valid UTF-8, with invalid bytes escaped as in ``\\xff``."""
    return text.encode('utf-8', 'surrogateescape').decode('utf-8', 'backslashreplace')

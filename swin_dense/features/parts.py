"""A table in Parquet that grows by whole files of some thousand rows, each written by one process."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from swin_dense.features.shards import Shard
from swin_dense.utils.atomic import written_whole

_SECONDS = 300.0  # after which the rows at hand make a part, however few


class Parts:
    """The rows of one shard, one per image. A part is there whole or not at all.

    Args:
        folder: of the parts.
        shard: whose rows they are.
        columns: names and types (of pyarrow) beyond those of every table: path, error, height, width and version.
        rows_per_part: how many rows make a part.
        beside: a folder for what is unfinished, on the same file system.
    """

    def __init__(
        self, folder: Path, shard: Shard, columns: Iterable[tuple[str, Any]], rows_per_part: int, beside: Path
    ) -> None:
        import pyarrow

        small, text = pyarrow.int32(), pyarrow.string()
        fixed = [('path', text), ('error', text), ('height', small), ('width', small), ('version', text)]
        self._schema = pyarrow.schema([*fixed, *columns])
        self._folder = folder
        self._prefix = f'part-{shard}-'
        self._rows_per_part = rows_per_part
        self._beside = beside
        self._rows: list[dict[str, Any]] = []
        self._oldest = time.monotonic()
        self._next = 1 + max((int(path.stem.removeprefix(self._prefix)) for path in self._files()), default=-1)
        # By path, the version of the image that a row of an earlier run is of, None where it failed.
        self.versions: dict[str, str | None] = {}
        for path in self._files():
            table = self._read(path, ['path', 'version', 'error'])
            for name, version, error in zip(*(column.to_pylist() for column in table.columns), strict=True):
                self.versions[name] = version if error is None else None

    def add(self, row: dict[str, Any]) -> None:
        """Add the row of an image, in place of the one that it may have; columns that are left out are null."""
        self._rows.append(row)
        if len(self._rows) >= self._rows_per_part or time.monotonic() - self._oldest > _SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write the rows at hand."""
        import pyarrow

        self._oldest = time.monotonic()
        if not self._rows:
            return
        self.drop({row['path'] for row in self._rows} & self.versions.keys())
        table = pyarrow.Table.from_pylist(self._rows, self._schema)
        self._write(self._folder / f'{self._prefix}{self._next:06}.parquet', table)
        self._next += 1
        self._rows = []

    def drop(self, paths: Collection[str]) -> None:
        """Remove the rows of images from the parts that are written."""
        if not paths:
            return
        import pyarrow
        import pyarrow.compute

        unwanted = pyarrow.array(sorted(paths), pyarrow.string())
        for path in self._files():
            table = self._read(path)
            kept = table.filter(pyarrow.compute.invert(pyarrow.compute.is_in(table['path'], unwanted)))
            if not len(kept):
                path.unlink()
            elif len(kept) < len(table):
                self._write(path, kept)
        for name in paths:
            self.versions.pop(name, None)

    def column(self, name: str) -> set[Any]:
        """Return the values of a column of the parts that are written."""
        return {value for path in self._files() for value in self._read(path, [name])[name].to_pylist()}

    def _files(self) -> list[Path]:
        return sorted(self._folder.glob(f'{self._prefix}*.parquet'))

    def _read(self, path: Path, columns: list[str] | None = None) -> Any:
        from pyarrow import parquet

        try:
            return parquet.ParquetFile(path).read(columns)
        except (ValueError, KeyError, OSError) as error:  # of pyarrow, those of damaged files are ValueErrors
            raise ValueError(f'{path} is damaged ({error}); remove it, and its images are done again') from error

    def _write(self, path: Path, table: Any) -> None:
        from pyarrow import parquet

        with written_whole(path, self._beside) as unfinished:
            parquet.write_table(table, unfinished.path)

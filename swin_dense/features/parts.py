"""A Parquet table that grows by complete files of some thousand rows, each written by one process."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from swin_dense.features.shards import Shard
from swin_dense.utils.atomic import written_whole

_SECONDS = 300.0  # after this time the buffered rows are written as a part, even if it is not full


class Parts:
    """The rows of one shard, one per image, in Parquet files ("parts") that are written atomically.

    Args:
        folder: the folder of the parts.
        shard: the shard.
        columns: names and pyarrow types of the columns besides path, error, height, width and version.
        rows_per_part: number of rows per part.
        beside: a folder for temporary files, on the same file system.
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
        # By path, the image version of each row in the written parts; None for a failed image.
        self.versions: dict[str, str | None] = {}
        for path in self._files():
            table = self._read(path, ['path', 'version', 'error'])
            for name, version, error in zip(*(column.to_pylist() for column in table.columns), strict=True):
                self.versions[name] = version if error is None else None

    def add(self, row: dict[str, Any]) -> None:
        """Add or replace the row of an image; missing columns are null."""
        self._rows.append(row)
        if len(self._rows) >= self._rows_per_part or time.monotonic() - self._oldest > _SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write the buffered rows."""
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
        """Remove the rows of these images from the written parts."""
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
        """Return the values of a column in all written parts."""
        return {value for path in self._files() for value in self._read(path, [name])[name].to_pylist()}

    def _files(self) -> list[Path]:
        return sorted(self._folder.glob(f'{self._prefix}*.parquet'))

    def _read(self, path: Path, columns: list[str] | None = None) -> Any:
        from pyarrow import parquet

        try:
            return parquet.ParquetFile(path).read(columns)
        except (ValueError, KeyError, OSError) as error:  # pyarrow raises subclasses of ValueError for damaged files
            raise ValueError(f'{path} is damaged ({error}); remove it, then its images are extracted again') from error

    def _write(self, path: Path, table: Any) -> None:
        from pyarrow import parquet

        with written_whole(path, self._beside) as unfinished:
            parquet.write_table(table, unfinished.path)

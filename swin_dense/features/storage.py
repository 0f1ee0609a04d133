"""A folder of feature files: their names, what is finished, and the tables that tell of it."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swin_dense import checks
from swin_dense.atomic import written_whole
from swin_dense.features import formats
from swin_dense.features.formats import FORMATS, Record
from swin_dense.features.tiling import Blocks, level_size
from swin_dense.windows import Pair

# Beside the features, so that a rename never crosses file systems; removed at the end of a run.
_PARTIAL = '.partial'
_INDEX, _INDEX_COLUMNS = 'index.csv', ('image', 'file', 'height', 'width')
_FAILURES, _FAILURE_COLUMNS = 'failures.csv', ('image', 'error')
# What may differ between two runs into one folder: features depend on it in their last bit alone.
_NO_SETTINGS = {'batch_size'}


def require_package(file_format: str) -> None:
    """Raise ImportError with one line that says what is missing to write a format."""
    if file_format == 'npz':
        return
    if find_spec(file_format) is None:
        raise ImportError(f'the format {file_format} needs the package of that name: pip install {file_format}')
    if file_format == 'zarr' and (found := version('zarr')).startswith('2.'):
        raise ImportError(
            f'the format zarr needs zarr 3, not {found}: pip install "zarr>=3", with Python 3.11 or later; '
            'safetensors needs neither'
        )


class FeatureFolder:
    """A folder with one feature file per image.

    A file appears under its name only when it is complete and on the disk. Its bytes depend on the features, and on
    the size and the time of the image file, alone.

    Args:
        root: the folder, made where it does not exist.
        file_format: 'safetensors', 'npz' or 'zarr'.

    Raises:
        ImportError: the package that the format belongs to is not installed, or too old.
    """

    def __init__(self, root: str | os.PathLike, file_format: str) -> None:
        checks.one_of('file_format', file_format, FORMATS)
        require_package(file_format)
        self.root = Path(root)
        self.file_format = file_format
        self.root.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the folder against every other process that asks for it in this way.

        Raises:
            ValueError: another process holds it.
        """
        from filelock import FileLock, Timeout

        lock = FileLock(self.root / '.lock')
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise ValueError(
                f'another extraction is writing into {self.root}; wait for it, give this one another folder, or start '
                'both as ranks of one, which share the work: torchrun --nproc-per-node 2 ...'
            ) from None
        try:
            yield
        finally:
            lock.release()

    def path_of(self, image: str | os.PathLike) -> Path:
        """Return the feature file of an image: its name, and a hash of its absolute path against collisions."""
        absolute = os.path.abspath(image)
        digest = hashlib.sha256(os.fsencode(absolute)).hexdigest()[:16]
        # A million files in one folder are slow to list, and a name has at most 255 bytes.
        stem = os.fsencode(Path(absolute).stem)[:80].decode(errors='ignore')
        return self.root / 'features' / digest[:2] / f'{stem}-{digest}.{self.file_format}'

    def record(self, image: str | os.PathLike) -> Record | None:
        """Return what the feature file of an image says of it, or None if it is not there or not whole."""
        return formats.read_record(self.path_of(image), self.file_format)

    def is_finished(self, image: str | os.PathLike) -> bool:
        """Return whether the features of an image, as it is now, are there; those of one that is gone stay."""
        record = self.record(image)
        return record is not None and (record.source is None or source_of(image) in (None, record.source))

    def save(
        self,
        image: str | os.PathLike,
        maps: Mapping[int, Tensor],
        image_size: Pair,
        source: Pair | None = None,
    ) -> None:
        """Write the features of an image, {stride: any shape}.

        Args:
            image: path of the image.
            maps: what to write.
            image_size: (height, width) in pixels.
            source: what :func:`source_of` gave before the image was read; None asks it now.
        """
        with self.replacing(self.path_of(image)) as temporary:
            formats.save(temporary, self.file_format, maps, Record(image_size, source or source_of(image)))

    @contextmanager
    def save_in_pieces(
        self,
        image: str | os.PathLike,
        channels: Mapping[int, int],
        image_size: Pair,
        dtype: torch.dtype,
        tile: Pair,
        source: Pair | None = None,
    ) -> Iterator[Callable[[Blocks], None]]:
        """Write maps too large for memory: the block's value takes what one tile yields.

        Args:
            image: path of the image.
            channels: by stride.
            image_size: (height, width) in pixels.
            dtype: of the maps.
            tile: (height, width) in pixels.
            source: see :meth:`save`.
        """
        shapes = {stride: (count, *level_size(image_size, stride)) for stride, count in channels.items()}
        record = Record(image_size, source or source_of(image))
        with self.replacing(self.path_of(image)) as temporary:
            yield formats.save_in_pieces(temporary, self.file_format, shapes, dtype, tile, record)

    def image_size(self, image: str | os.PathLike) -> Pair:
        """Return (height, width) in pixels of a finished image."""
        record = self.record(image)
        if record is None:
            raise FileNotFoundError(f'{self.root} has no features of {os.fspath(image)!r}')
        return record.image_size

    def write_text(self, name: str, text: str) -> None:
        """Write a small file into the folder, whole or not at all."""
        with self.replacing(self.root / name) as temporary:
            temporary.write_text(text, encoding='utf-8')

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
            if path.is_dir():  # out of date or damaged; a folder is not replaced by another
                shutil.rmtree(path)


def source_of(image: str | os.PathLike) -> Pair | None:
    """Return the size in bytes and the time of the last change in nanoseconds of a file, None where it is not there."""
    try:
        status = os.stat(image)
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def write_index(folder: FeatureFolder, images: Iterable[str]) -> int:
    """Bring ``index.csv`` up to date, and ``index.parquet`` where pandas and pyarrow are installed.

    A row is a finished image: its path, its feature file relative to the folder, height and width in pixels. Rows of
    other images stay as long as their feature files do.

    Returns:
        How many of ``images`` are finished.
    """
    images = list(images)
    rows: list[tuple[Any, ...]] = []
    for image in images:
        record = folder.record(image)
        if record is not None:
            file = folder.path_of(image).relative_to(folder.root).as_posix()
            rows.append((readable(image), file, *record.image_size))
    files = {row[1] for row in rows}
    others = [
        (row['image'], row['file'], int(row['height']), int(row['width']))
        for row in _read_csv(folder.root / _INDEX, _INDEX_COLUMNS)
        if row['file'] not in files and (folder.root / row['file']).exists()
    ]
    table = others + rows
    folder.write_text(_INDEX, _csv(_INDEX_COLUMNS, table))
    try:
        import pandas
        import pyarrow  # noqa: F401  (what pandas writes parquet with)
    except ImportError:
        return len(rows)
    with folder.replacing(folder.root / 'index.parquet') as temporary:
        pandas.DataFrame(table, columns=list(_INDEX_COLUMNS)).to_parquet(temporary)
    return len(rows)


def prune(folder: FeatureFolder, images: Iterable[str]) -> int:
    """Remove the feature files and failures of all images but these; return how many files there were."""
    images = list(images)
    kept = {folder.path_of(image) for image in images}
    gone = [path for path in (folder.root / 'features').glob('*/*') if path not in kept]
    for path in gone:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    names = set(map(readable, images))
    write_failures(folder, {image: error for image, error in _read_failures(folder).items() if image in names})
    return len(gone)


def note_failure(folder: FeatureFolder, rank: int, image: str, error: str) -> None:
    """Write down at once why an image could not be done; :func:`collect_failures` makes the table."""
    path = folder.root / _PARTIAL / f'failures-{rank}.csv'
    path.parent.mkdir(exist_ok=True)
    with path.open('a', encoding='utf-8') as file:
        file.write(_csv(_FAILURE_COLUMNS if file.tell() == 0 else None, [(image, error)]))


def collect_failures(folder: FeatureFolder, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Bring ``failures.csv`` up to date with what all ranks of this run and of killed ones wrote down, and return it.

    Images that are finished by now leave it; those of other calls stay.

    Args:
        folder: of the features.
        more: further failures, by path.
    """
    failures = {**_read_failures(folder), **(more or {})}
    for part in sorted((folder.root / _PARTIAL).glob('failures-*.csv')):
        failures.update((row['image'], row['error']) for row in _read_csv(part, _FAILURE_COLUMNS))
    failures = {readable(image): error for image, error in failures.items() if not folder.is_finished(image)}
    write_failures(folder, failures)
    return failures


def write_failures(folder: FeatureFolder, failures: Mapping[str, str]) -> None:
    """Write ``failures.csv``, the images that could not be done and why, or remove it where there are none."""
    if failures:
        folder.write_text(_FAILURES, _csv(_FAILURE_COLUMNS, sorted(failures.items())))
    else:
        (folder.root / _FAILURES).unlink(missing_ok=True)


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
    current = json.loads(text)
    try:
        recorded = dict(json.loads(path.read_text(encoding='utf-8')))
    except (ValueError, TypeError) as error:
        raise ValueError(
            f'{path} is damaged ({error}), so nothing tells how the features beside it were made; choose another folder'
        ) from error
    keys = (recorded.keys() | current.keys()) - _NO_SETTINGS
    different = sorted(key for key in keys if recorded.get(key) != current.get(key))
    if different:
        details = ', '.join(f'{key} {recorded.get(key)!r} there, {current.get(key)!r} now' for key in different)
        raise ValueError(f'{folder.root} holds features made in another way ({details}); choose another folder')


def readable(path: str) -> str:
    """Return a path as tables hold it: in UTF-8, any byte that is not spelt out as in ``\\xff``."""
    return path.encode('utf-8', 'surrogateescape').decode('utf-8', 'backslashreplace')


def _read_failures(folder: FeatureFolder) -> dict[str, str]:
    return {row['image']: row['error'] for row in _read_csv(folder.root / _FAILURES, _FAILURE_COLUMNS)}


def _read_csv(path: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    """Return the rows of a table that are whole, as a killed run or a spreadsheet may have left others."""
    if not path.exists():
        return []
    with path.open(encoding='utf-8', errors='backslashreplace', newline='') as file:
        return [row for row in csv.DictReader(file) if all(row.get(column) is not None for column in columns)]


def _csv(columns: Sequence[str] | None, rows: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator='\n')
    if columns is not None:
        writer.writerow(columns)
    writer.writerows([readable(cell) if isinstance(cell, str) else cell for cell in row] for row in rows)
    return text.getvalue()

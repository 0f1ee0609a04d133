"""A folder of features, which a later run extends: vectors in Parquet files, or a safetensors file for each image."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pyarrow
import torch
from pyarrow import parquet
from torch import Tensor

from swin_dense.ops.windows import Size
from swin_dense.utils import checks
from swin_dense.utils.atomic import atomic_path, file_at, write_json, write_tensors

SETTINGS = '_settings.json'  # pyarrow, and with it pandas, leave out files with this prefix
ROWS_PER_PART = 4096
SECONDS_PER_PART = 60  # so that a process that is killed loses the rows of a minute at most
Content = TypeVar('Content')


class FeatureFolder:
    """The output of `swin-dense features`. A file gets its final name only when it is complete and on disk.

    ``settings``, in the types of JSON, determine the features: all runs into a folder must have the same. The rows of a
    part are in the order of ``paths``, the images of this run, not in the order of the calls that add them. ``clock``
    counts seconds. ``finished`` are the paths of the images that have features.
    """

    def __init__(
        self,
        root: Path,
        settings: Mapping[str, Any],
        paths: Iterable[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._root = root
        self._positions = {path: position for position, path in enumerate(paths)}
        self._clock = clock
        self._written = clock()
        root.mkdir(parents=True, exist_ok=True)
        if not (root / SETTINGS).exists():
            write_json(root / SETTINGS, settings)
        there = _read(root / SETTINGS, _settings)
        if different := checks.changed_settings(there, json.loads(json.dumps(settings))):
            raise ValueError(
                f'{root} contains features computed with other settings ({different}); choose another folder'
            )
        self._next = 0
        self._rows: list[dict[str, Any]] = []
        self.finished: set[str] = set()
        for part in root.glob('part-*.parquet'):
            number, paths = _read(part, _number_and_paths)
            self._next = max(self._next, number + 1)
            self.finished.update(paths)

    def add_vectors(self, path: str, image_size: Size, vectors: Mapping[int, Tensor], dtype: torch.dtype) -> None:
        """Add the vectors of an image by stride."""
        self._add(path, image_size, **{f'level_{stride}': x.to(dtype).numpy() for stride, x in vectors.items()})

    def add_maps(self, path: str, image_size: Size, maps: Mapping[int, Tensor]) -> None:
        """Write the maps of an image, (C, rows, columns) by stride, and add its row."""
        # A hash of the path avoids collisions; subfolders, because a folder of a million files is slow to list.
        digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
        file = self._root / 'features' / digest[:2] / f'{Path(path).stem[:80]}-{digest}.safetensors'
        file.parent.mkdir(parents=True, exist_ok=True)
        tensors = {str(stride): level.cpu().contiguous() for stride, level in maps.items()}
        write_tensors(file, tensors, {'image_size': json.dumps(image_size)})
        self._add(path, image_size, file=file.relative_to(self._root).as_posix())

    def close(self) -> None:
        """Write the rows that are not in a part yet."""
        if self._rows:
            self._rows.sort(key=lambda row: self._positions[row['path']])
            with atomic_path(self._root / f'part-{self._next:06}.parquet') as unfinished:
                parquet.write_table(pyarrow.Table.from_pylist(self._rows), unfinished)
            self._next += 1
            self._rows = []
        self._written = self._clock()

    def _add(self, path: str, image_size: Size, **columns: Any) -> None:
        height, width = image_size
        self._rows.append({'path': path, 'height': height, 'width': width, **columns})
        if len(self._rows) == ROWS_PER_PART or self._clock() - self._written >= SECONDS_PER_PART:
            self.close()


def weights_digest(module: torch.nn.Module) -> str:
    """Return a short hash of all weights, to check that two runs use the same weights."""
    digest = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


def _read(file: Path, parse: Callable[[Path], Content]) -> Content:
    """Parse a file of the folder; raise a ValueError if `swin-dense features` did not write it, or it is damaged."""
    file_at(file)  # to open a pipe would wait
    try:
        return parse(file)
    except (ValueError, TypeError) as error:
        reason = checks.shortened(str(error).partition('\n')[0])
        raise ValueError(
            f'{file} is damaged, or not of `swin-dense features` ({reason}); move it away, or choose another folder'
        ) from error


def _settings(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_text(encoding='utf-8')))


def _number_and_paths(part: Path) -> tuple[int, list[str]]:
    number = int(part.stem.removeprefix('part-'))
    return number, parquet.read_table(part, columns=['path'])['path'].to_pylist()

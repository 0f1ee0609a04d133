"""Shards: divide images among processes without communication, and record the settings of each shard."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swin_dense.utils import checks
from swin_dense.utils.atomic import alone, write_json

# Version of the files in a feature folder: records of shards, parts and maps, which contain it as `format`. It is
# raised when an earlier version of this package would misread one of them.
FORMAT = 1

# Settings of folders of earlier versions that do not determine the features.
_NO_SETTINGS = {'batch_size'}


@dataclass(frozen=True)
class Shard:
    """One of ``count`` disjoint parts of a list of images."""

    index: int = 0
    count: int = 1

    def __str__(self) -> str:
        return f'{self.index:05}-of-{self.count:05}'

    def owns(self, name_hash: str) -> bool:
        """Return whether an image, given the :func:`hash_of_name` its name, belongs here, whatever else is listed."""
        return int(name_hash, 16) % self.count == self.index


ALL = Shard()


def parse_shard(text: str) -> Shard:
    """Parse a shard given as 'I/N', with I from 0 to N - 1."""
    index, slash, count = text.partition('/')
    if not (slash and index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise ValueError(f'--shard must be I/N with I from 0 to N - 1, such as 0/8, got {text!r}')
    return Shard(int(index), int(count))


def shard_of_environment(environment: Mapping[str, str]) -> tuple[Shard, str]:
    """Return this process's shard under torchrun, a Slurm array or both, and the environment variables it is from."""
    index, count = int(environment.get('RANK', 0)), int(environment.get('WORLD_SIZE', 1))
    used = ['RANK'] if count > 1 else []
    if 'SLURM_ARRAY_TASK_COUNT' in environment:
        used.append('SLURM_ARRAY_TASK_ID')
        names = ('ID', 'COUNT', 'MIN', 'MAX')
        task, tasks, first, last = (int(environment[f'SLURM_ARRAY_TASK_{name}']) for name in names)
        step = (last - first) // max(tasks - 1, 1) or 1
        if first + step * (tasks - 1) != last:
            raise ValueError(
                f'the {tasks} tasks of the Slurm array from {first} to {last} are not evenly spaced, so their shards '
                'are unknown; give --shard $SLURM_ARRAY_TASK_ID/N'
            )
        index, count = index + (task - first) // step * count, count * tasks
    return Shard(index, count), ' and '.join(used)


def hash_of_name(name: str) -> str:
    """Return a short hash of an image's name."""
    return hashlib.sha256(os.fsencode(name)).hexdigest()[:16]


class Record:
    """The settings and the image list of a shard, stored as one JSON file per shard in the feature folder.

    The settings are the options that determine the features, the names those of all listed images and tar files.
    """

    def __init__(self, folder: Path, shard: Shard, settings: Mapping[str, Any], names: Iterable[str]) -> None:
        listed = [os.fsencode(name) + b'\0' for name in names]
        digest = hashlib.sha256(b''.join(listed)).hexdigest()[:16]
        content = {'format': FORMAT, 'settings': settings, 'listed': len(listed), 'list': digest}
        self._folder = folder
        self._shard = shard
        self._content = json.loads(json.dumps(content))  # as another shard reads it

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Lock this shard, compare its settings with those of all shards that have started, and write its record."""
        if (self._folder / 'settings.json').exists():
            raise _refused(self._folder, 'contains features of an older version, which cannot be extended, only read')
        busy = f'another extraction is writing shard {self._shard.index}/{self._shard.count} of {self._folder}; wait '
        busy += 'for it, choose another folder, or split the images: --shard 0/2 and --shard 1/2'
        with alone(self._folder / f'.shard-{self._shard}.lock', busy):
            self._check_settings()
            write_json(self._folder / f'_shard-{self._shard}.json', self._content)
            self._check_settings()  # again, because another shard may have started in between
            yield

    def other_lists(self) -> list[str]:
        """Return a message for each shard whose image list differs from this shard's.

        Images may be missing until that shard runs again.
        """
        return [
            f'{path.name} has another list: {other["listed"]} images and tar files, not {self._content["listed"]}'
            for path, other in self._records()
            if other['list'] != self._content['list']
        ]

    def _check_settings(self) -> None:
        for path, record in self._records():
            if not path.name.endswith(f'-of-{self._shard.count:05}.json'):
                raise _refused(
                    self._folder,
                    f'was written with another number of shards (see {path.name}); use the same number, running '
                    'several shards one after another if needed',
                )
            recorded = {key: value for key, value in record['settings'].items() if key not in _NO_SETTINGS}
            if different := checks.differences(recorded, self._content['settings']):
                raise _refused(self._folder, f'contains features computed with other settings ({different})')

    def _records(self) -> Iterator[tuple[Path, dict[str, Any]]]:
        """Yield every record in the folder, including one of an earlier run of this shard."""
        for path in sorted(self._folder.glob('_shard-*.json')):
            try:
                record = json.loads(path.read_text(encoding='utf-8'))
                record['settings'].keys(), record['listed'], record['list']
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                reason = f'is damaged ({error}), so the settings of the features in its folder are unknown'
                raise _refused(path, reason) from error
            checks.file_format(str(path), record, FORMAT)
            yield path, record


def _refused(path: Path, why: str) -> ValueError:
    return ValueError(f'{path} {why}; choose another folder')

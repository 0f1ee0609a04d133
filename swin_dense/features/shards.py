"""Which images each of several processes takes, without talking to the others, and what each puts on record."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swin_dense.utils import locks
from swin_dense.utils.atomic import written_whole

# What may differ between two runs into one folder: features depend on it in their last bit alone.
_NO_SETTINGS = {'batch_size'}


@dataclass(frozen=True)
class Shard:
    """One of several shares of a list of images."""

    index: int = 0
    count: int = 1

    def __str__(self) -> str:
        return f'{self.index:05}-of-{self.count:05}'

    def owns(self, digest: str) -> bool:
        """Return whether a name of this :func:`digest_of` is of this share, whatever else is listed."""
        return int(digest, 16) % self.count == self.index


ALL = Shard()


def parse_shard(text: str) -> Shard:
    """Return the shard that a user means by 'I/N'.

    Raises:
        ValueError: it is no such text, or I does not lie between 0 and N - 1.
    """
    index, slash, count = text.partition('/')
    if not (slash and index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise ValueError(f'--shard must be I/N with I from 0 to N - 1, such as 0/8, got {text!r}')
    return Shard(int(index), int(count))


def shard_of_environment(environment: Mapping[str, str]) -> tuple[Shard, str]:
    """Return the shard of this process under torchrun, in a Slurm array, or in both, and the variables that tell it."""
    index, count = int(environment.get('RANK', 0)), int(environment.get('WORLD_SIZE', 1))
    told = ['RANK'] if count > 1 else []
    if 'SLURM_ARRAY_TASK_COUNT' in environment:
        names = ('ID', 'COUNT', 'MIN', 'MAX')
        task, tasks, first, last = (int(environment[f'SLURM_ARRAY_TASK_{name}']) for name in names)
        step = (last - first) // max(tasks - 1, 1) or 1
        if first + step * (tasks - 1) != last:
            raise ValueError(
                f'{tasks} tasks of a Slurm array from {first} to {last} do not say which shards they are; give '
                '--shard $SLURM_ARRAY_TASK_ID/N'
            )
        index, count = index + (task - first) // step * count, count * tasks
        told.append('SLURM_ARRAY_TASK_ID')
    return Shard(index, count), ' and '.join(told)


def digest_of(name: str) -> str:
    """Return a short hash of the name of an image."""
    return hashlib.sha256(os.fsencode(name)).hexdigest()[:16]


def alone(folder: Path, shard: Shard) -> AbstractContextManager[None]:
    """Hold a shard of a folder against a second process that is given the same one by mistake.

    Raises:
        ValueError: another process holds it.
    """
    return locks.alone(
        folder / f'.shard-{shard}.lock',
        f'another extraction is writing shard {shard.index}/{shard.count} of {folder}; wait for it, give this one '
        'another folder, or share the work: --shard 0/2 and --shard 1/2',
    )


class Record:
    """How a folder's features are made, and which list its shards work through: a file of JSON for each shard.

    Args:
        folder: of the features.
        shard: of this process.
        settings: what the features depend on.
        names: all that is listed, the same in every shard.
    """

    def __init__(self, folder: Path, shard: Shard, settings: Mapping[str, Any], names: Iterable[str]) -> None:
        digest, count = hashlib.sha256(), 0
        for name in names:
            digest.update(os.fsencode(name) + b'\0')
            count += 1
        self._folder = folder
        self._shard = shard
        self._said = {'settings': settings, 'listed': count, 'list': digest.hexdigest()[:16]}

    def begin(self) -> None:
        """Compare the settings with those of all shards that have begun, and write them down.

        Raises:
            ValueError: the folder holds features that were made or divided in another way.
        """
        if (self._folder / 'settings.json').exists():
            raise ValueError(
                f'{self._folder} holds features of an older version, which recorded them otherwise; its files can be '
                'read as before, but go on in another folder'
            )
        path = self._folder / f'_shard-{self._shard}.json'
        self._check_settings()
        with written_whole(path) as unfinished:
            unfinished.path.write_text(json.dumps(self._said, indent=2) + '\n', encoding='utf-8')
        self._check_settings()  # of a shard that began in between

    def other_lists(self) -> list[str]:
        """Say of which shards the list is not that of this one, so that images may be missing until they run again."""
        return [
            f'{path.name} is of another list, of {said["listed"]} images and tar files and not {self._said["listed"]}'
            for path, said in self._others()
            if said['list'] != self._said['list']
        ]

    def _check_settings(self) -> None:
        current = json.loads(json.dumps(self._said['settings']))
        for path, said in self._others():
            if not path.name.endswith(f'-of-{self._shard.count:05}.json'):
                raise ValueError(
                    f'{self._folder} is divided otherwise, see {path.name}: go on with as many shards, several one '
                    'after the other where there are fewer machines, or choose another folder'
                )
            recorded = said['settings']
            keys = (recorded.keys() | current.keys()) - _NO_SETTINGS
            different = sorted(key for key in keys if recorded.get(key) != current.get(key))
            if different:
                details = ', '.join(f'{key} {recorded.get(key)!r} there, {current.get(key)!r} now' for key in different)
                raise ValueError(
                    f'{self._folder} holds features made in another way ({details}); choose another folder'
                )

    def _others(self) -> Iterator[tuple[Path, dict[str, Any]]]:
        """Yield the records of the folder, that of an earlier run of this shard among them."""
        for path in sorted(self._folder.glob('_shard-*.json')):
            try:
                said = json.loads(path.read_text(encoding='utf-8'))
                said['settings'].keys(), said['listed'], said['list']
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise ValueError(
                    f'{path} is damaged ({error}), so nothing tells how the features beside it were made; choose '
                    'another folder'
                ) from error
            yield path, said

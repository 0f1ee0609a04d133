"""The folder of results that ``swin-dense predict`` writes: a name for each image, its files, a record and a lock.

The record tells the files of this command from those of its user, which are never deleted, and replaced only by force.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from swin_dense.images.listing import real_path
from swin_dense.utils import checks
from swin_dense.utils.atomic import atomic_path, exclusive_lock, file_at, remove, write_json
from swin_dense.workbench.runtime.outputs import Prediction

_logger = logging.getLogger(__name__)

ENDINGS = ('json', 'painted.jpg', 'labels.png', 'panoptic.png')
# No result can have these names: they end in none of the endings.
RECORD, LOCK = '.swin_dense_predict.jsonl', '.swin_dense_predict.lock'
_LARGEST_JPEG = 65500  # pixels of a side


class _Entry(NamedTuple):
    image: str  # real path
    endings: list[str]  # of the files that exist
    settings: Mapping[str, Any] | None = None  # that they were predicted with; None if it is not known


class ResultFolder:
    """The results of images, in a folder, which :meth:`locked` creates."""

    def __init__(self, path: Path, resume: bool = False, force: bool = False) -> None:
        self.path = path
        self._resume = resume
        self._force = force
        self._entries: dict[str, _Entry] = {}
        self._settings: Mapping[str, Any] | None = None

    def locked(self) -> AbstractContextManager[Any]:
        """Create the folder, and keep other processes from writing to it; raise a ValueError if one does."""
        self.path.mkdir(parents=True, exist_ok=True)
        if find_spec('filelock') is None:  # a dependency of torch, without which exported models run
            _logger.warning(
                'WARNING: without filelock, the results of another `swin-dense predict` in %s would mix with these; '
                'pip install filelock',
                self.path,
            )
            return nullcontext()
        busy = f'another `swin-dense predict` is writing to {self.path}; wait for it, or choose another --out'
        return exclusive_lock(self.path / LOCK, busy)

    def named(self, images: Mapping[str, Path]) -> dict[str, str]:
        """Return a name for the results of each image.

        An image keeps the name that the record has. Otherwise the name is the path without suffix, or with it where
        images differ only in the suffix, and with a number where they differ only in case. ``images`` maps files to
        their path in the folder, with their suffix.

        Raises:
            ValueError: several images have the same path in the folder.
        """
        self._entries = self._recorded()
        recorded = {entry.image: name for name, entry in self._entries.items()}
        known = {}
        names = {}
        for image, path in images.items():
            real = real_path(image)
            if real in recorded:
                known[image] = recorded[real]
            names[image] = known.get(image, str(path.with_suffix('')))
        while True:
            clashing = [image for image in _clashing(names) if image not in known]
            longer = {image: str(images[image]) for image in clashing}
            if longer.items() <= names.items():
                break
            names.update(longer)
        of_name = Counter(names.values())
        if twice := [image for image, name in names.items() if of_name[name] > 1]:
            raise ValueError(
                f'several images would be written to {self.path / names[twice[0]]}: {", ".join(twice)}; write them to '
                'other folders'
            )
        # Only case differs now, in which not every file system tells names apart.
        clashing = sorted(_clashing(names), key=lambda image: (image not in known, image))
        taken = {name.casefold() for image, name in names.items() if image not in clashing}
        for image in clashing:
            name = names[image]
            numbered = itertools.chain([name], (f'{name}-{number}' for number in itertools.count(2)))
            names[image] = next(free for free in numbered if free.casefold() not in taken)
            taken.add(names[image].casefold())
        return names

    def left(self, names: Mapping[str, str], settings: Mapping[str, Any] | None = None) -> dict[str, str]:
        """Return those of the :meth:`named` images that are to be predicted, with their names.

        ``settings``, in the types of JSON, determine the predictions: model and options.

        Raises:
            FileExistsError: a file exists, and neither ``resume`` nor ``force`` was given; or a file to resume is not a
                result of this command, or is that of another image, or was predicted with other settings; or a
                path with the name of a result is no regular file.
        """
        self._settings = settings
        self._entries = self._recorded()  # another process may have written meanwhile
        return {image: name for image, name in names.items() if not self._is_done(real_path(image), name)}

    def _is_done(self, image: str, name: str) -> bool:
        """Return whether an image needs no prediction; raise FileExistsError if it would replace another file."""
        existing = [ending for ending in ENDINGS if file_at(self.file(name, ending)).exists()]
        if not existing or self._force:
            return False
        first = self.file(name, existing[0])
        if not self._resume:
            raise FileExistsError(f'{first} exists already; force=True (--force) replaces it')
        entry = self._entries.get(name, _Entry(image, []))
        for ending in existing:
            if ending not in entry.endings:
                raise FileExistsError(
                    f'{self.file(name, ending)} is not a result of `swin-dense predict`, or one of an earlier version; '
                    'move it, or choose another --out'
                )
        if entry.image != image:
            raise FileExistsError(f'{first} is the result of {entry.image}; write those of {image} to another folder')
        is_complete = 'json' in existing
        known = entry.settings if is_complete else None
        if known and self._settings and (other := checks.changed_settings(known, self._settings)):
            raise FileExistsError(
                f'{first} was predicted with other settings ({other}); give --force instead of --resume to replace it, '
                'or choose another --out'
            )
        return is_complete

    def clear(self, name: str) -> None:
        """Delete the results of an earlier run."""
        entry = self._entries.get(name)
        if entry is None:
            return
        for ending in entry.endings:
            remove(self.file(name, ending))
        self._record(name, _Entry(entry.image, []))

    def write(self, image: str, name: str, prediction: Prediction) -> None:
        """Write the results of an image, the JSON last, so that it marks complete results."""
        pictures = _pictures(prediction)
        for ending in (*pictures, 'json'):
            if self.file(name, ending).exists() and not self._force:
                raise FileExistsError(f'{self.file(name, ending)} was written by another program meanwhile')
        entry = _Entry(real_path(image), [*pictures, 'json'], self._settings)
        self._record(name, entry)
        from PIL import Image

        for ending, pixels in pictures.items():
            with atomic_path(self.file(name, ending)) as unfinished:
                Image.fromarray(pixels).save(unfinished, quality=95)
        write_json(self.file(name, 'json'), prediction.record)

    def file(self, name: str, ending: str) -> Path:
        return self.path / f'{name}.{ending}'

    def _recorded(self) -> dict[str, _Entry]:
        """Read the record: one line of JSON for each change, of which the last counts."""
        path = file_at(self.path / RECORD)
        lines = path.read_text(encoding='utf-8').splitlines() if path.exists() else []
        entries = {}
        for line in lines:
            try:
                content = json.loads(line)
            except ValueError:  # the last line of a process that was killed, before it wrote a file
                continue
            try:
                checks.file_format(str(path), content, 1)
                entry = _Entry(str(content['image']), list(content['files']), content.get('settings'))
                entries[str(content['name'])] = entry
            except (KeyError, TypeError, AttributeError):
                raise ValueError(
                    f'{path} is damaged, or not of `swin-dense predict` ({checks.shortened(line)}); move it away, or '
                    'choose another --out'
                ) from None
        return entries

    def _record(self, name: str, entry: _Entry) -> None:
        self.file(name, 'json').parent.mkdir(parents=True, exist_ok=True)
        content = {'format': 1, 'name': name, 'image': entry.image, 'files': entry.endings, 'settings': entry.settings}
        with (self.path / RECORD).open('a', encoding='utf-8') as file:
            file.write(f'\n{json.dumps(content)}\n')  # on a line of its own, also after half a line
        self._entries[name] = entry


def _clashing(names: Mapping[str, str]) -> list[str]:
    """Return the images whose names are those of others, also where case does not count."""
    counts = Counter(name.casefold() for name in names.values())
    return [image for image, name in names.items() if counts[name.casefold()] > 1]


def _pictures(prediction: Prediction) -> dict[str, np.ndarray]:
    """Return the pixels of the pictures to write, by ending."""
    pictures = {}
    if prediction.painted is not None and max(prediction.painted.shape) <= _LARGEST_JPEG:
        pictures['painted.jpg'] = prediction.painted
    if prediction.labels is not None:  # PNG has integers of 8 and 16 bits
        kind = 'uint8' if prediction.labels.max() < 256 else 'uint16'
        pictures['labels.png'] = prediction.labels.astype(kind)
    if prediction.panoptic is not None:
        segments = [segment['id'] for segment in prediction.record['segments']]
        is_segment = np.isin(prediction.panoptic, segments)
        ids = np.where(is_segment, prediction.panoptic, 0)
        # As in COCO: red + 256 green + 65536 blue.
        red = ids % 256
        green = ids // 256 % 256
        blue = ids // 256**2
        pictures['panoptic.png'] = np.stack([red, green, blue], 2).astype(np.uint8)
    return pictures

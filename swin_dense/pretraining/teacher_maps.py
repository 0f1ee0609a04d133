"""A folder with the maps of a teacher, computed once, so that the training needs neither the teacher nor its memory.

The maps are those of fixed crops: ``UnlabelledImages(views=N)`` draws N crops of each image once and for all, so a map
belongs to exactly the pixels that the backbone sees, whatever the network of the teacher does with its context. The
folder contains ``maps.json``, and ``maps/XX/HASH-VIEW.npz`` for each crop; HASH is of the image's path below the folder
that contains all images, so that both can be moved.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from swin_dense.features.shards import hash_of_name
from swin_dense.pretraining.teachers import Teacher
from swin_dense.utils import checks
from swin_dense.utils.atomic import write_json, written_whole
from swin_dense.utils.pixels import ImageError

MANIFEST = 'maps.json'
FORMAT = 1
_OF_TEACHER = ('out_channels', 'out_strides', 'multiple', 'size')
_logger = logging.getLogger(__package__)


class StoredMaps(Teacher):
    """The maps of a teacher in a folder that :func:`store_maps` wrote, in the place of the teacher.

    Args:
        folder: the folder.

    Attributes:
        teacher: the name of the teacher that computed the maps.
        licence: its licence; None if it was not known.
        crops: the options of the :class:`UnlabelledImages` whose crops have maps.

    Raises:
        FileNotFoundError: the folder has no ``maps.json``.
        ValueError: that file is damaged, or of a later version.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        path = self.folder / MANIFEST
        if not path.is_file():
            raise FileNotFoundError(
                f'{folder} has no {MANIFEST}, so it is no folder of maps; `swin-dense teach` writes one'
            )
        try:
            content = json.loads(path.read_text(encoding='utf-8'))
            checks.file_format(str(path), content, FORMAT)
            super().__init__(_no_network, **{name: content[name] for name in _OF_TEACHER}, mean=None, std=None)
            self.teacher, self.licence, self.crops = content['teacher'], content['licence'], dict(content['crops'])
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f'{path} is damaged ({error}); write the maps again, into another folder') from error

    def has(self, key: str, view: int) -> bool:
        """Return whether there are maps of a crop, named as in :meth:`UnlabelledImages.key`."""
        return self.path_of(key, view).is_file()

    def read(self, key: str, view: int) -> list[Tensor]:
        """Return the maps of a crop, (C_i, rows, columns); raise ImageError if they are missing or damaged."""
        path = self.path_of(key, view)
        try:
            with np.load(path) as file:
                return [torch.from_numpy(file[str(index)]) for index in range(len(self.out_channels))]
        except FileNotFoundError:
            raise ImageError(f'{self.folder} has no maps of its crop {view}') from None
        except Exception as error:  # a damaged file can raise any error
            raise ImageError(
                f'its maps in {path} are damaged ({error}); remove this file and write it again'
            ) from error

    def path_of(self, key: str, view: int) -> Path:
        """Return the file of a crop."""
        name = hash_of_name(key)
        return self.folder / 'maps' / name[:2] / f'{name}-{view}.npz'


def _no_network(images: Tensor) -> Any:
    raise ValueError(
        'stored maps come from the data set: give maps=batch["maps"] of UnlabelledImages(maps=...) to forward'
    )


def store_maps(
    teacher: Teacher,
    splits: Sequence[Any],
    folder: str | Path,
    *,
    name: str,
    licence: str | None = None,
    batch_size: int = 8,
    dtype: torch.dtype = torch.float16,
) -> Iterator[int]:
    """Write the maps of a teacher for the crops of data sets, and yield the number of crops after each batch.

    Crops whose maps are there already are not computed again, so that an interrupted run continues. An image that
    cannot be read is left out, with a warning.

    Args:
        teacher: the teacher, on its device.
        splits: the :class:`UnlabelledImages` for training, with ``views``, and for the held-out images.
        folder: where the maps are written; it is created.
        name: what to call the teacher.
        licence: its licence, if it is known.
        batch_size: crops that are computed at a time.
        dtype: of the stored maps, float16 or float32.

    Raises:
        ValueError: the folder has maps of another teacher or of other crops, data sets have no fixed crops, or maps
            exceed the range of float16.
    """
    folder = Path(folder)
    for images in splits:
        if images.is_training and images.views is None:
            raise ValueError('maps can be stored of fixed crops only; give UnlabelledImages views=4, or another number')
    crops = {**splits[0].crops, 'views': max(images.views or 0 for images in splits)}
    content = {'format': FORMAT, 'teacher': name, 'licence': licence, 'dtype': str(dtype).removeprefix('torch.')}
    content |= {one: getattr(teacher, one) for one in _OF_TEACHER} | {'crops': crops}
    _write_manifest(folder, json.loads(json.dumps(content)))
    stored = StoredMaps(folder)
    parameter = next(teacher.parameters(), torch.zeros(0))
    for batch in _batches(splits, stored, batch_size):
        maps = teacher(torch.stack([crop for _, _, crop in batch]).to(parameter.device))
        for index, (key, view, _) in enumerate(batch):
            values = {str(level): one[index].float().to(dtype).cpu().numpy() for level, one in enumerate(maps)}
            if not all(np.isfinite(one).all() for one in values.values()):
                raise ValueError(f'maps of {key} are not finite in {dtype}; store them in float32 (--dtype float32)')
            path = stored.path_of(key, view)
            path.parent.mkdir(parents=True, exist_ok=True)
            with written_whole(path) as unfinished, unfinished.path.open('wb') as file:
                np.savez(file, **values)
        yield len(batch)


def _batches(splits: Sequence[Any], stored: StoredMaps, size: int) -> Iterator[list[tuple[str, int, Tensor]]]:
    """Yield (name of the image, number of the crop, the crop) of all crops without maps, up to ``size`` at a time."""
    batch = []
    for images in splits:
        for index in range(len(images)):
            missing = [view for view in images.view_numbers if not stored.has(images.key(index), view)]
            try:
                image = images.read(index) if missing else None
            except (ImageError, FileNotFoundError) as error:
                _logger.warning('%s; it gets no maps', error)
                continue
            for view in missing:
                batch.append((images.key(index), view, images.crop(image, index, view)))
                if len(batch) == size:
                    yield batch
                    batch = []
    if batch:
        yield batch


def _write_manifest(folder: Path, content: Mapping[str, Any]) -> None:
    """Write the manifest; raise ValueError if the folder has one that differs."""
    path = folder / MANIFEST
    if path.is_file():
        try:
            found = json.loads(path.read_text(encoding='utf-8'))
        except json.JSONDecodeError as error:
            raise ValueError(f'{path} is damaged ({error}); choose another folder') from error
        if different := checks.differences(found, content):
            raise ValueError(
                f'{folder} contains maps of another teacher or of other crops ({different}); choose another folder'
            )
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_json(path, content)

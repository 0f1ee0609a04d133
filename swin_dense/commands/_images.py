"""The images that a command gets as files and folders."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePath
from typing import NamedTuple

from swin_dense.commands._options import check_file
from swin_dense.utils import search
from swin_dense.utils.choices import IMAGE_SUFFIXES

SUFFIXES = sorted(IMAGE_SUFFIXES - {'.zarr'})


class ImageFile(NamedTuple):
    """An image.

    Attributes:
        path: the file.
        name: its path below the folder that was given, with slashes; its file name if it was given itself.
    """

    path: str
    name: str


def images_at(places: Sequence[str], left_out: Iterable[str] = ()) -> tuple[list[ImageFile], list[str]]:
    """Return the images that are given, also those in folders, and messages on what cannot be searched.

    Args:
        places: image files, and folders whose images, also in their subfolders, are sorted.
        left_out: real paths of folders to leave out.

    Raises:
        FileNotFoundError: a place does not exist.
        ValueError: a folder contains no images.
    """
    images: list[ImageFile] = []
    skipped: dict[str, str | None] = {}
    for place in places:
        if not Path(place).is_dir():
            check_file(place)
            images.append(ImageFile(place, Path(place).name))
            continue
        found = sorted(
            search.walk(place, lambda name: PurePath(name).suffix.lower() in SUFFIXES, skipped, set(left_out))
        )
        if not found:
            raise ValueError(f'the folder {place} contains no images ({", ".join(SUFFIXES)})')
        images += [ImageFile(path, PurePath(os.path.relpath(path, place)).as_posix()) for path in found]
    return images, [f'{path} {reason}' for path, reason in skipped.items() if reason is not None]

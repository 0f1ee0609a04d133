"""Images in the folders that a command gets."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePath

from swin_dense.utils import search
from swin_dense.utils.choices import IMAGE_SUFFIXES


def images_in(folder: str, skipped: dict[str, str | None], left_out: Iterable[str] = ()) -> list[str]:
    """Return the sorted image files of a folder and its subfolders; ``skipped`` is filled as by ``search.walk``.

    Args:
        folder: the folder.
        skipped: paths that are left out, with the reason.
        left_out: real paths of folders to leave out.

    Raises:
        ValueError: there are none.
    """

    def is_image(name: str) -> bool:
        suffix = PurePath(name).suffix.lower()
        return suffix in IMAGE_SUFFIXES and suffix != '.zarr'

    found = sorted(search.walk(folder, is_image, skipped, set(left_out)))
    if not found:
        raise ValueError(f'the folder {folder} contains no images ({", ".join(sorted(IMAGE_SUFFIXES))})')
    return found

"""List images in files, folders, glob patterns and lists."""

from __future__ import annotations

import codecs
import glob
import os
from collections.abc import Sequence
from pathlib import Path

from swin_dense.utils import search
from swin_dense.utils.addresses import is_address, read_bytes
from swin_dense.utils.choices import IMAGE_SUFFIXES

Skipped = dict[str, str | None]


def list_images(
    places: Sequence[str | os.PathLike], skipped: Skipped | None = None, without: Sequence[str | os.PathLike] = ()
) -> list[str]:
    """List the images of files, folders, glob patterns, lists and addresses of single images, each once.

    Folders are searched recursively, following links, for files with the suffix of an image. A ``.txt`` file contains
    one path or address per line.

    Args:
        places: paths, patterns and addresses.
        skipped: filled with the paths that are skipped in folders, and the reason, or None for other suffixes.
        without: folders that are not searched.

    Raises:
        FileNotFoundError: a place does not exist, or is a pattern without matches.
    """
    found: dict[str, None] = {}
    skipped = {} if skipped is None else skipped
    for place in (os.fspath(place) for place in places):
        path = Path(place)
        if path.is_dir():
            names = sorted(search.walk(place, is_image, skipped, {os.path.realpath(one) for one in without}))
        elif path.suffix == '.txt':
            names = lines_in(place)
        elif path.exists() or is_address(place):
            names = [place]
        else:
            names = sorted(name for name in glob.glob(place, recursive=True) if not search.is_special(name))
            if not names:
                raise FileNotFoundError(f'{place!r} does not exist, or is a pattern without matches')
        found.update((name if is_address(name) else os.path.abspath(name), None) for name in names)
    return list(found)


def is_image(name: str) -> bool:
    """Return whether a file has the suffix of an image."""
    return os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES


def lines_in(place: str | os.PathLike) -> list[str]:
    """Return the lines of a text file that are not empty: UTF-8, or UTF-16 as Windows writes it."""
    content = read_bytes(place)
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        text = content.decode('utf-16')
    else:
        text = content.removeprefix(codecs.BOM_UTF8).decode(errors='surrogateescape')
    return [line for line in text.splitlines() if line.strip()]

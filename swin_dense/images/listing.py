"""List images in files, folders, glob patterns and lists, without torch."""

from __future__ import annotations

import codecs
import glob
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

_SUFFIXES = (
    'apng avif bmp dib gif j2c j2k jfif jp2 jpc jpe jpeg jpf jpg jpx '
    'pbm pcx pfm pgm png pnm ppm qoi sgi tga tif tiff webp'
)
_NAMED = 5  # endings in a message
IMAGE_SUFFIXES = frozenset(f'.{suffix}' for suffix in _SUFFIXES.split())
# Paths that are left out, and the reason; None for files that are not wanted.
Skipped = dict[str, str | None]


def list_images(
    places: Sequence[str | os.PathLike], skipped: Skipped | None = None, without: Sequence[str | os.PathLike] = ()
) -> list[str]:
    """List the images of files, folders, glob patterns and lists, each once.

    Folders are searched recursively, following links, for files with the suffix of an image. A ``.txt`` file contains
    one path per line. ``skipped`` is filled with the paths that are skipped in folders, and the reason, or None for
    other suffixes. Folders in ``without`` are not searched.

    Raises FileNotFoundError if a place does not exist, or is a pattern without matches.
    """
    found: dict[str, None] = {}
    skipped = {} if skipped is None else skipped
    for place in (os.fspath(place) for place in places):
        path = Path(place)
        if path.is_dir():
            names = sorted(walk(place, is_image, skipped, {os.path.realpath(folder) for folder in without}))
        elif path.suffix == '.txt':
            names = lines_in(place)
        elif path.exists():
            names = [place]
        else:
            names = sorted(name for name in glob.glob(place, recursive=True) if not is_special(name))
            if not names:
                raise FileNotFoundError(f'{place!r} does not exist, or is a pattern without matches')
        found.update((os.path.abspath(name), None) for name in names)
    return list(found)


def left_out(skipped: Skipped) -> list[str]:
    """Return a note on the files that were left out because of their suffix, with the number of each; or nothing."""
    unwanted = [path for path, reason in skipped.items() if reason is None]
    if not unwanted:
        return []
    return [
        f'left out {len(unwanted)} of the files because of their endings, {count_endings(unwanted)}; give those that '
        'are images by name'
    ]


def count_endings(paths: Iterable[str | os.PathLike]) -> str:
    """Describe the endings of file names, with the number of each; a name without one is its own."""
    counts = Counter(path.suffix or path.name for path in map(Path, paths))
    more = f', ... ({len(counts)} endings)' if len(counts) > _NAMED else ''
    return ', '.join(f'{ending} ({count})' for ending, count in counts.most_common(_NAMED)) + more


def is_image(name: str) -> bool:
    """Return whether a file has the suffix of an image."""
    return os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES


def lines_in(place: str | os.PathLike) -> list[str]:
    """Return the lines of a text file that are not empty: UTF-8, or UTF-16 as Windows writes it."""
    content = Path(place).read_bytes()
    is_utf_16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    text = content.decode('utf-16') if is_utf_16 else content.decode('utf-8-sig', 'surrogateescape')
    return [line for line in text.splitlines() if line.strip()]


def walk(folder: str, is_wanted: Callable[[str], bool], skipped: Skipped, seen: set[str]) -> Iterator[str]:
    """Yield the wanted files of a folder and its subfolders, following links.

    ``skipped`` is filled as in :func:`list_images`. ``seen`` contains the real paths of folders to leave out, and is
    extended by those that are visited, because links may form cycles.
    """
    real = os.path.realpath(folder)
    if real in seen:
        return
    seen.add(real)
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        skipped[folder] = f'cannot be read: {error.strerror}'
        return
    for entry in entries:
        is_folder = os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir()
        if is_folder:
            yield from walk(entry.path, is_wanted, skipped, seen)
        elif not is_wanted(entry.name):
            skipped[entry.path] = None
        elif entry.is_file(follow_symlinks=False) or not is_special(entry.path):
            yield entry.path
        else:
            skipped[entry.path] = 'is not a regular file'


def is_special(path: str) -> bool:
    """Return whether reading a file could wait for ever, as that of a named pipe; not so for a link to nothing."""
    return os.path.exists(path) and not os.path.isfile(path)


def real_path(path: str) -> str:
    """Return the path of a file without links in its folders; a link to a file is a file of its own."""
    folder, name = os.path.split(path)
    return os.path.join(os.path.realpath(folder), name)

"""Search folders for files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator


def walk(
    folder: str, is_wanted: Callable[[str], bool], skipped: dict[str, str | None], seen: set[str]
) -> Iterator[str]:
    """Yield the wanted files of a folder and its subfolders, following links.

    ``skipped`` is filled with other paths and the reason, None for files that are not wanted. ``seen`` contains the
    real paths of folders to leave out, and is extended by those that are visited, because links may form cycles.
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

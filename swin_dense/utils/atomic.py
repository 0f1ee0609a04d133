"""Files and folders that appear under their name complete or not at all, whatever stops the program or the machine."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


def check_destination(path: Path, force: bool) -> None:
    """Refuse a place where no file can be written, or where one must not be replaced.

    Raises:
        OSError: its folder does not exist, it is a folder itself, or it exists and ``force`` is not given.
    """
    if not path.parent.is_dir():
        raise FileNotFoundError(f'there is no folder {path.parent}; make it first')
    if path.is_dir():
        raise IsADirectoryError(f'{path} is a folder')
    check_free(path, force)


def check_free(path: Path, force: bool) -> None:
    """Refuse a file that is there, or a folder with something in it, which would be replaced.

    Raises:
        FileExistsError: it is there, and ``force`` is not given.
    """
    if not force and (any(path.iterdir()) if path.is_dir() else path.exists()):
        raise FileExistsError(f'{path} exists already; force=True replaces it')


@dataclass
class Unfinished:
    """What is being written.

    Attributes:
        path: where to write it, a file or a folder.
        destination: where it goes at the end; may still be changed.
    """

    path: Path
    destination: Path


@contextmanager
def written_whole(destination: Path, beside: Path | None = None) -> Iterator[Unfinished]:
    """Move what the block writes to its destination if the block ends well, and remove it if not.

    Args:
        destination: replaced if it is a file; its folder must exist.
        beside: a folder for what is unfinished, on the same file system; None for that of ``destination``.
    """
    unfinished = Unfinished((beside or destination.parent) / f'.{secrets.token_hex(4)}-{destination.name}', destination)
    try:
        yield unfinished
        put_in_place(unfinished.path, unfinished.destination)
    finally:
        remove(unfinished.path)


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it, if it is there."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def put_in_place(finished: Path, destination: Path) -> None:
    """Bring a file or folder to the disk and give it its name, in the place of a file that has it."""
    # Without this a power cut can leave the name and not the content, as the two reach the disk in any order.
    _flush(finished)
    os.replace(finished, destination)
    _flush_names(destination.parent)


def reserve(path: Path, size: int) -> None:
    """Take the space that a file will need, so that a full disk is an error here.

    When a mapped page is first written it would be a bus error, which ends the process without a word.

    Raises:
        OSError: there is not so much space.
    """
    if hasattr(os, 'posix_fallocate'):
        with path.open('rb+') as file:
            os.posix_fallocate(file.fileno(), 0, size)


def _flush(path: Path) -> None:
    if not path.is_dir():
        with path.open('rb+') as file:
            os.fsync(file.fileno())
        return
    for child in path.iterdir():
        _flush(child)
    _flush_names(path)


def _flush_names(folder: Path) -> None:
    """Bring the names of a folder's entries to the disk, where the system lets one do so."""
    if hasattr(os, 'O_DIRECTORY'):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

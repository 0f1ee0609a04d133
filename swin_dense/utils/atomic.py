"""Atomic writes: a file gets its final name only when complete, even if the process or machine crashes.

And locks between processes, which the operating system releases when a process is killed.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

_KINDS = {
    stat.S_IFDIR: 'folder',
    stat.S_IFCHR: 'device',
    stat.S_IFBLK: 'device',
    stat.S_IFIFO: 'pipe',
    stat.S_IFSOCK: 'socket',
}


def file_at(path: Path) -> Path:
    """Return the file that a path stands for, which may not exist: the path itself, or where a symbolic link leads.

    Raises:
        OSError: the path exists and is no regular file, but a folder, device, pipe or socket. No output replaces these.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        pass
    else:
        if not stat.S_ISREG(mode):
            kind = _KINDS.get(stat.S_IFMT(mode), 'special file')
            raise FileExistsError(f'{path} is a {kind}, which no output replaces; choose another path')
    return Path(os.path.realpath(path))


def check_destination(path: Path, force: bool) -> None:
    """Raise OSError if a file cannot be written to a path, or would replace another without ``force``."""
    for place in (path, file_at(path)):
        if not place.parent.is_dir():
            raise FileNotFoundError(f'there is no folder {place.parent}; create it first')
        check_folder(place.parent)
    check_free(path, force)


def check_folder(path: Path, option: str = '') -> None:
    """Raise OSError if no files can be written to a folder, which is created later if there is none.

    ``option`` ends the error with the option that chooses another folder, such as ' with --work-dir'.
    """
    there = next(folder for folder in (path, *path.parents) if folder.exists())
    if not there.is_dir():
        raise NotADirectoryError(f'{path} must be a folder, but {there} is a file')
    if not os.access(there, os.W_OK | os.X_OK):
        raise PermissionError(f'the folder {there} is not writable; choose another{option}')


def check_free(path: Path, force: bool) -> None:
    """Raise FileExistsError if a path exists and is no empty folder, unless ``force`` is given.

    With ``force``, it may be a regular file or a folder, but no device, pipe or socket.
    """
    is_taken = any(path.iterdir()) if path.is_dir() else file_at(path).exists()
    if is_taken and not force:
        raise FileExistsError(f'{path} exists already; force=True (--force) replaces it')


@contextmanager
def atomic_path(destination: Path) -> Iterator[Path]:
    """Yield a temporary path beside a file's destination, to which the block writes.

    At its end the file is moved to the destination, replacing a regular file; where the destination is a symbolic
    link, it replaces the file that the link leads to. If the block raises, it is removed. The folder must exist.

    Raises:
        OSError: the destination is a folder, device, pipe or socket, before the block or after it.
    """
    # With the name of the destination, by whose suffix some libraries choose a format.
    unfinished = file_at(destination).with_name(f'.{secrets.token_hex(4)}-{destination.name}')
    try:
        yield unfinished
        # Without the flush, a power failure can leave a renamed but empty file: the disk may write both in any order.
        _flush(unfinished)
        os.replace(unfinished, file_at(destination))
        _flush(unfinished.parent)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def remove(path: Path) -> None:
    """Delete a file if it exists; where the path is a symbolic link, delete the file that it leads to.

    Raises:
        OSError: the path is a folder, device, pipe or socket.
    """
    file_at(path).unlink(missing_ok=True)


def write_text(destination: Path, text: str) -> None:
    """Write a text file, in UTF-8, as a whole."""
    write_bytes(destination, text.encode())


def write_bytes(destination: Path, content: bytes) -> None:
    """Write a file as a whole."""
    with atomic_path(destination) as unfinished:
        unfinished.write_bytes(content)


def write_json(destination: Path, content: Any) -> None:
    """Write a JSON file as a whole."""
    write_text(destination, json.dumps(content, indent=2) + '\n')


def write_tensors(destination: Path, tensors: Mapping[str, Any], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file as a whole. An error of that library, as on a full disk, is raised as an OSError."""
    from safetensors import SafetensorError  # an optional package
    from safetensors.torch import save_file

    with atomic_path(destination) as unfinished:
        try:
            save_file(dict(tensors), unfinished, metadata)
        except SafetensorError as error:
            raise OSError(f'{destination} cannot be written: {error}') from error


def reserve(path: Path, size: int) -> None:
    """Allocate the disk space of a file, so that a full disk raises an OSError here."""
    # Otherwise the first write to a memory-mapped page would fail with a bus error, which kills the process.
    if hasattr(os, 'posix_fallocate'):
        with path.open('rb+') as file:
            os.posix_fallocate(file.fileno(), 0, size)


def _flush(path: Path) -> None:
    """Flush a file, or the entries of a folder if the operating system supports it, to disk."""
    is_folder = path.is_dir()
    if not is_folder or hasattr(os, 'O_DIRECTORY'):
        mode = os.O_RDONLY if is_folder else os.O_RDWR
        descriptor = os.open(path, mode)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def exclusive_lock(path: Path, otherwise: str | None = None) -> AbstractContextManager[Any]:
    """Lock a file, whose folder must exist, and return a context manager that releases the lock at its end.

    If another process holds the lock, wait for it; with ``otherwise``, raise a ValueError with this message instead.
    """
    from filelock import FileLock, Timeout  # a dependency of torch, which exported models do not need

    timeout = -1 if otherwise is None else 0  # in seconds; -1 waits for ever
    file_at(path)  # opening a pipe would wait, and some versions of filelock empty or delete what they find
    try:
        return FileLock(path).acquire(timeout=timeout)
    except Timeout:
        raise ValueError(otherwise) from None

"""File locks between processes, which the operating system releases when a process is killed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout


@contextmanager
def alone(path: Path, otherwise: str | None = None) -> Iterator[None]:
    """Hold an exclusive lock on a file while the block runs.

    Args:
        path: the lock file; its folder must exist.
        otherwise: the error message if another process holds the lock; None waits for that process.

    Raises:
        ValueError: another process holds the lock, and ``otherwise`` is given.
    """
    lock = FileLock(path)
    try:
        lock.acquire(timeout=-1 if otherwise is None else 0)
    except Timeout:
        raise ValueError(otherwise) from None
    try:
        yield
    finally:
        lock.release()

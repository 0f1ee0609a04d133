"""Locks that a process which is killed does not leave behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout


@contextmanager
def alone(path: Path, otherwise: str | None = None) -> Iterator[None]:
    """Hold a lock file, whose folder exists, against every other process that asks for it in this way.

    Args:
        path: of the lock file.
        otherwise: what to say where another process holds it; None waits for that one.

    Raises:
        ValueError: another process holds it.
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

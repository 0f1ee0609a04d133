"""Access to object storage and servers through fsspec, which is a dependency of torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit


def is_address(source: Any) -> bool:
    """Return whether a source is a URL of object storage or a server."""
    return isinstance(source, str) and '://' in source


def shown(source: str | os.PathLike[str]) -> str:
    """Return a path or an address for messages and files, without user names, passwords, tokens and signatures."""
    text = os.fspath(source)
    if not is_address(text):
        return text
    parts = urlsplit(text)
    return f'{parts.scheme}://{parts.netloc.rpartition("@")[2]}{parts.path}'


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """Return the content of a path or address; any error of a remote file system is an OSError, or an ImportError."""
    if not is_address(path):
        return Path(path).read_bytes()
    with any_error_as_os_error(str(path)):
        system, inside = file_system(str(path))
        return system.cat_file(inside)


def file_system(address: str) -> tuple[Any, str]:
    """Return the fsspec file system of an address, and the path within that file system.

    Raises ImportError if a package that the address needs is not installed, ValueError for an unknown protocol.
    """
    import fsspec

    try:
        return fsspec.core.url_to_fs(address)
    except ImportError as error:
        raise ImportError(f'{address.partition("://")[0]}://: {error}') from error


@contextmanager
def any_error_as_os_error(name: str) -> Iterator[None]:
    """Convert any error of remote file systems and tar files to an OSError; an ImportError is kept."""
    try:
        yield
    except (OSError, ImportError):
        raise
    except Exception as error:
        raise OSError(f'{name}: {error or type(error).__name__}') from error

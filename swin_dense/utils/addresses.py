"""Access to object storage and servers through fsspec, which is a dependency of torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def is_address(source: Any) -> bool:
    """Return whether a source is a URL of object storage or a server."""
    return isinstance(source, str) and '://' in source


def file_system(address: str) -> tuple[Any, str]:
    """Return the fsspec file system of an address, and the path within that file system.

    Raises:
        ImportError: fsspec, or the package that it needs for the address, is not installed.
        ValueError: fsspec does not support the protocol of the address.
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

"""What stands in object storage or on a server, by fsspec, which torch brings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def is_address(source: Any) -> bool:
    """Return whether a source names something in object storage or on a server."""
    return isinstance(source, str) and '://' in source


def file_system(address: str) -> tuple[Any, str]:
    """Return the file system of fsspec that an address belongs to, and the path within.

    Raises:
        ImportError: fsspec, or the package that it needs for the address, is not installed.
        ValueError: there is no such kind of address.
    """
    import fsspec

    try:
        return fsspec.core.url_to_fs(address)
    except ImportError as error:
        raise ImportError(f'{address.partition("://")[0]}://: {error}') from error


@contextmanager
def any_error_as_os_error(name: str) -> Iterator[None]:
    """Turn what file systems of networks and tar files raise into an OSError; a missing package stays one."""
    try:
        yield
    except (OSError, ImportError):
        raise
    except Exception as error:
        raise OSError(f'{name}: {error or type(error).__name__}') from error

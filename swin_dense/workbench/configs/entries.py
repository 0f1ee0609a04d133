"""All entries of a config, at any depth."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def walk(value: Any, address: str = '') -> Iterator[tuple[str, Any]]:
    """Yield all values inside a value, outer ones first, with the keys and numbers that lead to them, as in `--set`."""
    yield address, value
    items: list[Any] = []
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, (list, tuple)):
        items = list(enumerate(value))
    for key, item in items:
        yield from walk(item, f'{address}.{key}' if address else str(key))

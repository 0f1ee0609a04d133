"""Addresses of files on servers."""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import urlsplit


def is_address(source: Any) -> bool:
    """Return whether a source is a URL."""
    return isinstance(source, str) and '://' in source


def without_secrets(source: str | os.PathLike[str]) -> str:
    """Return a path or an address for messages and files, without user names, passwords, tokens and signatures."""
    text = os.fspath(source)
    if not is_address(text):
        return text
    parts = urlsplit(text)
    return f'{parts.scheme}://{parts.netloc.rpartition("@")[2]}{parts.path}'

"""Digests of files."""

from __future__ import annotations

import hashlib
from pathlib import Path

_CHUNK = 1 << 20  # bytes


def file_digest(path: Path, algorithm: str = 'sha256') -> str:
    """Return the hexadecimal digest of a file."""
    digest = hashlib.new(algorithm)
    with path.open('rb') as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()

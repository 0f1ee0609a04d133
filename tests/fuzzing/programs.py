"""Parts of checkpoints: files of torch, archives, and operations of pickles."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from typing import Any

import torch


def words_of(text: str) -> list[str]:
    """Return the words of a text; a list of them would take a line for each."""
    return text.split()


def names_of(text: str) -> list[tuple[str, str]]:
    """Return the names in a text of MODULE:NAME, which are separated by spaces, as pairs."""
    entries = [entry.partition(':') for entry in text.split()]
    return [(module, name) for module, _, name in entries]


def saved(content: Any, **options: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(content, stream, **options)
    return stream.getvalue()


def zipped_records(records: dict[str, bytes], **options: Any) -> bytes:
    """Return a zip archive of records, with the version as torch writes it."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, 'w', **options) as archive:
        for name, content in {**records, 'version': b'3\n'}.items():
            archive.writestr(f'a/{name}', content)
    return stream.getvalue()


def pushed(value: Any) -> bytes:
    """Return the operations that push an integer or a text of any length."""
    if isinstance(value, str):
        content = value.encode()
        return b'X' + struct.pack('<I', len(content)) + content
    if -(2**31) <= value < 2**31:
        return b'J' + struct.pack('<i', value)
    content = pickle.encode_long(value)
    return b'\x8a' + bytes([len(content)]) + content

"""What to do about an exception of a framework that reads data: the only place that knows their words."""

from __future__ import annotations

from typing import Any

# The start of an exception of mmdet, mmseg or pycocotools, and what to do.
HINTS_ON_READING = {
    "KeyError: 'area'": 'write the area; width times height is enough',
    "KeyError: 'bbox'": 'bbox must be x, y, width and height',
    "KeyError: 'height'": 'write height and width in pixels',
    "KeyError: 'width'": 'write height and width in pixels',
    "KeyError: 'iscrowd'": 'write iscrowd, 0 for a single object',
    'AssertionError: Annotation ids': 'number the annotations from 1, each differently',
    'JSONDecodeError: Unexpected UTF-8 BOM': 'save it as UTF-8 without a byte order mark',
    'UnicodeDecodeError': 'save it as UTF-8',
}


def hint_on_reading(error: Exception, hints: dict[str, str] | None = None) -> str:
    """Return what to do about an exception that a framework raised for data, after a colon; '' if it is not known."""
    said = f'{type(error).__name__}: {error}'
    table = HINTS_ON_READING if hints is None else hints
    return next((f': {hint}' for start, hint in table.items() if said.startswith(start)), '')


def described(error: Exception) -> str:
    """Return the class and the beginning of the message of an exception."""
    text: Any = str(error).strip()
    return f'{type(error).__name__}: {text[:200]}' if text else type(error).__name__

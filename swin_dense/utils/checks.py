"""Argument checks; their errors contain the argument's name, the given value and the allowed values."""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_FEW = 5  # names that a message lists
_SHOWN = 250  # characters of a text of a file in a message; in a file it can have any length


class OptionError(ValueError, AssertionError):
    """An option has an invalid value. Also an AssertionError, which mmdet and mmseg raise for invalid options."""


def integer(name: str, value: Any, minimum: int = 1) -> int:
    """Return ``value`` as an int of at least ``minimum``."""
    try:
        index = operator.index(value)
    except TypeError:  # a tensor of one float has __index__
        index = None
    if index is None or isinstance(value, bool) or getattr(value, 'ndim', 0) > 0:  # an array with one entry
        raise TypeError(f'{name} must be an integer, got {value!r} of type {type(value).__name__}')
    if index < minimum:
        raise ValueError(f'{name} must be at least {minimum}, got {index}')
    return index


def pair(name: str, value: Any, minimum: int = 1) -> tuple[int, int]:
    """Return ``value``, one integer or (height, width), as (height, width)."""
    values = tuple(value) if isinstance(value, Sequence) and not isinstance(value, (str, bytes)) else (value,)
    if len(values) not in (1, 2):
        raise OptionError(f'{name} must be one integer or a (height, width) pair, got {value!r}')
    height, width = (integer(name, item, minimum) for item in (values[0], values[-1]))
    return height, width


def integers(name: str, value: Any, length: int | None = None, minimum: int = 1) -> tuple[int, ...]:
    """Return ``value`` as a non-empty tuple of integers, of the given length if ``length`` is given."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise TypeError(f'{name} must be a list of integers, got {value!r}')
    values = tuple(integer(f'every entry of {name}', item, minimum) for item in value)
    if not values:
        raise ValueError(f'{name} must not be empty')
    if length is not None and len(values) != length:
        raise ValueError(f'{name} must have one entry per stage, that is {length}, got {len(values)}: {value!r}')
    return values


def boolean(name: str, value: Any) -> bool:
    """Return ``value``, which must be True or False."""
    if not isinstance(value, bool):
        raise TypeError(f'{name} must be True or False, got {value!r}')
    return value


def rate(name: str, value: Any) -> float:
    """Return ``value``, a probability, as a float in [0, 1]."""
    value = number(name, value)
    if not 0.0 <= value <= 1.0:
        raise ValueError(f'{name} must lie between 0 and 1, got {value}')
    return value


def number(name: str, value: Any) -> float:
    """Return ``value``, a finite int or float, as a float."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f'{name} must be a number, got {value!r} of type {type(value).__name__}')
    if not math.isfinite(value):
        raise ValueError(f'{name} must be finite, got {value}')
    return float(value)


def file_format(name: str, content: Mapping[str, Any], newest: int) -> None:
    """Raise ValueError if a file's ``format``, 1 if it has none, is later than the newest that this version reads.

    A format is a whole number. It is raised when earlier versions of this package would misread the file.
    """
    written = content.get('format', 1)
    if isinstance(written, bool) or not isinstance(written, int) or written < 1:
        raise ValueError(f'{name} is damaged: its format must be an integer from 1, got {shortened(repr(written))}')
    if written > newest:
        raise ValueError(
            f'{name} has the format {written} of a later version of swin_dense, this one reads up to {newest}: update '
            'swin_dense here, or write it again with this version'
        )


def one_of(name: str, value: Any, allowed: Iterable[Any]) -> Any:
    """Return ``value``, one of those allowed; the ValueError suggests a similar allowed value."""
    allowed = list(allowed)
    if value not in allowed:
        advice = closest(value, allowed) if isinstance(value, str) else ''  # no number is like another
        raise ValueError(f'{name} must be one of {allowed}, got {value!r}{advice}')
    return value


def closest(word: Any, words: Iterable[Any]) -> str:
    """Return '; did you mean ...?' with up to three of ``words`` that begin with ``word``, or the most similar one.

    The result is an empty string if none is similar.
    """
    given = str(word).lower()
    by_lower_case = {str(item).lower(): item for item in words}
    longer = [name for name in by_lower_case if given and name.startswith(given)]
    matches = longer[:3] or difflib.get_close_matches(given, by_lower_case, n=1)
    if not matches:
        return ''
    *others, last = [repr(by_lower_case[name]) for name in matches]
    first = f'{", ".join(others)} or ' if others else ''
    return f'; did you mean {first}{last}?'


def changed_settings(there: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return the entries that differ between a record of settings and those of now, for a message; '' if none do."""
    absent = 'not given'  # another value than None: mean=None is no normalisation, and without mean it is ImageNet's
    found = []
    for key in sorted(there.keys() | now.keys()):
        old = there.get(key, absent)
        new = now.get(key, absent)
        if old != new:
            found.append(f'{key} {shortened(repr(old))} there, {shortened(repr(new))} now')
    return ', '.join(found)


def first_few(names: Iterable[Any], separator: str = ', ') -> str:
    """Return the first names for a message and, if there are more, the total number."""
    names = list(names)
    more = f'{separator}... ({len(names)} in all)' if len(names) > _FEW else ''
    return separator.join(shortened(str(name)) for name in names[:_FEW]) + more


def shortened(text: str) -> str:
    """Return a name, or another text of a file, as one that can be printed, without the middle of a long one."""
    shown = text if text.isprintable() else ascii(text)[1:-1]
    half = _SHOWN // 2
    return shown if len(shown) <= _SHOWN else f'{shown[:half]}...{shown[-half:]}'


def described(error: Exception) -> str:
    """Return the class and the beginning of the message of an exception."""
    text = str(error).strip()
    return f'{type(error).__name__}: {text[:200]}' if text else type(error).__name__

"""Entries of a config as they are typed on a command line: KEY=VALUE."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmengine.config import Config


def parse_settings(settings: Sequence[str]) -> dict[str, Any]:
    """Return what ``mmengine.Config.merge_from_dict`` takes, from strings such as 'model.backbone.with_cp=True'.

    Raises:
        ValueError: a setting is not of the form KEY=VALUE, or the brackets of its value do not match.
    """
    parsed = {}
    for setting in settings:
        key, separator, value = setting.partition('=')
        if not separator or not key:
            raise ValueError(f'a setting must be KEY=VALUE, such as model.backbone.with_cp=True, got {setting!r}')
        parsed[key] = parse_value(value)
    return parsed


def merge_settings(config: Config, settings: dict[str, Any]) -> None:
    """Change entries of a config, those that :func:`parse_settings` returns.

    Raises:
        ValueError: they do not go with the config or with each other.
    """
    for key, value in settings.items():
        try:
            config.merge_from_dict({key: value})
        except Exception as error:  # of mmengine, where a key leads into what is no dict or list
            raise ValueError(f'{key}={value!r} cannot be set in this config: {error}') from error


def parse_value(text: str) -> Any:
    """Return a value as mmengine reads it, but with the spaces that it would drop from a path."""
    from mmengine.config import DictAction

    is_path = ' ' in text and os.sep in text and not set(text) & set('[](),')
    if is_path:
        return text
    try:
        return DictAction._parse_iterable(text)
    except (AssertionError, RecursionError):
        raise ValueError(f'the brackets of {text!r} do not match, or are nested too deep') from None

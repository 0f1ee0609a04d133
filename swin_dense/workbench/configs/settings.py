"""Config entries from the command line, in the form KEY=VALUE."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmengine.config import Config


def parse_settings(settings: Sequence[str]) -> dict[str, Any]:
    """Parse strings such as 'model.backbone.with_cp=True' into a dict for ``mmengine.Config.merge_from_dict``.

    Raises:
        ValueError: a setting does not have the form KEY=VALUE, or the brackets of its value do not match.
    """
    parsed = {}
    for setting in settings:
        key, separator, value = setting.partition('=')
        if not separator or not key:
            raise ValueError(f'a setting must be KEY=VALUE, such as model.backbone.with_cp=True, got {setting!r}')
        parsed[key] = parse_value(value)
    return parsed


def merge_settings(config: Config, settings: dict[str, Any]) -> None:
    """Merge the result of :func:`parse_settings` into a config.

    Raises:
        ValueError: the settings are not compatible with the config or with each other.
    """
    for key, value in settings.items():
        try:
            config.merge_from_dict({key: value})
        except Exception as error:  # mmengine raises various exceptions if a key leads into a scalar
            raise ValueError(f'{key}={value!r} cannot be set in this config: {error}') from error


def parse_value(text: str) -> Any:
    """Parse a value as mmengine does, but keep spaces in paths, which mmengine would remove."""
    from mmengine.config import DictAction

    is_path = ' ' in text and os.sep in text and not set(text) & set('[](),')
    if is_path:
        return text
    try:
        return DictAction._parse_iterable(text)
    except (AssertionError, RecursionError):
        raise ValueError(f'the brackets of {text!r} do not match, or are nested too deep') from None

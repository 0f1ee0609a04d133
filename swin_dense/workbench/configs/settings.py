"""Config entries from the command line, in the form KEY=VALUE."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmengine.config import Config

# Spaces around commas, and at the inner sides of brackets.
_SEPARATING = re.compile(r' +(?=[,)\]])|(?<=[,(\[]) +')
_SPACE = '\0'  # cannot be in an argument of a command


def parse_settings(settings: Sequence[str]) -> dict[str, Any]:
    """Parse strings such as 'model.backbone.with_cp=True' into a dict for ``mmengine.Config.merge_from_dict``."""
    parsed = {}
    for setting in settings:
        key, separator, value = setting.partition('=')
        if not separator or not key:
            raise ValueError(f'a setting must be KEY=VALUE, such as model.backbone.with_cp=True, got {setting!r}')
        parsed[key] = parse_value(value)
    return parsed


def merge_settings(config: Config, settings: dict[str, Any]) -> None:
    """Merge the result of :func:`parse_settings` into a config; a dict replaces the entry."""
    for key, value in settings.items():
        # mmengine merges a dict unless it is told to replace the entry, and refuses if the entry is None.
        whole = {**value, '_delete_': True} if isinstance(value, dict) else value
        try:
            config.merge_from_dict({key: whole})
        except Exception as error:  # mmengine raises various exceptions if a key leads into a scalar
            raise ValueError(f'{key}={value!r} cannot be set in this config: {error}') from error


def parse_value(text: str) -> Any:
    """Parse a value as mmengine does, but keep the spaces inside names and paths, and read dicts of Python."""
    from mmengine.config import DictAction

    text = text.strip()
    if text.startswith('{'):
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            raise ValueError(
                f"{text!r} is no dict of Python, such as {{'type': 'Pretrained', 'checkpoint': 'swin.pth'}}"
            ) from None
    kept = _SEPARATING.sub('', text).replace(' ', _SPACE)  # mmengine removes every space
    try:
        return _with_spaces(DictAction._parse_iterable(kept))
    except (AssertionError, RecursionError):
        raise ValueError(f'the brackets of {text!r} do not match, or are nested too deep') from None


def _with_spaces(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(map(_with_spaces, value))
    return value.replace(_SPACE, ' ') if isinstance(value, str) else value

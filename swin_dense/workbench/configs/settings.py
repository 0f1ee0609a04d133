"""Config entries from the command line, in the form KEY=VALUE."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmengine.config import Config


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
    """Parse a value: Python's, YAML's in brackets, several with commas between them, else the text itself."""
    text = text.strip()
    if text.lower() in ('true', 'false'):
        return text.lower() == 'true'
    try:
        value = ast.literal_eval(text)
        return list(value) if isinstance(value, tuple) and text[0] != '(' else value
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        pass
    if text[:1] not in ('[', '{', '('):
        return [parse_value(part) for part in text.split(',')] if ',' in text else text
    import yaml  # which models in a file do not need

    try:
        value = yaml.safe_load(text.replace('(', '[').replace(')', ']'))
        return tuple(value) if text[0] == '(' else value
    except (yaml.YAMLError, RecursionError):
        raise ValueError(f'{text!r} is neither a value of Python nor of YAML') from None

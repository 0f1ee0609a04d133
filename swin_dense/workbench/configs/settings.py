"""Config entries from the command line, in the form KEY=VALUE."""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from swin_dense.utils import checks

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


def merge_settings(config: Config, settings: Sequence[str], known: Collection[str] | None = None) -> None:
    """Merge settings such as 'model.backbone.with_cp=True' into a config; a dict replaces the entry.

    If ``known`` is given, each must start with one of these entries.
    """
    for key, value in parse_settings(settings).items():
        if known is not None:
            checks.one_of(f'the first part of {key}', key.partition('.')[0], sorted(known))
        _check_kind(config, key, value)
        # mmengine merges a dict unless it is told to replace the entry, and refuses if the entry is None.
        whole = {**value, '_delete_': True} if isinstance(value, dict) else value
        try:
            config.merge_from_dict({key: whole})
        except Exception as error:  # mmengine raises various exceptions if a key leads into a scalar
            raise ValueError(f'{key}={value!r} cannot be set in this config: {error}') from error


def _check_kind(config: Config, key: str, value: Any) -> None:
    """Raise ValueError for a value that cannot be in the place of a part of a config, which is a dict, or of a name."""
    parts = key.split('.')
    there: Any = config
    for part in parts:
        if isinstance(there, (list, tuple)) and part.isdigit() and int(part) < len(there):
            there = there[int(part)]
        else:
            there = there.get(part) if isinstance(there, Mapping) or there is config else None
    is_list = isinstance(there, (list, tuple)) and bool(there)
    is_part = isinstance(there, Mapping) or (is_list and _are_parts(there))
    fits = _are_parts(value) and (is_list or bool(value) or isinstance(value, Mapping))
    is_removed = value is None and key != 'model'
    if is_part and not fits and not is_removed:
        kind = 'list of dicts' if is_list else 'dict'
        raise ValueError(
            f'{key}={value!r} cannot replace a {kind}; set one of its entries, such as '
            f'{key}.{_first_key(there)}=VALUE, or give a {kind} as in Python'
        )
    is_name = isinstance(value, str) or (value is None and key != 'default_scope')
    if parts[-1] in ('type', 'default_scope') and not is_name:
        raise ValueError(f'{key} must be a name, got {value!r}')


def _are_parts(value: Any) -> bool:
    parts = value if isinstance(value, (list, tuple)) else [value]
    return all(isinstance(part, Mapping) for part in parts)


def _first_key(part: Any) -> str:
    return str(next(iter(part), 'KEY')) if isinstance(part, Mapping) else f'0.{_first_key(part[0])}'


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

"""Entries of a config: set from the command line, in the form KEY=VALUE, and written to a file of its own."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from swin_dense.utils import checks, private_mm

if TYPE_CHECKING:
    from mmengine.config import Config

# Config entries that are read besides the arguments of mmengine's Runner: by the Runner and the FlexibleRunner
# themselves, and by the tools and the inference of mmdet and mmseg.
_READ_BY_RUNNERS = {
    *('activation_checkpointing', 'compile', 'efficient_conv_bn_eval', 'find_unused_parameters'),
    *('model_wrapper_cfg', 'strategy', 'sync_bn'),
}
_READ_BY_TOOLS = {'custom_imports', 'default_scope', 'runner_type', 'test_pipeline', 'tta_model', 'tta_pipeline'}


def parse_settings(settings: Sequence[str]) -> dict[str, Any]:
    """Parse strings such as 'model.backbone.with_cp=True' into a dict for ``mmengine.Config.merge_from_dict``."""
    parsed = {}
    for setting in settings:
        key, separator, value = setting.partition('=')
        if not separator or not key:
            raise ValueError(f'a setting must be KEY=VALUE, such as model.backbone.with_cp=True, got {setting!r}')
        parsed[key] = parse_value(value)
    return parsed


def merge_settings(config: Config, settings: Sequence[str], only_read: bool = False) -> None:
    """Merge settings such as 'model.backbone.with_cp=True' into a config; a dict replaces the entry.

    Each must start with an entry that a runner or a tool reads or, unless ``only_read``, with one of the config.
    """
    from mmengine.config import ConfigDict  # which parse_settings does not need

    known = read_entries()
    if not only_read:
        known.update(config.keys())
    for key, value in parse_settings(settings).items():
        *parents, last = key.split('.')
        _check_part(key, _entry(config, [*parents, last]), value)
        _check_name(key, value)
        checks.one_of(f'the first part of {key}', key.partition('.')[0], sorted(known))
        parts = _entry(config, parents)
        if isinstance(parts, list) and last.isdigit() and int(last) < len(parts):
            parts[int(last)] = ConfigDict(value) if isinstance(value, dict) else value
            continue
        # mmengine merges a dict unless it is told to replace the entry, and refuses if the entry is None.
        whole = {**value, '_delete_': True} if isinstance(value, dict) else value
        try:
            config.merge_from_dict({key: whole})
        except Exception as error:  # mmengine raises various exceptions if a key leads into a scalar
            raise ValueError(f'{key}={value!r} cannot be set in this config: {error}') from error
        if isinstance(value, dict):
            _entry(config, [*parents, last]).pop('_delete_', None)  # mmengine keeps it in a new entry


def notes_on_settings(settings: Sequence[str]) -> list[str]:
    """Return a note on each entry in settings that no runner and no tool reads, such as ``max_epochs``.

    In a file, other entries take their values; settings are merged after that. Hooks of a user may read them.
    """
    read = read_entries()
    names = dict.fromkeys(key.partition('.')[0] for key in parse_settings(settings))
    return [
        f'--set {name} changes an entry that no runner or tool reads; entries to which the file assigns its value keep '
        'the old value. Set those instead, such as train_cfg.max_epochs for max_epochs'
        for name in names
        if name not in read
    ]


def _entry(config: Config, names: Sequence[str]) -> Any:
    """Return an entry of a config, by the keys and the numbers in lists that lead to it, or None if there is none."""
    there: Any = dict(config.items())
    for name in names:
        if isinstance(there, Mapping):
            there = there.get(name)
        elif isinstance(there, (list, tuple)) and name.isdigit() and int(name) < len(there):
            there = there[int(name)]
        else:
            return None
    return there


def _check_part(key: str, there: Any, value: Any) -> None:
    """Raise ValueError if a value would replace a dict, or a list of dicts, by another kind of value."""
    is_removed = value is None and key != 'model'
    if not _is_part(there) or _is_part(value) or is_removed:
        return
    kind = 'dict' if isinstance(there, Mapping) else 'list of dicts'
    if kind == 'list of dicts' and value in ([], ()):
        return
    raise ValueError(
        f'{key}={value!r} cannot replace a {kind}; set one of its entries, such as {key}.{_first_key(there)}=VALUE, or '
        f'give a {kind} as in Python'
    )


def _check_name(key: str, value: Any) -> None:
    """Raise ValueError if a value cannot be a type, which None removes, or the default scope."""
    is_name = isinstance(value, str) or (value is None and key != 'default_scope')
    if key.split('.')[-1] in ('type', 'default_scope') and not is_name:
        raise ValueError(f'{key} must be a name, got {value!r}')


def _is_part(value: Any) -> bool:
    """Return whether a value is a dict, or a list of dicts that is not empty."""
    parts = value if isinstance(value, (list, tuple)) else [value]
    return bool(parts) and all(isinstance(part, Mapping) for part in parts)


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


def as_text(config: Config, title: str) -> str:
    """Return the config as the text of a self-contained file.

    Entries that no runner or tool reads are left out. For example, ``data_root`` at the top level, which the data
    loaders repeat, would mislead a user who edits the file.

    Raises:
        ValueError: the config imports a value that is no type, which a file of names cannot contain.
    """
    from mmengine.config import Config

    from swin_dense.workbench.recipes.lazy import imported_values

    read = read_entries()
    content = private_mm.lazy_dict(config)
    kept = Config({key: value for key, value in content.items() if key in read})
    for place, imported in imported_values(kept):
        raise ValueError(
            f'{place} is {imported}, which the config imports; the file would contain only its name. Classes and '
            'functions can only be written as types: train your own config as it is'
        )
    test_data = (config.get('test_dataloader') or {}).get('dataset') or {}
    pipeline = test_data.get('pipeline')
    # mmseg's inference reads this copy, while --set may have changed the pipeline of the data.
    if 'test_pipeline' in kept and pipeline is not None:
        kept.test_pipeline = pipeline
    lines = [f'# {line}' for line in title.splitlines()]
    return '\n'.join([*lines, '', kept.pretty_text])


def read_entries() -> set[str]:
    """Return the entries of a config that a runner or a tool reads."""
    from mmengine.runner import Runner

    arguments = set(inspect.signature(Runner.__init__).parameters) - {'self', 'cfg'}
    return _READ_BY_RUNNERS | _READ_BY_TOOLS | arguments

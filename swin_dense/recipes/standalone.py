"""A recipe written whole: one file that mmdet's or mmseg's own tools train."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from swin_dense.recipes.parts import SPLITS, datasets, dicts
from swin_dense.utils import checks

if TYPE_CHECKING:
    from mmengine.config import Config

# Beside what mmengine's Runner takes as arguments, what it and its FlexibleRunner read from a config, and what mmdet's
# and mmseg's tools and inference do.
_READ_BY_RUNNERS = {
    *('activation_checkpointing', 'compile', 'efficient_conv_bn_eval', 'find_unused_parameters'),
    *('model_wrapper_cfg', 'strategy', 'sync_bn'),
}
_READ_BY_TOOLS = {'custom_imports', 'default_scope', 'runner_type', 'test_pipeline', 'tta_model', 'tta_pipeline'}


def check_form(config: Config) -> None:
    """Refuse a config that is not that of a detector of mmdet or a segmentor of mmseg, with names for types.

    Raises:
        ValueError: it is a lazy one, or its scope, model or data are not of the form that these have.
    """
    if any(not isinstance(part.get('type', ''), str) for part in dicts(list(config.values()))):
        raise ValueError(
            'this is a lazy config, which imports the classes that it names; give one whose types are names in quotes'
        )
    if config.get('default_scope') not in ('mmdet', 'mmseg'):
        raise ValueError(
            f'this config has the default_scope {config.get("default_scope")!r}; it must be one of mmdet or of mmseg'
        )
    for key in ('model', *(f'{split}_dataloader' for split in SPLITS)):
        part = config.get(key)
        if not isinstance(part, dict) and (part is not None or key == 'model'):
            raise ValueError(f'{key} must be a dict, got {part!r}')
    for dataset in datasets(config):
        for key, kind in (('data_root', str), ('ann_file', str), ('data_prefix', dict)):
            if not isinstance(dataset.get(key) or kind(), kind):
                raise ValueError(f'{key} of a data set must be a {kind.__name__}, got {dataset[key]!r}')


def checked_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings, of which each must begin with an entry that something reads.

    Raises:
        ValueError: one does not, and would have no effect.
    """
    for key in settings:
        checks.one_of(f'the first part of {key}', key.partition('.')[0], sorted(_read_entries()))
    return settings


def as_text(config: Config, title: str) -> str:
    """Return the config as a file that stands alone, with what only served to put it together left out.

    Entries that nothing reads, such as ``data_root`` beside the data loaders that repeat it, would mislead a reader who
    edits the file.
    """
    from mmengine.config import Config

    read = _read_entries()
    kept = Config({key: value for key, value in config.items() if key in read})
    lines = [f'# {line}' for line in title.splitlines()]
    return '\n'.join([*lines, '', kept.pretty_text])


def _read_entries() -> set[str]:
    from mmengine.runner import Runner

    return _READ_BY_RUNNERS | _READ_BY_TOOLS | (set(inspect.signature(Runner.__init__).parameters) - {'self', 'cfg'})

"""Write a recipe as a single config file that the tools of mmdet or mmseg can train."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mmengine.config import Config

# Config entries that are read besides the arguments of mmengine's Runner: by the Runner and the FlexibleRunner
# themselves, and by the tools and the inference of mmdet and mmseg.
_READ_BY_RUNNERS = {
    *('activation_checkpointing', 'compile', 'efficient_conv_bn_eval', 'find_unused_parameters'),
    *('model_wrapper_cfg', 'strategy', 'sync_bn'),
}
_READ_BY_TOOLS = {'custom_imports', 'default_scope', 'runner_type', 'test_pipeline', 'tta_model', 'tta_pipeline'}


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
    content = config._to_lazy_dict()
    kept = Config({key: value for key, value in content.items() if key in read})
    for place, imported in imported_values(kept):
        raise ValueError(
            f'{place} is {imported}, which the config imports; the file would contain only its name. Classes and '
            'functions can be written as types alone: train your own config as it is'
        )
    pipeline = ((config.get('test_dataloader') or {}).get('dataset') or {}).get('pipeline')
    # mmseg's inference reads this copy, while --set may have changed the pipeline of the data.
    if 'test_pipeline' in kept and pipeline is not None:
        kept.test_pipeline = pipeline
    lines = [f'# {line}' for line in title.splitlines()]
    return '\n'.join([*lines, '', kept.pretty_text])


def read_entries() -> set[str]:
    """Return the entries of a config that a runner or a tool reads."""
    from mmengine.runner import Runner

    return _READ_BY_RUNNERS | _READ_BY_TOOLS | (set(inspect.signature(Runner.__init__).parameters) - {'self', 'cfg'})

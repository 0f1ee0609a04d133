"""A Swin backbone for dense prediction: exact, drop-in for mmdet and mmsegmentation, usable from plain PyTorch."""

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = '0.3.0'
__all__ = [
    'CheckpointError',
    'SimMIM',
    'SwinBackbone',
    'SwinClassifier',
    'SwinV2Backbone',
    'allow_partial_loading',
    'create_backbone',
    'export_detector',
    'export_model',
    'export_segmentor',
    'export_state_dict',
    'extract_pyramid',
    'load_checkpoint',
]


def __getattr__(name: str) -> Any:
    """Import a public name lazily.

    Raises:
        AttributeError: there is no such name.
        ImportError: a dependency is missing or broken; the message contains the reason and a fix.
    """
    if name not in (*__all__, 'SwinDense', 'SwinDenseV2'):
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    public: Any = import_module('swin_dense._public')
    if hasattr(public, name):
        return getattr(public, name)
    if public.why_no_core is not None:
        raise ImportError(f'{public.why_no_core}; run `swin-dense doctor` for details')
    core = 'SwinV2Backbone' if name.endswith('V2') else 'SwinBackbone'
    if public.why_no_mm is None:
        raise ImportError(f'{name} needs mmengine: pip install mmengine; {core} is the same model without mmengine')
    raise ImportError(
        f'{name} needs mmengine, which is installed but cannot be imported ({type(public.why_no_mm).__name__}: '
        f'{public.why_no_mm}); run `swin-dense doctor` for a fix, for example pip install "setuptools<81" if '
        f'pkg_resources is missing. {core} is the same model without mmengine'
    ) from public.why_no_mm


def _is_command_line() -> bool:
    """Return whether this process is the `swin-dense` command, whose help and `zoo` do not import torch."""
    as_module = ('-m', __name__) in zip(sys.orig_argv, sys.orig_argv[1:], strict=False)
    return as_module or Path(sys.argv[0] if sys.argv else '').stem == 'swin-dense'


if TYPE_CHECKING:
    from swin_dense._public import *  # noqa: F403
elif not _is_command_line() and hasattr(import_module('swin_dense._public'), 'SwinDense'):
    __all__ += ['SwinDense', 'SwinDenseV2']

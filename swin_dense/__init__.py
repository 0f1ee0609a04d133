"""A Swin backbone for dense prediction: exact, drop-in for mmdet and mmsegmentation, usable from plain PyTorch."""

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = '0.2.0'
__all__ = [
    'CheckpointError',
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
    """Return what a public name stands for, or say why it cannot be imported."""
    if name not in (*__all__, 'SwinDense', 'SwinDenseV2'):
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    public: Any = import_module('swin_dense._public')
    if hasattr(public, name):
        return getattr(public, name)
    if public.why_no_core is not None:
        raise ImportError(f'{public.why_no_core}; `swin-dense doctor` says more')
    core = 'SwinV2Backbone' if name.endswith('V2') else 'SwinBackbone'
    if public.why_no_mm is None:
        raise ImportError(f'{name} needs mmengine: pip install mmengine; {core} is the same without it')
    raise ImportError(
        f'{name} needs mmengine, which is installed but cannot be imported ({type(public.why_no_mm).__name__}: '
        f'{public.why_no_mm}); repair it, for example with pip install "setuptools<81" where pkg_resources is missing; '
        f'`swin-dense doctor` says what helps. {core} is the same without it'
    ) from public.why_no_mm


def _is_command_line() -> bool:
    """Return whether this process is `swin-dense`, whose help and `zoo` do without torch."""
    as_module = ('-m', __name__) in zip(sys.orig_argv, sys.orig_argv[1:], strict=False)
    return as_module or Path(sys.argv[0] if sys.argv else '').stem == 'swin-dense'


if TYPE_CHECKING:
    from swin_dense._public import *  # noqa: F403
elif not _is_command_line() and hasattr(import_module('swin_dense._public'), 'SwinDense'):
    __all__ += ['SwinDense', 'SwinDenseV2']

"""A Swin backbone for dense prediction: exact, drop-in for mmdet and mmsegmentation, usable from plain PyTorch."""

from importlib import import_module
from importlib.util import find_spec
from typing import NoReturn

__version__ = '0.1.0'
__all__ = [
    'CheckpointError',
    'SwinBackbone',
    'SwinClassifier',
    'SwinV2Backbone',
    'allow_partial_loading',
    'create_backbone',
    'export_model',
    'export_state_dict',
    'extract_pyramid',
    'load_checkpoint',
]

_why_no_core: str | None = None
_why_no_mm: Exception | None = None
for _name in ('numpy', 'PIL.Image', 'torch'):
    try:
        import_module(_name)
    except Exception as error:  # broken in whatever way: `swin-dense doctor` has to get far enough to name the cure
        _package = _name.partition('.')[0]
        _why_no_core = f'swin_dense needs {_package}, which cannot be imported ({type(error).__name__}: {error})'
        break
else:
    from swin_dense.checkpoint import CheckpointError, allow_partial_loading, export_state_dict, load_checkpoint
    from swin_dense.classification.classifier import SwinClassifier
    from swin_dense.create import create_backbone
    from swin_dense.export import export_model
    from swin_dense.features.pyramid import extract_pyramid
    from swin_dense.model import SwinBackbone
    from swin_dense.v2 import SwinV2Backbone

    if find_spec('mmengine') is not None:
        try:
            from swin_dense.mm import SwinDense, SwinDenseV2  # registers them in mmengine's root registry

            __all__ += ['SwinDense', 'SwinDenseV2']
        except Exception as error:  # an installed mmengine may fail in any way; the core does not need it
            _why_no_mm = error


def __getattr__(name: str) -> NoReturn:
    if name not in (*__all__, 'SwinDense', 'SwinDenseV2'):
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    if _why_no_core is not None:
        raise ImportError(f'{_why_no_core}; `swin-dense doctor` says more')
    core = 'SwinV2Backbone' if name.endswith('V2') else 'SwinBackbone'
    if _why_no_mm is None:
        raise ImportError(f'{name} needs mmengine: pip install mmengine; {core} is the same without it')
    raise ImportError(
        f'{name} needs mmengine, which is installed but cannot be imported ({type(_why_no_mm).__name__}: '
        f'{_why_no_mm}); repair it, for example with pip install "setuptools<81" where pkg_resources is missing; '
        f'`swin-dense doctor` says what helps. {core} is the same without it'
    ) from _why_no_mm

"""A Swin backbone for dense prediction: exact, drop-in for mmdet and mmsegmentation, usable from plain PyTorch."""

from importlib.util import find_spec

from swin_dense.checkpoint import CheckpointError, allow_partial_loading, export_state_dict, load_checkpoint
from swin_dense.features.pyramid import extract_pyramid
from swin_dense.model import SwinBackbone, create_backbone

__version__ = '0.1.0'
__all__ = [
    'CheckpointError',
    'SwinBackbone',
    'allow_partial_loading',
    'create_backbone',
    'export_state_dict',
    'extract_pyramid',
    'load_checkpoint',
]

if find_spec('mmengine') is not None:
    from swin_dense.mm import SwinDense  # registers it in mmengine's root registry

    __all__ += ['SwinDense']
else:

    def __getattr__(name: str) -> None:
        if name == 'SwinDense':
            raise ImportError('SwinDense needs mmengine: pip install mmengine; SwinBackbone is the same without it')
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')

"""A Swin backbone for dense prediction: exact, drop-in for mmdet and mmsegmentation, usable from plain PyTorch.

Networks: SwinBackbone, SwinV2Backbone, SwinClassifier; create_backbone builds one by its name or checkpoint.
In mmengine's registry: SwinDense, SwinDenseV2.
Weights: load_checkpoint, allow_partial_loading, export_state_dict, CheckpointError.
Images: extract_pyramid.
GPUs: use_graphs.
Files for other runtimes: export_model, export_whole.
Packages with further public names: features, integrations, ops, runtime.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from swin_dense import _registration
from swin_dense.utils.lazy import public_name, require_core

if TYPE_CHECKING:
    from swin_dense.checkpoint import (
        CheckpointError,
        allow_partial_loading,
        export_state_dict,
        load_checkpoint,
    )
    from swin_dense.create import create_backbone
    from swin_dense.export import export_model
    from swin_dense.features import extract_pyramid
    from swin_dense.mm import SwinDense as SwinDense
    from swin_dense.mm import SwinDenseV2 as SwinDenseV2
    from swin_dense.models.classifier import SwinClassifier
    from swin_dense.models.graphs import use_graphs
    from swin_dense.models.swin import SwinBackbone
    from swin_dense.models.swin_v2 import SwinV2Backbone
    from swin_dense.workbench.export import export_whole

__version__ = '0.6.0'
__all__ = [
    'CheckpointError',
    'SwinBackbone',
    'SwinClassifier',
    'SwinV2Backbone',
    'allow_partial_loading',
    'create_backbone',
    'export_model',
    'export_state_dict',
    'export_whole',
    'extract_pyramid',
    'load_checkpoint',
    'use_graphs',
]

# The module of each public name. It is imported when the name is asked for, so that `swin-dense --help` and
# `swin_dense.runtime` need no torch, and a backbone needs no exporter.
_HOMES = {
    'CheckpointError': 'swin_dense.checkpoint',
    'SwinBackbone': 'swin_dense.models.swin',
    'SwinClassifier': 'swin_dense.models.classifier',
    'SwinDense': 'swin_dense.mm',
    'SwinDenseV2': 'swin_dense.mm',
    'SwinV2Backbone': 'swin_dense.models.swin_v2',
    'allow_partial_loading': 'swin_dense.checkpoint',
    'create_backbone': 'swin_dense.create',
    'export_model': 'swin_dense.export',
    'export_state_dict': 'swin_dense.checkpoint',
    'export_whole': 'swin_dense.workbench.export',
    'extract_pyramid': 'swin_dense.features',
    'load_checkpoint': 'swin_dense.checkpoint',
    'use_graphs': 'swin_dense.models.graphs',
}
# The packages with further public names.
_PACKAGES = ('features', 'integrations', 'ops', 'runtime')


def __getattr__(name: str) -> Any:
    """Import a public name, or a package of this one such as ``swin_dense.features``.

    Raises:
        AttributeError: there is no such name.
        ImportError: a dependency is missing or broken; the message contains the reason and a fix.
    """
    if name in _HOMES:
        require_core()
        if _HOMES[name] == 'swin_dense.mm':
            _registration.check_mmengine(name)
    return public_name(__name__, name, _HOMES)


def __dir__() -> list[str]:
    with_mmengine = ['SwinDense', 'SwinDenseV2'] if find_spec('mmengine') else []
    return sorted([*__all__, *_PACKAGES, *with_mmengine, '__version__'])


_registration.register_with_mmengine()

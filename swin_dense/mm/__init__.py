"""SwinDense and SwinDenseV2, the backbones as mmengine modules, and their support in training.

Only this package and the workbench import mmengine at import time.
"""

from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from mmengine.registry import FUNCTIONS, HOOKS, MODELS, OPTIM_WRAPPER_CONSTRUCTORS, STRATEGIES, TRANSFORMS, Registry

from swin_dense.mm.backbone import SwinDense, SwinDenseV2
from swin_dense.utils.lazy import public_name, public_names

if TYPE_CHECKING:
    from swin_dense.mm.bands import LoadBands
    from swin_dense.mm.graphs import UseGraphs
    from swin_dense.mm.layer_decay import SwinLayerDecayConstructor
    from swin_dense.mm.mask_values import IgnoreMaskValues, MapMaskValues
    from swin_dense.mm.resume import ResumeOptimizer
    from swin_dense.mm.sharding import ResumableFSDPStrategy, swin_auto_wrap_policy

__all__ = [
    'IgnoreMaskValues',
    'LoadBands',
    'MapMaskValues',
    'ResumableFSDPStrategy',
    'ResumeOptimizer',
    'SwinDense',
    'SwinDenseV2',
    'SwinLayerDecayConstructor',
    'UseGraphs',
    'swin_auto_wrap_policy',
]

# The modules of the names that a config may add to the backbone. They are imported when the names are used, so that
# SwinDense is registered even if one of them cannot be imported.
_HOMES = {
    'IgnoreMaskValues': 'swin_dense.mm.mask_values',
    'LoadBands': 'swin_dense.mm.bands',
    'MapMaskValues': 'swin_dense.mm.mask_values',
    'ResumableFSDPStrategy': 'swin_dense.mm.sharding',
    'ResumeOptimizer': 'swin_dense.mm.resume',
    'SwinLayerDecayConstructor': 'swin_dense.mm.layer_decay',
    'UseGraphs': 'swin_dense.mm.graphs',
    'swin_auto_wrap_policy': 'swin_dense.mm.sharding',
}
__getattr__, _ = public_names(__name__, _HOMES)


def _register(registry: Registry, name: str) -> None:
    """Register a function that imports a class by its name, and returns an instance of it."""

    def build(*arguments: Any, **options: Any) -> Any:
        found: Callable[..., Any] = public_name(__name__, name, _HOMES)
        return found(*arguments, **options)

    build.__name__ = build.__qualname__ = name
    registry.register_module(name=name, module=build)


for _name in ('IgnoreMaskValues', 'LoadBands', 'MapMaskValues'):
    _register(TRANSFORMS, _name)
for _name in ('ResumeOptimizer', 'UseGraphs'):
    _register(HOOKS, _name)
_register(OPTIM_WRAPPER_CONSTRUCTORS, 'SwinLayerDecayConstructor')
_register(STRATEGIES, 'ResumableFSDPStrategy')
_register(FUNCTIONS, 'swin_auto_wrap_policy')

# Configs of detectors name the scope of classifiers too. Without their package, an empty registry passes on the names.
for _scope in ('mmpretrain', 'mmcls'):
    if find_spec(_scope) is None and _scope not in MODELS.children:
        Registry('model', parent=MODELS, scope=_scope, locations=['swin_dense'])

# Lets mmengine.hub.get_config('swin_dense::mask_rcnn/...') find the recipes of the wheel after `import swin_dense`.
with suppress(ImportError):
    from mmengine.config.utils import MODULE2PACKAGE

    MODULE2PACKAGE.setdefault('swin_dense', 'swin-dense')

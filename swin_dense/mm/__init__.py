"""SwinDense and SwinDenseV2, the backbones as mmengine modules, and what they need in training.

Only this package and the workbench import mmengine at import time.
"""

from importlib.util import find_spec

from mmengine.config.utils import MODULE2PACKAGE
from mmengine.registry import MODELS, Registry

from swin_dense.mm.backbone import SwinDense, SwinDenseV2
from swin_dense.mm.bands import LoadBands
from swin_dense.mm.graphs import UseGraphs
from swin_dense.mm.layer_decay import SwinLayerDecayConstructor
from swin_dense.mm.masks import IgnoreMaskValues, MapMaskValues
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

# Configs of detectors name the scope of classifiers too. Without their package, an empty registry passes on the names.
for _scope in ('mmpretrain', 'mmcls'):
    if find_spec(_scope) is None and _scope not in MODELS.children:
        Registry('model', parent=MODELS, scope=_scope, locations=['swin_dense'])

# Lets mmengine.hub.get_config('swin_dense::mask_rcnn/...') find the recipes of the wheel after `import swin_dense`.
MODULE2PACKAGE.setdefault('swin_dense', 'swin-dense')

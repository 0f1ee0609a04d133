"""SwinDense and SwinDenseV2, the backbones as mmengine modules; the only package that imports mmengine."""

import sys

from mmengine.config.utils import MODULE2PACKAGE

from swin_dense.mm import backbone
from swin_dense.mm.backbone import SwinDense, SwinDenseV2
from swin_dense.mm.checkpoints import WholeCheckpointHook
from swin_dense.mm.layer_decay import SwinLayerDecayConstructor
from swin_dense.mm.masks import IgnoreMaskValues
from swin_dense.mm.sharding import ResumableFSDPStrategy, swin_auto_wrap_policy

__all__ = [
    'IgnoreMaskValues',
    'ResumableFSDPStrategy',
    'SwinDense',
    'SwinDenseV2',
    'SwinLayerDecayConstructor',
    'WholeCheckpointHook',
    'swin_auto_wrap_policy',
]

# Models that were pickled whole by version 0.1 name the module that the class stood in.
sys.modules['swin_dense.backbone'] = backbone

# After `import swin_dense`, mmengine.hub.get_config('swin_dense::mask_rcnn/...') reads the recipes of the wheel.
MODULE2PACKAGE.setdefault('swin_dense', 'swin-dense')

"""SwinDense and SwinDenseV2, the backbones as mmengine modules, tools for training with mmdet and mmseg, and SimMIM.

No other package imports mmengine at import time.
"""

import sys

from mmengine.config.utils import MODULE2PACKAGE

from swin_dense.mm import backbone
from swin_dense.mm.backbone import SwinDense, SwinDenseV2
from swin_dense.mm.bands import LoadBands
from swin_dense.mm.checkpoints import WholeCheckpointHook
from swin_dense.mm.layer_decay import SwinLayerDecayConstructor
from swin_dense.mm.masks import IgnoreMaskValues
from swin_dense.mm.pretraining import HeldOutLoss, ImageNormalizer, PretrainingHook, SimMIMPretrainer
from swin_dense.mm.sharding import ResumableFSDPStrategy, swin_auto_wrap_policy

__all__ = [
    'HeldOutLoss',
    'IgnoreMaskValues',
    'ImageNormalizer',
    'LoadBands',
    'PretrainingHook',
    'ResumableFSDPStrategy',
    'SimMIMPretrainer',
    'SwinDense',
    'SwinDenseV2',
    'SwinLayerDecayConstructor',
    'WholeCheckpointHook',
    'swin_auto_wrap_policy',
]

# Whole models that version 0.1 pickled refer to the class by this module name.
sys.modules['swin_dense.backbone'] = backbone

# Lets mmengine.hub.get_config('swin_dense::mask_rcnn/...') find the recipes of the wheel after `import swin_dense`.
MODULE2PACKAGE.setdefault('swin_dense', 'swin-dense')

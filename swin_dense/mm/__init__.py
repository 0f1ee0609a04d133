"""SwinDense, the backbone as an mmengine module; the only room that imports mmengine."""

import sys

from swin_dense.mm import backbone
from swin_dense.mm.backbone import SwinDense

__all__ = ['SwinDense']

# Models that were pickled whole by version 0.1 name the module that the class stood in.
sys.modules['swin_dense.backbone'] = backbone

"""The module by which whole models that version 0.1 pickled refer to their class."""

from swin_dense.mm.backbone import SwinDense

__all__ = ['SwinDense']

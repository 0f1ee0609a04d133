"""A Swin backbone for dense prediction."""

from swin_dense.model import SwinBackbone, create_backbone

__all__ = ['SwinBackbone', 'create_backbone']

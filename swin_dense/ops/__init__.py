"""Window attention and its implementations."""

from swin_dense.ops.dispatch import BACKENDS, window_attention

__all__ = ['BACKENDS', 'window_attention']

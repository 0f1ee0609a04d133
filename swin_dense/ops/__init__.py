"""Window attention and its implementations."""

from swin_dense.ops.attention import BACKENDS, window_attention

__all__ = ['BACKENDS', 'window_attention']

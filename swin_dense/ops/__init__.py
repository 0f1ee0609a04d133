"""Window attention and its implementations."""

from swin_dense.ops.dispatch import BACKENDS, relative_position_bias, window_attention

__all__ = ['BACKENDS', 'relative_position_bias', 'window_attention']

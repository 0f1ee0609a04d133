"""Window attention, its implementations and their geometry; linear layers and norms for one kind of device each."""

from swin_dense.ops.attention import BACKENDS, window_attention

__all__ = ['BACKENDS', 'window_attention']

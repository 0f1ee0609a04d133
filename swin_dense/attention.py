"""Window attention as a module: it owns the parameters, ``swin_dense.ops`` does the work."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from swin_dense.ops import window_attention
from swin_dense.windows import Pair, relative_position_bias


class WindowAttention(nn.Module):
    """Multi-head self-attention within shifted windows, (B, H, W, C) to (B, H, W, C) for any H and W.

    Args:
        channels: C.
        num_heads: heads, which divide C.
        window_size: (height, width) in tokens.
        shift: (height, width) in tokens by which the windows are displaced.
        qkv_bias: whether queries, keys and values have a bias.
        qk_scale: factor on the query-key product; None is ``(C / num_heads) ** -0.5``, 0 leaves the relative
            position alone to decide.
        relative_position: whether the learnt relative position bias exists.
        attn_drop_rate: dropout of the attention weights.
        proj_drop_rate: dropout of the output.
        backend: one of ``swin_dense.ops.BACKENDS``.
    """

    def __init__(
        self,
        channels: int,
        num_heads: int,
        window_size: Pair,
        shift: Pair,
        qkv_bias: bool = True,
        qk_scale: float | None = None,
        relative_position: bool = True,
        attn_drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        backend: str = 'auto',
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = channels // num_heads
        self.window_size = window_size
        self.shift = shift
        self.qk_scale = qk_scale
        self.backend = backend
        self.qkv = nn.Linear(channels, 3 * channels, bias=qkv_bias)
        # Dropout happens inside of the attention, by this module's rate and training flag; it is not called itself.
        self.attn_drop = nn.Dropout(attn_drop_rate)
        self.proj = nn.Linear(channels, channels)
        self.proj_drop = nn.Dropout(proj_drop_rate)
        self.relative_position_bias_table: nn.Parameter | None = None
        if relative_position:
            offsets = (2 * window_size[0] - 1) * (2 * window_size[1] - 1)
            self.relative_position_bias_table = nn.Parameter(torch.zeros(offsets, num_heads))

    @property
    def scale(self) -> float:
        """The factor on the query-key product."""
        return self.head_dim**-0.5 if self.qk_scale is None else self.qk_scale

    def forward(self, x: Tensor) -> Tensor:
        table = self.relative_position_bias_table
        out = window_attention(
            self.qkv(x),
            relative_bias=None if table is None else relative_position_bias(table, self.window_size),
            pad_kv=None if self.qkv.bias is None else self.qkv.bias[x.shape[-1] :],
            num_heads=self.num_heads,
            window_size=self.window_size,
            shift=self.shift,
            scale=self.scale,
            dropout_p=self.attn_drop.p if self.attn_drop.training else 0.0,
            backend=self.backend,
        )
        return self.proj_drop(self.proj(out))

    def extra_repr(self) -> str:
        return f'num_heads={self.num_heads}, window_size={self.window_size}, shift={self.shift}'

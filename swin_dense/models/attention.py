"""Window attention modules, which hold the parameters; ``swin_dense.ops`` computes the attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from swin_dense.models.layers import Linear
from swin_dense.ops import window_attention
from swin_dense.ops.windows import Size, WindowSpec, central_offsets, relative_position_bias


class WindowAttention(nn.Module):
    """Multi-head self-attention within the windows of a map of any size: (B, H, W, C) to (B, H, W, C).

    Args:
        channels: C.
        num_heads: heads, which divide C.
        window_size: (height, width) in tokens of the relative position bias table.
        qkv_bias: whether queries, keys and values have a bias.
        qk_scale: factor on the query-key product; None is ``(C / num_heads) ** -0.5``. With 0, attention depends on
            the relative position only.
        use_rel_pos_bias: whether to add a learnt relative position bias.
        attn_drop_rate: dropout of the attention weights.
        proj_drop_rate: dropout of the output.
        backend: one of ``swin_dense.ops.BACKENDS``.
    """

    def __init__(
        self,
        channels: int,
        num_heads: int,
        window_size: Size,
        qkv_bias: bool = True,
        qk_scale: float | None = None,
        use_rel_pos_bias: bool = True,
        attn_drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        backend: str = 'auto',
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.window_size = window_size
        self.scale = (channels // num_heads) ** -0.5 if qk_scale is None else qk_scale
        self.backend = backend
        self.relative_position_bias_table: nn.Parameter | None = None
        if use_rel_pos_bias:
            height, width = window_size
            table = torch.zeros((2 * height - 1) * (2 * width - 1), num_heads)
            self.relative_position_bias_table = nn.Parameter(table)
        self.qkv = Linear(channels, 3 * channels, bias=qkv_bias)
        self.attn_drop = nn.Dropout(attn_drop_rate)
        self.proj = Linear(channels, channels)
        self.proj_drop = nn.Dropout(proj_drop_rate)

    def forward(self, x: Tensor, window: Size, shift: Size) -> Tensor:
        """Attend within windows of the given size and shift, both (height, width) in tokens."""
        spec = WindowSpec(self.num_heads, window, shift, self.scale)
        table = self.position_table(window)
        x = window_attention(x, self.project, table, spec, self.attn_drop, self.backend)
        return self.proj_drop(self.proj(x))

    def project(self, x: Tensor) -> Tensor:
        """Return queries, keys and values, (..., 3C), of tokens, (..., C)."""
        return self.qkv(x)

    def position_table(self, window: Size) -> Tensor | None:
        """Return the position bias of every offset in a window of this size, (P, A), or None."""
        table = self.relative_position_bias_table
        if table is None or window == self.window_size:
            return table
        return central_offsets(table, self.window_size, window)

    def relative_bias(self, window: Size) -> Tensor | None:
        """Return the position bias that is added to the scores of a window of this size, (A, T, T), or None."""
        table = self.position_table(window)
        return None if table is None else relative_position_bias(table, window)

    def reset_position(self) -> None:
        """Initialise the parameters that do not belong to linear layers."""
        if self.relative_position_bias_table is not None:
            nn.init.trunc_normal_(self.relative_position_bias_table, std=0.02)

    def extra_repr(self) -> str:
        return f'num_heads={self.num_heads}, window_size={self.window_size}'


class ShiftedWindowAttention(nn.Module):
    """Window attention that chooses window and shift for each map: (B, H, W, C) to the same, any H and W.

    Args:
        w_msa: the attention within windows.
        shift: (height, width) in tokens by which the windows are shifted.
        clamp_window: whether to shrink the window, and to drop the shift, on maps that are not larger than the window,
            as classifiers do.
    """

    def __init__(self, w_msa: WindowAttention, shift: Size, clamp_window: bool = False) -> None:
        super().__init__()
        self.w_msa = w_msa
        self.shift = shift
        self.clamp_window = clamp_window

    def forward(self, x: Tensor) -> Tensor:
        window, shift = self.windows_on(*x.shape[1:3])
        return self.w_msa(x, window, shift)

    def windows_on(self, height: int, width: int) -> tuple[Size, Size]:
        """Return window and shift, both (height, width) in tokens, on a map of height x width tokens."""
        window = self.w_msa.window_size
        return _clamped(window, self.shift, height, width) if self.clamp_window else (window, self.shift)

    def extra_repr(self) -> str:
        clamp = ', clamp_window=True' if self.clamp_window else ''
        return f'shift={self.shift}{clamp}'


def _clamped(window: Size, shift: Size, height: int, width: int) -> tuple[Size, Size]:
    """Return window and shift on a map as classifiers choose them.

    If the map is not larger than the window on both sides, the window is at most its shorter side, and the shift is 0.
    """
    if height > window[0] and width > window[1]:
        return window, shift
    side = min(height, width)
    return (min(window[0], side), min(window[1], side)), (0, 0)

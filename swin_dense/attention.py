"""Window attention as a module: it owns the parameters, ``swin_dense.ops`` does the work."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from swin_dense.ops import relative_position_bias, window_attention
from swin_dense.windows import Pair, central_offsets


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
        clamp_window: whether a window that does not fit inside a map shrinks to it, and the shift with it to none; see
            :meth:`windows_on`.
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
        clamp_window: bool = False,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = channels // num_heads
        self.window_size = window_size
        self.shift = shift
        self.qk_scale = qk_scale
        self.backend = backend
        self.clamp_window = clamp_window
        self.qkv = nn.Linear(channels, 3 * channels, bias=qkv_bias)
        # Dropout happens inside of the attention, by this module's rate and training flag; it is not called itself.
        self.attn_drop = nn.Dropout(attn_drop_rate)
        self.proj = nn.Linear(channels, channels)
        self.proj_drop = nn.Dropout(proj_drop_rate)
        self.relative_position_bias_table: nn.Parameter | None = None
        if relative_position:
            offsets = (2 * window_size[0] - 1) * (2 * window_size[1] - 1)
            self.relative_position_bias_table = nn.Parameter(torch.zeros(offsets, num_heads))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the state of a pickled module, also of one made by version 0.1.0, which had a rate for ``attn_drop``."""
        state = {'clamp_window': False, **state}
        rate = state.pop('attn_drop_rate', None)
        super().__setstate__(state)
        if rate is not None:
            self.attn_drop = nn.Dropout(rate).train(self.training)

    @property
    def scale(self) -> float:
        """The factor on the query-key product."""
        return self.head_dim**-0.5 if self.qk_scale is None else self.qk_scale

    def windows_on(self, height: int, width: int) -> tuple[Pair, Pair]:
        """Return window and shift, both (height, width) in tokens, on a map of height x width tokens.

        They are those of the module, except that classifiers clamp: where the map is not larger than the window on
        both sides, the window is at most the map's shorter side, and nothing is shifted.
        """
        if not self.clamp_window or (height > self.window_size[0] and width > self.window_size[1]):
            return self.window_size, self.shift
        side = min(height, width)
        return (min(self.window_size[0], side), min(self.window_size[1], side)), (0, 0)

    def project(self, x: Tensor) -> Tensor:
        """Return queries, keys and values, (B, H, W, 3C), of x, (B, H, W, C)."""
        return self.qkv(x)

    def qkv_bias(self) -> Tensor | None:
        """Return the bias of queries, keys and values, (3C,), or None."""
        return self.qkv.bias

    def pad_kv(self) -> Tensor | None:
        """Return key and value of a padding token, (2C,), or None for zeros."""
        bias = self.qkv_bias()
        return None if bias is None else bias[self.qkv.in_features :]

    def cosine_scales(self) -> Tensor | None:
        """Return the factors on the heads' scores, (A,), where these are cosines; None where they are products."""
        return None

    def relative_bias(self, window: Pair) -> Tensor | None:
        """Return what is added to the scores of a window of that size, (A, T, T), or None."""
        table = self.relative_position_bias_table
        if table is None:
            return None
        return relative_position_bias(central_offsets(table, self.window_size, window), window, self.backend)

    def reset_position(self) -> None:
        """Draw anew what the attention has besides linear layers."""
        if self.relative_position_bias_table is not None:
            nn.init.trunc_normal_(self.relative_position_bias_table, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        window, shift = self.windows_on(x.shape[1], x.shape[2])
        out = window_attention(
            self.project(x),
            relative_bias=self.relative_bias(window),
            pad_kv=self.pad_kv(),
            num_heads=self.num_heads,
            window_size=window,
            shift=shift,
            scale=self.scale,
            dropout_p=self.attn_drop.p if self.attn_drop.training else 0.0,
            backend=self.backend,
        )
        return self.proj_drop(self.proj(out))

    def extra_repr(self) -> str:
        return f'num_heads={self.num_heads}, window_size={self.window_size}, shift={self.shift}'

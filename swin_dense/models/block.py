"""A stage and its blocks, with optional activation checkpointing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from swin_dense.models.attention import ShiftedWindowAttention
from swin_dense.models.layers import FFN, DropPath, PatchMerging, build_norm
from swin_dense.ops import context


class SwinStage(nn.Module):
    """The blocks at one resolution, and the patch merging to the next: (B, H, W, C) to the maps before and after it."""

    def __init__(self, blocks: Sequence[SwinBlock], downsample: PatchMerging | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.downsample = downsample

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            x = block(x)
        return x, x if self.downsample is None else self.downsample(x)


class SwinBlock(nn.Module):
    """Window attention and an MLP, each on a residual branch that starts with a LayerNorm: (B, H, W, C) to the same.

    Attributes:
        with_cp: True recomputes the block in the backward pass to save memory, 'mlp' only the MLP.
    """

    _norms_feed_linear = True  # qkv, and the first layer of the MLP

    def __init__(
        self,
        attn: ShiftedWindowAttention,
        ffn: FFN,
        norm_cfg: Any,
        channels: int,
        drop_path_rate: float,
        with_cp: bool | str,
    ) -> None:
        super().__init__()
        self.norm1 = build_norm(norm_cfg, channels, feeds_linear=self._norms_feed_linear)
        self.attn = attn
        self.norm2 = build_norm(norm_cfg, channels, feeds_linear=self._norms_feed_linear)
        self.ffn = ffn
        self.drop_path = DropPath(drop_path_rate)
        self.with_cp = with_cp

    def forward(self, x: Tensor) -> Tensor:
        return checkpointed(self.forward_modules, x) if self.with_cp is True else self.forward_modules(x)

    def forward_modules(self, x: Tensor) -> Tensor:
        x = x + self.drop_path(self.attn(self.norm1(x)))
        return x + self.drop_path(self.forward_ffn(self.norm2(x)))

    def forward_ffn(self, x: Tensor) -> Tensor:
        return checkpointed(self.ffn, x) if self.with_cp == 'mlp' else self.ffn(x)


def checkpointed(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return ``function(x)``, of which autograd keeps only x: the backward pass calls the function again."""
    if context.is_transformed() or not torch.is_grad_enabled():  # torch.func does not support checkpoints
        return function(x)
    return checkpoint(function, x, use_reentrant=False)

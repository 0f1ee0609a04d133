"""The Swin block, with optional activation checkpointing, and in chunks of a map on a CPU without gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from swin_dense.models.attention import ShiftedWindowAttention
from swin_dense.models.layers import FFN, DropPath, are_unmodified, build_norm, known
from swin_dense.ops import chunks, context
from swin_dense.ops.windows import Pair


@known
class SwinBlock(nn.Module):
    """Window attention and an MLP, each on a residual branch that starts with a LayerNorm: (B, H, W, C) to the same."""

    post_norm = False

    def __init__(
        self, attn: ShiftedWindowAttention, ffn: FFN, norm_cfg: Any, channels: int, drop_path_rate: float, with_cp: bool
    ) -> None:
        super().__init__()
        # Under autocast, inputs of matrix products have low precision; the residual sum has not.
        self.norm1 = build_norm(norm_cfg, channels, feeds_product=not self.post_norm)
        self.attn = attn
        self.norm2 = build_norm(norm_cfg, channels, feeds_product=not self.post_norm)
        self.ffn = ffn
        self.drop_path = DropPath(drop_path_rate)
        self.with_cp = with_cp

    def forward(self, x: Tensor) -> Tensor:
        if self.with_cp and torch.is_grad_enabled() and not context.is_transformed():
            return checkpoint(self.forward_modules, x, use_reentrant=False)
        if self._may_run_in_chunks(x):
            return chunks.run(self.forward_modules, x, *self.attn.windows_on(x.shape[1], x.shape[2]))
        return self.forward_modules(x)

    def forward_modules(self, x: Tensor, *windows: Pair) -> Tensor:
        """Compute the block; the attention takes the window and the shift of a chunk, and else chooses them itself."""
        x = self.plus(x, lambda x: self.attn(self.norm1(x), *windows))
        return self.plus(x, lambda x: self.ffn(self.norm2(x)))

    def plus(self, x: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
        """Return x plus a branch under stochastic depth; on a CPU, the branch skips the images that drop it."""
        may_drop = self.training and getattr(self.drop_path, 'drop_prob', 0)
        if not (may_drop and self._may_skip_images(x)):
            return x + self.drop_path(branch(x))
        factors = self.drop_path.factors(x)
        kept = factors.flatten().nonzero().flatten()
        if len(kept) in (0, len(x)):  # with no image, parameters would get no gradient, and DDP would wait for it
            return x + factors * branch(x)
        return x.index_add(0, kept, (factors[kept] * branch(x[kept])).to(x.dtype))

    def _may_skip_images(self, x: Tensor) -> bool:
        is_on_cpu = x.device.type == 'cpu' and not context.plain_reason(x)
        return is_on_cpu and self.drop_path.training and self._is_unmodified()

    def _may_run_in_chunks(self, x: Tensor) -> bool:
        """Return whether x, (B, H, W, C), is so large that chunks are faster, and whether they give the same result."""
        if torch.is_grad_enabled() or x.device.type != 'cpu' or context.plain_reason(x) or not chunks.are_faster(x):
            return False
        is_random = any(part.training for part in self.modules())  # dropout draws once per map
        return not is_random and self._is_unmodified()

    def _is_unmodified(self) -> bool:
        """Return whether the block treats every image and every window alone, and nothing observes its parts."""
        return 'forward_modules' not in vars(self) and are_unmodified(*self.modules())

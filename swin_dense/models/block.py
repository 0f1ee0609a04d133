"""The Swin block, with optional activation checkpointing, and chunked execution on a CPU without gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from swin_dense.models.attention import ShiftedWindowAttention, Windows
from swin_dense.models.layers import ACTIVATIONS, FFN, DropPath, build_norm
from swin_dense.ops import chunks, context
from swin_dense.ops.windows import Pair


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
        reason = whole_map_reason(self, x)
        if reason is None:
            windows = self.attn.windows_of(x)

            def run(chunk: Tensor, shift: Pair) -> Tensor:
                return self.forward_modules(chunk, dataclasses.replace(windows, shift=shift))

            out = chunks.run(run, x, windows.window, windows.shift)
            if out is not None:
                return out
        return self.forward_modules(x)

    def forward_modules(self, x: Tensor, *windows: Windows) -> Tensor:
        """Compute the block; ``windows`` is passed for a chunk of a map only, otherwise the attention chooses them."""
        x = self.plus(x, lambda x: self.attn(self.norm1(x), *windows))
        return self.plus(x, lambda x: self.ffn(self.norm2(x)))

    def plus(self, x: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
        """Return x plus a branch under stochastic depth; on a CPU, skip the branch for images that drop it."""
        if not self._may_skip(x):
            return x + self.drop_path(branch(x))
        factors = self.drop_path.factors(x)
        kept = factors.flatten().nonzero().flatten()
        if len(kept) in (0, len(x)):  # with no image, parameters would get no gradient, and DDP would wait for it
            return x + factors * branch(x)
        return x.index_add(0, kept, (factors[kept] * branch(x[kept])).to(x.dtype))

    def _may_skip(self, x: Tensor) -> bool:
        is_on = x.device.type == 'cpu' and isinstance(self.drop_path, DropPath) and self.drop_path.is_on()
        return is_on and context.plain_reason(x) is None and mixing_reason(self) is None

    local_forward = forward_modules


# Modules whose output for a token depends on that token only.
_TOKEN_WISE = (
    *(getattr(nn, name) for name in ACTIVATIONS),
    *(nn.Linear, nn.LayerNorm, nn.Dropout, nn.Identity, nn.Sequential, nn.ModuleDict, nn.ParameterDict),
)


def whole_map_reason(block: SwinBlock, x: Tensor) -> str | None:
    """Return why ``block`` must run on the whole of x, or None if running it on chunks gives the same result.

    Args:
        block: any block.
        x: (B, H, W, C), input of the block.
    """
    if torch.is_grad_enabled():
        return 'gradients are enabled'
    if x.device.type != 'cpu':
        return f'the map is on {x.device.type}'
    reason = context.plain_reason(x)
    if reason is not None:
        return reason
    for name, part in block.named_modules():
        if (isinstance(part, nn.Dropout) and part.training and part.p) or (isinstance(part, DropPath) and part.is_on()):
            return f'{name} draws random numbers once per map'
    return mixing_reason(block)


def mixing_reason(block: SwinBlock) -> str | None:
    """Return why a block must not run on some of its windows or images only, or None if that is safe.

    It is safe if every module treats each window and image independently and has no hooks. A module declares that it
    is safe by setting the class attribute ``local_forward`` to its ``forward``; the declaration does not hold for
    subclasses, or after ``forward`` was replaced.
    """
    if not (_is_declared_local(block, 'forward_modules') and type(block.attn) is ShiftedWindowAttention):
        return f'{type(block).__name__} or its attention may mix the tokens of different windows'
    for name, part in block.named_modules():
        if part is block:
            continue
        if not (_is_declared_local(part, 'forward') or _is_token_wise(part)):
            return f'{name} may mix the tokens of different windows'
        if context.has_hooks(part):
            return f'{name} has hooks'
    return None


def _is_declared_local(part: nn.Module, method: str) -> bool:
    declared = vars(type(part)).get('local_forward')
    return declared is not None and declared is getattr(type(part), method) and method not in vars(part)


def _is_token_wise(part: nn.Module) -> bool:
    is_known = isinstance(part, _TOKEN_WISE) or type(part).__module__.startswith('peft.tuners.lora.')
    return is_known and 'forward' not in vars(part) and part._compiled_call_impl is None

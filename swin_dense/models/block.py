"""One Swin block: its modules, under torch's checkpoint where asked for, in chunks on a CPU without gradient."""

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
    """Window attention and an MLP, each after a LayerNorm and on a residual branch: (B, H, W, C) to the same."""

    post_norm = False

    def __init__(
        self, attn: ShiftedWindowAttention, ffn: FFN, norm_cfg: Any, channels: int, drop_path_rate: float, with_cp: bool
    ) -> None:
        super().__init__()
        # Under autocast, what a product reads is low in precision, and the residual sum is not.
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
        """Compute the block; ``windows`` are given for a chunk of a map alone, and else up to the attention."""
        x = self.plus(x, lambda x: self.attn(self.norm1(x), *windows))
        return self.plus(x, lambda x: self.ffn(self.norm2(x)))

    def plus(self, x: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
        """Return x plus a branch under stochastic depth. On a CPU, images whose branch is dropped do not enter it."""
        if not self._may_leave_out(x):
            return x + self.drop_path(branch(x))
        factors = self.drop_path.factors(x)
        kept = factors.flatten().nonzero().flatten()
        if len(kept) in (0, len(x)):  # without any image, parameters would get no gradient, which DDP waits for
            return x + factors * branch(x)
        return x.index_add(0, kept, (factors[kept] * branch(x[kept])).to(x.dtype))

    def _may_leave_out(self, x: Tensor) -> bool:
        is_on = x.device.type == 'cpu' and isinstance(self.drop_path, DropPath) and self.drop_path.is_on()
        return is_on and context.plain_reason(x) is None and mixing_reason(self) is None

    local_forward = forward_modules


# What these do to a token depends on that token alone.
_TOKEN_WISE = (
    *(getattr(nn, name) for name in ACTIVATIONS),
    *(nn.Linear, nn.LayerNorm, nn.Dropout, nn.Identity, nn.Sequential, nn.ModuleDict, nn.ParameterDict),
)


def whole_map_reason(block: SwinBlock, x: Tensor) -> str | None:
    """Return why x must pass through the block as a whole, or None where chunks of it give the same.

    Args:
        block: any block.
        x: (B, H, W, C), its input.
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
            return f'{name} draws once per map'
    return mixing_reason(block)


def mixing_reason(block: SwinBlock) -> str | None:
    """Return why a block may not be given a part of its windows or images, or None where it treats each alone, unseen.

    A part vouches for itself by a class attribute ``local_forward``, which is its ``forward``: the promise does not
    hold for a subclass, nor after ``forward`` was replaced.
    """
    if not (_vouches(block, 'forward_modules') and type(block.attn) is ShiftedWindowAttention):
        return f'{type(block).__name__} or its attention may mix the tokens of different windows'
    for name, part in block.named_modules():
        if part is block:
            continue
        if not (_vouches(part, 'forward') or _is_token_wise(part)):
            return f'{name} may mix the tokens of different windows'
        if context.has_hooks(part):
            return f'{name} has hooks'
    return None


def _vouches(part: nn.Module, method: str) -> bool:
    promised = vars(type(part)).get('local_forward')
    return promised is not None and promised is getattr(type(part), method) and method not in vars(part)


def _is_token_wise(part: nn.Module) -> bool:
    is_known = isinstance(part, _TOKEN_WISE) or type(part).__module__.startswith('peft.tuners.lora.')
    return is_known and 'forward' not in vars(part) and part._compiled_call_impl is None

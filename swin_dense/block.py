"""One Swin block, and which of the three ways through it is taken: its modules, these under a checkpoint, or fused."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from swin_dense.attention import WindowAttention
from swin_dense.layers import MLP, DropPath, LayerNorm, build_norm
from swin_dense.ops import fused, surroundings

_logger = logging.getLogger(__name__)


class SwinBlock(nn.Module):
    """Window attention and an MLP, each after a LayerNorm and on a residual branch: (B, H, W, C) to the same.

    Where ``reason_not_to_fuse`` finds none, the block is computed whole, faster and with less memory. Otherwise
    ``forward_modules`` says what is computed, under torch's checkpoint where ``with_cp`` is set.
    """

    norms_are_last = False

    def __init__(
        self, attn: WindowAttention, mlp: MLP, norm_cfg: Mapping[str, Any], drop_path_rate: float, with_cp: bool
    ) -> None:
        super().__init__()
        channels = attn.proj.out_features
        # Under autocast, what a product reads is low in precision, and the residual sum is not.
        self.norm1 = build_norm(norm_cfg, channels, feeds_product=not self.norms_are_last)
        self.attn = attn
        self.norm2 = build_norm(norm_cfg, channels, feeds_product=not self.norms_are_last)
        self.mlp = mlp
        self.drop_path = DropPath(drop_path_rate)
        self.with_cp = with_cp

    def forward(self, x: Tensor) -> Tensor:
        reason = reason_not_to_fuse(self, x)
        if not surroundings.is_recorded():  # a log line would break the graph
            _log_once(reason)
        if reason is None:
            return _forward_fused(self, x)
        if self.with_cp and torch.is_grad_enabled() and not surroundings.is_transformed():
            return checkpoint(self.forward_modules, x, use_reentrant=False)
        return self.forward_modules(x)

    def forward_modules(self, x: Tensor) -> Tensor:
        """Compute the block module by module."""
        x = x + self.drop_path(self.attn(self.norm1(x)))
        return x + self.drop_path(self.mlp(self.norm2(x)))


def reason_not_to_fuse(block: SwinBlock, x: Tensor) -> str | None:
    """Say by what somebody could tell the fused block from its modules, or what it does not know; None is nothing.

    Args:
        block: any block.
        x: (B, H, W, C), its input.
    """
    reason = fused.reason_not_to_run(x)
    if reason is not None:
        return reason
    standard = _STANDARD.get(type(block))
    if standard is None:
        return f'{type(block).__name__} has no fused form'
    tensors: dict[str, Tensor] = {}
    for name, part in block.named_modules():
        if type(part) is not standard.parts.get(name) or _is_changed(part) or (name and surroundings.has_hooks(part)):
            return f'{name or "the block"} is replaced, changed or listened to'
        tensors.update({f'{name}.{key}': tensor for key, tensor in part._parameters.items() if tensor is not None})
    attn, mlp = block.attn, block.mlp
    if attn.backend != 'auto':
        return f'attn_backend={attn.backend!r} was asked for'
    if any(drop.training and drop.p for drop in (attn.attn_drop, attn.proj_drop, mlp.drop)):
        return 'dropout is on'
    for name in standard.parameters:
        tensor = tensors.get(name)
        if type(tensor) is not nn.Parameter or tensor.dtype != x.dtype or tensor.device != x.device:
            return f'{name} is missing or no plain parameter of {x.dtype} on {x.device}'
    if len(tensors) > len(standard.parameters):
        return f'there are parameters that it does not know: {sorted(tensors.keys() - set(standard.parameters))}'
    return None if attn.qkv.out_features == 3 * x.shape[3] else 'attention is of another width than the map'


def _forward_fused(block: SwinBlock, x: Tensor) -> Tensor:
    attn, mlp = block.attn, block.mlp
    saves = torch.is_grad_enabled() and not block.with_cp
    window, shift = attn.windows_on(x.shape[1], x.shape[2])
    x = fused.attention_branch(
        x,
        fused.Kept.of(block.drop_path.draw(x), len(x)),
        fused.Norm.of(block.norm1, block.norms_are_last),
        fused.Linear(attn.qkv.weight, cast('Tensor', attn.qkv_bias())),
        fused.Linear.of(attn.proj),
        cast('Tensor', attn.relative_bias(window)),
        attn.cosine_scales(),
        fused.Attention(attn.num_heads, window, shift, attn.scale),
        saves,
    )
    return fused.mlp_branch(
        x,
        fused.Kept.of(block.drop_path.draw(x), len(x)),
        fused.Norm.of(block.norm2, block.norms_are_last),
        fused.Linear.of(mlp.fc1),
        fused.Linear.of(mlp.fc2),
        cast('nn.GELU', mlp.act).approximate,
        saves,
    )


class _Standard(NamedTuple):
    """The parts of a block that the fused one stands for, and the parameters that it needs, by name."""

    parts: Mapping[str, type[nn.Module]]
    parameters: tuple[str, ...]


_STANDARD: dict[type[SwinBlock], _Standard] = {}
_METHODS: dict[type[nn.Module], dict[tuple[type, str], Any]] = {}


def register_standard_block(
    kind: type[SwinBlock], attention: Mapping[str, type[nn.Module]], parameters: Iterable[str]
) -> None:
    """Let blocks of a kind be computed whole.

    Args:
        kind: the type of the block; other types, and those derived from it, are not meant.
        attention: the type of its attention, 'attn', and of the parts that this has beyond those of all Swins.
        parameters: what the attention needs beyond the linear layers of all Swins, named from itself on.
    """
    parts: dict[str, type[nn.Module]] = {
        '': kind,
        'norm1': LayerNorm,
        'attn.qkv': nn.Linear,
        'attn.proj': nn.Linear,
        'attn.attn_drop': nn.Dropout,
        'attn.proj_drop': nn.Dropout,
        'norm2': LayerNorm,
        'mlp': MLP,
        'mlp.fc1': nn.Linear,
        'mlp.act': nn.GELU,
        'mlp.fc2': nn.Linear,
        'mlp.drop': nn.Dropout,
        'drop_path': DropPath,
        **attention,
    }
    layers = ('norm1', 'attn.proj', 'norm2', 'mlp.fc1', 'mlp.fc2')
    of_layers = [f'{layer}.{name}' for layer in layers for name in ('weight', 'bias')]
    of_attention = [f'attn.{name}' for name in ('qkv.weight', *parameters)]
    _STANDARD[kind] = _Standard(parts, (*of_layers, *of_attention))
    for part in parts.values():
        bases = part.__mro__[: part.__mro__.index(nn.Module)]
        _METHODS[part] = {(base, name): f for base in bases for name, f in vars(base).items() if callable(f)}


register_standard_block(SwinBlock, {'attn': WindowAttention}, ('relative_position_bias_table', 'qkv.bias'))


def _is_changed(part: nn.Module) -> bool:
    """Tell whether a method of the part, or of its class, is another than at first, or the part is compiled."""
    own = vars(part)
    return own.get('_compiled_call_impl') is not None or any(
        name in own or vars(base).get(name) is not method for (base, name), method in _METHODS[type(part)].items()
    )


@functools.lru_cache(maxsize=32)
def _log_once(reason: str | None) -> None:
    _logger.info('blocks are computed %s', 'fused' if reason is None else f'module by module: {reason}')

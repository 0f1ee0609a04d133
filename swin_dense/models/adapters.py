"""Adapters: a few new parameters that are fine-tuned in place of the weights of the backbone.

Mona adds small convolutional modules, one after each of the two residual additions of a block. LoRA adds a product of
two thin matrices to the linear layers of a block. Both start without an effect: the outputs are those of the base.
Sources: Yin et al., 5%>100%: Breaking Performance Shackles of Full Fine-Tuning on Visual Recognition Tasks, CVPR 2025;
Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, ICLR 2022.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from swin_dense.checkpoint.adapters import part_of
from swin_dense.models.block import SwinBlock, run
from swin_dense.models.layers import Linear
from swin_dense.ops import plain
from swin_dense.ops.linear import linear
from swin_dense.utils import checks

KERNEL_SIZES = (3, 5, 7)
# The linear layers of a block beside which LoRA stands.
_LORA_LAYERS = ('attn.w_msa.qkv', 'attn.w_msa.proj', 'ffn.layers.0.0', 'ffn.layers.1')
_FIRST_SCALE = 1e-6  # of the normalised input in Mona


class Mona(nn.Module):
    """The multi-cognitive visual adapter, on a residual branch: (B, H, W, C) to the same.

    The input, partly normalised, is projected to few channels, where depthwise convolutions of three sizes are averaged
    and a 1x1 convolution mixes the channels. In training it starts as the identity, because the projection back to C
    channels is zero; in the code of the authors, that projection is random.

    Args:
        channels: C.
        dim: channels of the convolutions.
        drop_rate: dropout before the projection back to C channels.
    """

    def __init__(self, channels: int, dim: int, drop_rate: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.norm_scale = nn.Parameter(torch.empty(channels))
        self.input_scale = nn.Parameter(torch.empty(channels))
        self.down = Linear(channels, dim)
        self.convs = nn.ModuleList(nn.Conv2d(dim, dim, size, padding=size // 2, groups=dim) for size in KERNEL_SIZES)
        self.mix = nn.Conv2d(dim, dim, 1)
        self.act = nn.GELU()
        self.drop = nn.Dropout(drop_rate)
        self.up = Linear(dim, channels)
        self.reset_adapter()

    def reset_adapter(self) -> None:
        nn.init.constant_(self.norm_scale, _FIRST_SCALE)
        nn.init.ones_(self.input_scale)
        self.down.reset_parameters()
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, x: Tensor) -> Tensor:
        scaled = self.norm(x) * self.norm_scale + x * self.input_scale
        low = plain.to_maps(self.down(scaled))
        low = low + sum(conv(low) for conv in self.convs) / len(self.convs)
        low = low + self.mix(low)
        low = self.drop(self.act(low))
        return x + self.up(low.permute(0, 2, 3, 1))


class MonaBlock(SwinBlock):
    """A block with a :class:`Mona` after each of its two residual additions: (B, H, W, C) to the same."""

    conv_reach = 2 * (max(KERNEL_SIZES) // 2)

    def __init__(self, *parts: Any, channels: int, dim: int, drop_rate: float) -> None:
        super().__init__(*parts)
        self.mona1 = Mona(channels, dim, drop_rate)
        self.mona2 = Mona(channels, dim, drop_rate)

    def forward_modules(self, x: Tensor) -> Tensor:
        x = self.mona1(x + self.drop_path(self.attn(self.norm1(x))))
        return self.mona2(x + self.drop_path(run(self.ffn, self.norm2(x), recompute=self.with_cp == 'mlp')))


class LoRALinear(Linear):
    """A linear layer plus a product of two thin matrices, of which the second starts at zero: (..., K) to (..., N).

    The parameters of the layer keep their names. The factor alpha / rank of the paper is 1.

    Args:
        layer: the layer, whose parameters become those of this one.
        rank: rows of ``lora_A``, (rank, K), and columns of ``lora_B``, (N, rank).
        drop_rate: dropout of the input of ``lora_A``.
    """

    def __init__(self, layer: Linear, rank: int, drop_rate: float) -> None:
        super().__init__(layer.in_features, layer.out_features, layer.bias is not None)
        self.weight, self.bias = layer.weight, layer.bias
        self.lora_drop = nn.Dropout(drop_rate)
        self.lora_A = nn.Parameter(torch.empty(rank, layer.in_features))
        self.lora_B = nn.Parameter(torch.empty(layer.out_features, rank))
        self.reset_adapter()

    def reset_adapter(self) -> None:
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))  # as the authors' code; the paper has a normal one
        nn.init.zeros_(self.lora_B)

    def forward(self, x: Tensor) -> Tensor:
        low = linear(self.lora_drop(x), self.lora_A)
        return super().forward(x) + linear(low, self.lora_B)

    def merged(self) -> Linear:
        """Return a layer without the pair that computes the same, up to rounding."""
        layer = Linear(self.in_features, self.out_features, self.bias is not None, device='meta')
        product = self.lora_B.detach() @ self.lora_A.detach()
        layer.weight = nn.Parameter(self.weight.detach() + product)
        layer.bias = self.bias
        return layer.train(self.training)

    def extra_repr(self) -> str:
        return f'{super().extra_repr()}, rank={len(self.lora_A)}'


# By type: the option that sets the size, its default, and that of drop_rate.
_KINDS = {'mona': ('dim', 64, 0.1), 'lora': ('rank', 8, 0.0)}


@dataclass(frozen=True)
class Adapter:
    """The option ``adapter`` of a backbone, checked.

    Attributes:
        kind: 'mona' or 'lora'.
        size: channels of the convolutions of Mona, or rank of LoRA.
        stages: the stages that have adapters.
        train_norms: whether the norms train with the adapters; if not, only the output norms do.
        drop_rate: dropout in the adapters.
    """

    kind: str
    size: int
    stages: tuple[int, ...]
    train_norms: bool
    drop_rate: float

    def trains(self, name: str) -> bool:
        """Return whether a parameter of the backbone is trained, by its name."""
        part = part_of(name)
        return part == 'adapter' or (part == 'norm' and (self.train_norms or name.startswith('norm')))

    def maker(self, plain: type[SwinBlock], with_mona: type[MonaBlock], channels: int) -> Callable[..., SwinBlock]:
        """Return a function that takes the arguments of ``plain`` and builds a block with adapters."""
        if self.kind == 'mona':
            return functools.partial(with_mona, channels=channels, dim=self.size, drop_rate=self.drop_rate)

        def with_lora(*parts: Any) -> SwinBlock:
            block = plain(*parts)
            for name in _LORA_LAYERS:
                layer = cast('Linear', block.get_submodule(name))
                _replace(block, name, LoRALinear(layer, self.size, self.drop_rate))
            return block

        return with_lora


def checked_adapter(config: Mapping[str, Any] | None, stages: int) -> Adapter | None:
    """Check the option ``adapter`` of a backbone with this number of stages.

    Raises:
        TypeError: it is no dict with a type, has an unknown key, or a value of the wrong type.
        ValueError: a value is not allowed.
    """
    if config is None:
        return None
    if not isinstance(config, Mapping) or 'type' not in config:
        raise TypeError(f"adapter must be None or a dict such as dict(type='mona', dim=64), got {config!r}")
    kind = config['type']
    checks.one_of('adapter["type"]', kind, _KINDS)
    size, usual_size, usual_drop_rate = _KINDS[kind]
    known = ['type', size, 'stages', 'train_norms', 'drop_rate']
    for key in config:
        if key not in known:
            raise TypeError(
                f'an adapter of the type {kind!r} has no option {key!r}{checks.closest(key, known)}; its options '
                f'are {known}'
            )
    chosen = config.get('stages')
    chosen = range(stages) if chosen is None else checks.integers('adapter["stages"]', chosen, minimum=0)
    if max(chosen) >= stages:
        raise ValueError(f'adapter["stages"] must be stages from 0 to {stages - 1}, got {config["stages"]!r}')
    return Adapter(
        kind,
        checks.integer(f'adapter["{size}"]', config.get(size, usual_size)),
        tuple(sorted(set(chosen))),
        checks.boolean('adapter["train_norms"]', config.get('train_norms', True)),
        checks.rate('adapter["drop_rate"]', config.get('drop_rate', usual_drop_rate)),
    )


def merge_lora(model: nn.Module) -> None:
    """Replace every layer with LoRA in a model by a linear layer that computes the same, up to rounding."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)}
    for name, layer in layers.items():
        _replace(model, name, layer.merged())


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition('.')
    setattr(model.get_submodule(parent), leaf, module)

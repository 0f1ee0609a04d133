"""Fine-tune a few per cent of a Swin in mmdet and mmsegmentation: Mona, or LoRA by the package peft.

    custom_imports = dict(imports=['swin_dense', 'adapters'])  # with this file on the PYTHONPATH
    model = dict(backbone=dict(type='SwinDenseMona', dim=64))  # or type='SwinDenseLoRA', rank=8

Mona: Yin et al., 5%>100%: Breaking Performance Shackles of Full Fine-Tuning on Visual Recognition Tasks, CVPR 2025.
LoRA: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, ICLR 2022.

Pretrained weights load as ever (``init_cfg``, ``load_checkpoint``). To keep only what was trained::

    trained = {name for name, parameter in backbone.named_parameters() if parameter.requires_grad}
    torch.save({name: x for name, x in backbone.state_dict().items() if name in trained}, 'adapter.pth')
    with swin_dense.allow_partial_loading():
        backbone.load_state_dict(torch.load('adapter.pth'), strict=False)
"""

from typing import Any

import torch
from mmengine.registry import MODELS
from torch import Tensor, nn

from swin_dense import SwinDense
from swin_dense.models.block import SwinBlock

LINEAR = ['qkv', 'proj', 'layers.0.0', 'layers.1']  # the linear layers of a block


class Mona(nn.Module):
    """Mona on a map (B, H, W, C): few channels, depthwise convolutions of three sizes, a 1x1 convolution."""

    def __init__(self, channels: int, dim: int, drop_rate: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.norm_scale = nn.Parameter(torch.full((channels,), 1e-6))
        self.input_scale = nn.Parameter(torch.ones(channels))
        self.down = nn.Linear(channels, dim)
        self.convs = nn.ModuleList(nn.Conv2d(dim, dim, size, padding=size // 2, groups=dim) for size in (3, 5, 7))
        self.mix = nn.Conv2d(dim, dim, 1)
        self.act = nn.GELU()
        self.drop = nn.Dropout(drop_rate)
        self.up = nn.Linear(dim, channels)

    def forward(self, x: Tensor) -> Tensor:
        low = self.down(self.norm(x) * self.norm_scale + x * self.input_scale).permute(0, 3, 1, 2)
        low = low + sum(conv(low) for conv in self.convs) / len(self.convs)
        low = self.drop(self.act(low + self.mix(low)))
        return x + self.up(low.permute(0, 2, 3, 1))


class MonaBlock(SwinBlock):
    """A block of a Swin V1 with a Mona after each of its two residual additions; 'mlp' of with_cp saves nothing."""

    mona1: Mona
    mona2: Mona

    def forward_modules(self, x: Tensor) -> Tensor:
        x = self.mona1(x + self.drop_path(self.attn(self.norm1(x))))
        return self.mona2(x + self.drop_path(self.ffn(self.norm2(x))))


@MODELS.register_module()
class SwinDenseMona(SwinDense):
    """A SwinDense whose Monas, norms and nothing else are trained. It starts as its base."""

    _block = MonaBlock

    def __init__(self, *args: Any, dim: int = 64, mona_drop_rate: float = 0.1, **options: Any) -> None:
        super().__init__(*args, **options)
        for stage, channels in zip(self.stages, self.arch.channels, strict=False):
            for block in stage.blocks:
                for name in ('mona1', 'mona2'):
                    mona = Mona(channels, dim, mona_drop_rate)
                    nn.init.zeros_(mona.up.weight)
                    nn.init.zeros_(mona.up.bias)
                    setattr(block, name, mona)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_('mona' in name or 'norm' in name)


@MODELS.register_module()
class SwinDenseLoRA(SwinDense):
    """A SwinDense with LoRA of peft beside the linear layers of its blocks; its norms train too."""

    def __init__(self, *args: Any, rank: int = 8, **options: Any) -> None:
        from peft import LoraConfig, inject_adapter_in_model

        super().__init__(*args, **options)
        inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=rank, target_modules=LINEAR), self)
        for name, parameter in self.named_parameters():
            if 'norm' in name:
                parameter.requires_grad_(True)

"""Adaptive average pooling for graphs of any size, because exporters unroll torch's version for the traced size."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn


def replace_adaptive_pools(model: nn.Module) -> None:
    """Replace each ``nn.AdaptiveAvgPool2d`` with a fixed output size, as in PPM heads, by :class:`RecordedPool`."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.AdaptiveAvgPool2d:
                size: Any = child.output_size
                height, width = size if isinstance(size, tuple) else (size, size)
                if height is not None and width is not None:
                    setattr(parent, name, RecordedPool(height, width))


class RecordedPool(nn.Module):
    """``nn.AdaptiveAvgPool2d`` as weighted sums, (B, C, H, W) to (B, C, height, width)."""

    def __init__(self, height: int, width: int) -> None:
        super().__init__()
        self.height = height
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        x = (x[:, :, None] * _weights(x.shape[2], self.height, x)[:, :, None]).sum(3)
        return (x[:, :, :, None] * _weights(x.shape[3], self.width, x)).sum(4)


def _weights(inputs: int, outputs: int, like: Tensor) -> Tensor:
    """Return the weight of each input along one axis for each output, (outputs, inputs)."""
    output = torch.arange(outputs, device=like.device)[:, None]
    start, end = output * inputs // outputs, ((output + 1) * inputs + outputs - 1) // outputs
    position = torch.arange(inputs, device=like.device)
    is_inside = (position >= start) & (position < end)
    return cast('Tensor', is_inside.to(like.dtype) / (end - start).to(like.dtype))

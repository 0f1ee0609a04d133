"""Parameters and FLOPs of a Swin per stage and part in closed form, with window or global attention.

A FLOP is one multiply-add of a matrix product or a convolution, as in published figures. Norms, activations and
softmax, well below 1 % of a backbone, are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from swin_dense.archs import Arch, resolve_arch
from swin_dense.ops.windows import Pair, window_grid
from swin_dense.utils import checks

PATCH_SIZE = 4
MLP_RATIO = 4
PARTS = ('patch embedding', 'qkv', 'attention', 'projection', 'mlp', 'norms', 'merging')


@dataclass(frozen=True)
class Cost:
    """FLOPs and parameters of one part of a stage."""

    flops: int = 0
    parameters: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.parameters + other.parameters)

    def __mul__(self, times: int) -> Cost:
        return Cost(self.flops * times, self.parameters * times)


def msa_flops(height: int, width: int, channels: int) -> int:
    """Return the FLOPs of global self-attention on a map: 4 h w C^2 + 2 (h w)^2 C."""
    tokens = height * width
    return 4 * tokens * channels**2 + 2 * tokens**2 * channels


def window_msa_flops(height: int, width: int, channels: int, window: int | Pair) -> int:
    """Return the FLOPs of window attention on a map of whole windows: 4 h w C^2 + 2 M^2 h w C."""
    tokens = height * width
    return 4 * tokens * channels**2 + 2 * math.prod(checks.pair('window', window)) * tokens * channels


def backbone_costs(
    arch: str | Mapping[str, Any] | Arch,
    height: int,
    width: int,
    window_size: int | Pair | None = 7,
    in_channels: int = 3,
    project_padding: bool = True,
) -> list[dict[str, Cost]]:
    """Return the cost of every part of every stage for one image.

    Args:
        arch: as for :class:`swin_dense.SwinBackbone`.
        height: image height in pixels.
        width: image width in pixels.
        window_size: side, or (height, width), of a window in tokens; None for global attention.
        in_channels: channels of the image.
        project_padding: count the output projections of the tokens that pad a map to a multiple of the window, as in
            the official code and in every published figure. This package does not compute them.

    Returns:
        One dict per stage with the keys ``PARTS``. The patch embedding belongs to stage 0; 'merging' is the patch
        merging after the stage; 'norms' includes the norms of the blocks and of the stage's output.
    """
    arch = resolve_arch(arch)
    height, width = window_grid(checks.integer('height', height), checks.integer('width', width), (PATCH_SIZE,) * 2)
    window = None if window_size is None else checks.pair('window_size', window_size)
    stages = []
    for stage, (channels, depth, heads) in enumerate(zip(arch.channels, arch.depths, arch.num_heads, strict=True)):
        parts = dict.fromkeys(PARTS, Cost())
        block = _block_costs(height, width, channels, heads, window, project_padding)
        parts |= {name: cost * depth for name, cost in block.items()}
        parts['norms'] += _norm(channels)
        if stage == 0:
            patches = _linear(height * width, in_channels * PATCH_SIZE**2, channels)
            parts['patch embedding'] = patches + _norm(channels)
        height, width = window_grid(height, width, (2, 2))
        if stage + 1 < len(arch.depths):
            reduction = _linear(height * width, 4 * channels, 2 * channels, bias=False)
            parts['merging'] = reduction + _norm(4 * channels)
        stages.append(parts)
    return stages


def total(costs: Iterable[Mapping[str, Cost]]) -> Cost:
    """Return the sum of the costs of :func:`backbone_costs`."""
    return sum((cost for parts in costs for cost in parts.values()), Cost())


def _block_costs(
    height: int, width: int, channels: int, heads: int, window: Pair | None, project_padding: bool
) -> dict[str, Cost]:
    tokens = height * width
    rows, columns = (1, 1) if window is None else window_grid(height, width, window)
    window = (height, width) if window is None else window
    padded_tokens = rows * window[0] * columns * window[1]
    projected_tokens = padded_tokens if project_padding else tokens
    offsets = (2 * window[0] - 1) * (2 * window[1] - 1)
    hidden = MLP_RATIO * channels
    return {
        'qkv': _linear(padded_tokens, channels, 3 * channels),
        'attention': Cost(2 * window[0] * window[1] * padded_tokens * channels, offsets * heads),
        'projection': _linear(projected_tokens, channels, channels),
        'mlp': _linear(tokens, channels, hidden) + _linear(tokens, hidden, channels),
        'norms': _norm(channels) * 2,
    }


def _linear(tokens: int, inputs: int, outputs: int, bias: bool = True) -> Cost:
    return Cost(tokens * inputs * outputs, (inputs + bias) * outputs)


def _norm(channels: int) -> Cost:
    return Cost(0, 2 * channels)

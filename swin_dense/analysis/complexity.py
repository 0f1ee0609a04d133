"""FLOPs of a Swin backbone by stage and part, and of the same blocks with global attention.

A FLOP is one multiply-add, as in published figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from swin_dense.analysis.flop_counter import Count, count
from swin_dense.archs import Arch
from swin_dense.models.swin import SwinBackbone
from swin_dense.ops.windows import Pair, window_grid

PARTS = ('patch embedding', 'qkv', 'attention', 'projection', 'mlp', 'norms', 'merging')


def msa_flops(height: int, width: int, channels: int) -> int:
    """Return the FLOPs of global self-attention on a map: 4 h w C^2 + 2 (h w)^2 C."""
    tokens = height * width
    return 4 * tokens * channels**2 + 2 * tokens**2 * channels


def window_msa_flops(height: int, width: int, channels: int, window: Pair) -> int:
    """Return the FLOPs of window attention on a map of whole windows: 4 h w C^2 + 2 M^2 h w C."""
    tokens = height * width
    return 4 * tokens * channels**2 + 2 * window[0] * window[1] * tokens * channels


@dataclass(frozen=True)
class BackboneCosts:
    """The counted cost of a backbone for one image."""

    count: Count
    # FLOPs of each stage by part, with the keys PARTS. The patch embedding belongs to stage 0; 'merging' is the patch
    # merging after the stage; norms count nothing.
    stages: list[dict[str, int]]
    global_flops: int  # if every token attended to all others


def backbone_costs(
    arch: str | Mapping[str, Any] | Arch, height: int, width: int, window_size: int | Pair = 7
) -> BackboneCosts:
    """Count the FLOPs of a :class:`swin_dense.SwinBackbone` for one image of height x width pixels."""
    with torch.device('meta'):
        backbone = SwinBackbone(arch, window_size=window_size)
    counted = count(backbone, height, width)
    flops = counted.flops
    stages, of_attention, of_global_attention = [], 0, 0
    for stage, depth in enumerate(backbone.arch.depths):
        blocks = [f'stages.{stage}.blocks.{block}' for block in range(depth)]
        whole = sum(flops[f'{block}.attn.w_msa'] for block in blocks)
        qkv = sum(flops[f'{block}.attn.w_msa.qkv'] for block in blocks)
        projection = sum(flops[f'{block}.attn.w_msa.proj'] for block in blocks)
        mlp = sum(flops[f'{block}.ffn'] for block in blocks)
        embedding = flops['patch_embed'] if stage == 0 else 0
        merging = flops[f'stages.{stage}.downsample']
        values = (embedding, qkv, whole - qkv - projection, projection, mlp, 0, merging)
        stages.append(dict(zip(PARTS, values, strict=True)))
        size = window_grid(height, width, (backbone.out_strides[stage],) * 2)
        of_attention += whole
        of_global_attention += depth * msa_flops(*size, backbone.arch.channels[stage])
    return BackboneCosts(counted, stages, flops[''] - of_attention + of_global_attention)

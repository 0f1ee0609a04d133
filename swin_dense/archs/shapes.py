"""Infer the options of a Swin from the shapes of its parameters."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

_BLOCK = re.compile(r'stages\.(\d{1,3})\.blocks\.(\d{1,3})\.')


def options_of(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Infer the options of a model from the shapes of its parameters; omit those on which parameters disagree."""
    inferred: dict[str, set[Any]] = {'use_abs_pos_embed': {'absolute_pos_embed' in shapes}}
    if len(patch := shapes.get('patch_embed.projection.weight', ())) == 4:
        inferred.update(in_channels={patch[1]}, patch_size={patch[2]})
    if len(head := shapes.get('head.weight', ())) == 2:
        inferred['num_classes'] = {head[0]}
    blocks = sorted({(int(match[1]), int(match[2])) for match in map(_BLOCK.match, shapes) if match})
    depths: list[int] = []
    for stage, block in blocks:  # in ascending order; a stage without blocks has the depth 0
        depths += [0] * (stage + 1 - len(depths))
        depths[stage] = block + 1
    if depths:
        inferred['depths'] = {tuple(depths)}
    heads: list[set[int]] = [set() for _ in depths]
    widths: set[tuple[int, ...]] = set()
    for stage, block in blocks:
        stem = f'stages.{stage}.blocks.{block}.'
        table = shapes.get(f'{stem}attn.w_msa.relative_position_bias_table')
        scale = shapes.get(f'{stem}attn.w_msa.logit_scale')
        if table:
            heads[stage].add(table[-1])
        if scale:
            heads[stage].add(scale[0])
        if qkv := shapes.get(f'{stem}attn.w_msa.qkv.weight'):
            inferred.setdefault('embed_dims', set()).add(qkv[-1] // 2**stage)
            biases = {f'{stem}attn.w_msa.{name}' for name in ('qkv.bias', 'q_bias')}
            inferred.setdefault('qkv_bias', set()).add(not biases.isdisjoint(shapes))
            if scale is None:
                inferred.setdefault('use_rel_pos_bias', set()).add(table is not None)
        if len(hidden := shapes.get(f'{stem}ffn.layers.0.0.weight', ())) == 2:
            widths.add(hidden)
    if (ratio := _mlp_ratio(widths)) is not None:
        inferred['mlp_ratio'] = {ratio}
    if heads and all(len(numbers) == 1 for numbers in heads):
        inferred['num_heads'] = {tuple(number for numbers in heads for number in numbers)}
    inferred['patch_norm'] = {
        f'{name.removesuffix(layer)}norm.weight' in shapes
        for layer in ('projection.weight', 'reduction.weight')
        for name in shapes
        if name.endswith(f'.{layer}')
    }
    return {option: value for option, values in inferred.items() if len(values) == 1 for value in values}


def _mlp_ratio(widths: set[tuple[int, ...]]) -> float | None:
    """Return the ratio with the fewest digits that gives all (hidden, input) channels, rounded down, of the MLPs."""
    smallest = max((hidden / channels for hidden, channels in widths), default=0)
    for digits in range(7):
        ratio = math.ceil(smallest * 10**digits) / 10**digits
        if widths and all(int(ratio * channels) == hidden for hidden, channels in widths):
            return ratio
    return None


def square_window(length: int) -> tuple[int, int] | None:
    """Return the square window whose bias table has ``length`` rows, or None."""
    grid = square_grid(length)
    return ((grid[0] + 1) // 2,) * 2 if grid and grid[0] % 2 else None


def square_grid(length: int) -> tuple[int, int] | None:
    """Return the square grid of ``length`` tokens, or None."""
    side = math.isqrt(length)
    return (side, side) if side * side == length else None

"""The options of a network that the shapes of its parameters tell."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

BLOCK = re.compile(r'stages\.(\d{1,3})\.blocks\.(\d{1,3})\.')


def options_of(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Infer the options of a model from the shapes of its parameters; omit those on which parameters disagree."""
    options: dict[str, Any] = {'use_abs_pos_embed': 'absolute_pos_embed' in shapes}
    if len(patch := shapes.get('patch_embed.projection.weight', ())) == 4:
        options.update(in_channels=patch[1], patch_size=patch[2])
    if len(head := shapes.get('head.weight', ())) == 2:
        options['num_classes'] = head[0]
    blocks = sorted({(int(match[1]), int(match[2])) for match in map(BLOCK.match, shapes) if match})
    last = dict(blocks)  # block of each stage, because they are in ascending order; a stage may lack blocks
    depths = tuple(last.get(stage, -1) + 1 for stage in range(max(last, default=-1) + 1))
    if depths:
        options['depths'] = depths
    found: dict[str, set[Any]] = defaultdict(set)  # values of options, of which all parameters must have the same
    heads: list[set[int]] = [set() for _ in depths]
    widths: set[tuple[int, ...]] = set()
    for stage, block in blocks:
        stem = f'stages.{stage}.blocks.{block}.'
        table = shapes.get(f'{stem}attn.w_msa.relative_position_bias_table', ())
        scale = shapes.get(f'{stem}attn.w_msa.logit_scale')
        heads[stage].update(table[-1:], (scale or ())[:1])
        if qkv := shapes.get(f'{stem}attn.w_msa.qkv.weight'):
            found['embed_dims'].add(qkv[-1] // 2**stage)
            found['qkv_bias'].add(f'{stem}attn.w_msa.qkv.bias' in shapes or f'{stem}attn.w_msa.q_bias' in shapes)
            if scale is None:
                found['use_rel_pos_bias'].add(bool(table))
        if len(hidden := shapes.get(f'{stem}ffn.layers.0.0.weight', ())) == 2:
            widths.add(hidden)
    if (ratio := _mlp_ratio(widths)) is not None:
        options['mlp_ratio'] = ratio
    if heads and all(len(numbers) == 1 for numbers in heads):
        options['num_heads'] = tuple(numbers.pop() for numbers in heads)
    embeds = [name for name in shapes if name.endswith(('.projection.weight', '.reduction.weight'))]
    found['patch_norm'] = {f'{name.rsplit(".", 2)[0]}.norm.weight' in shapes for name in embeds}
    options.update({option: values.pop() for option, values in found.items() if len(values) == 1})
    return options


def _mlp_ratio(widths: set[tuple[int, ...]]) -> float | None:
    """Return the ratio with the fewest digits that gives all (hidden, input) channels, rounded down, of the MLPs."""
    smallest = max((hidden / channels for hidden, channels in widths), default=0)
    for digits in range(7):
        ratio = math.ceil(smallest * 10**digits) / 10**digits
        if widths and all(int(ratio * channels) == hidden for hidden, channels in widths):
            return ratio
    return None

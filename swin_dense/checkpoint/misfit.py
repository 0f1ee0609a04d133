"""Say why a checkpoint does not fit a model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from swin_dense.archs import published_letter
from swin_dense.checkpoint.report import Report, listed
from swin_dense.checkpoint.source import Source
from swin_dense.checkpoint.target import OUT_NORM, Shape, Target


def explain_misfit(source: Source, target: Target, report: Report, wrong: list[str], excess: list[str]) -> str:
    """Return the message of a load that failed: the likely cause first, then what exactly.

    Args:
        source: the backbone of the checkpoint.
        target: what the model expects.
        report: of the load.
        wrong: parameters of ours that do not arrive.
        excess: keys of the checkpoint that have no place in the model.
    """
    given = options_of({name: tuple(tensor.shape) for name, tensor in source.parameters.items()})
    wanted = options_of({name: shape for name, shape in target.shapes.items() if shape is not None})
    lines = [f'{report.source} ({source.family}) does not fit the model, which keeps its weights.']
    lines += _causes(given, wanted)
    absent = [name for name in wrong if name not in report.mismatched and name not in report.damaged]
    if absent:
        lines.append(f'Missing in the checkpoint: {listed(absent)}.')
    if report.mismatched:
        wrong_shapes = [f'{name} is {how}' for name, how in report.mismatched.items()]
        lines.append(f'Wrong shape: {listed(wrong_shapes, separator="; ")}.')
    if report.damaged:
        values = [f'{name}: {how}' for name, how in report.damaged.items()]
        lines.append(
            f'Damaged: {listed(values, separator="; ")}. The training that wrote them diverged, or they were converted '
            'to a type too small for them; take an earlier checkpoint.'
        )
    if excess:
        lines.append(f'In the checkpoint, without a place in the model: {listed(excess)}.')
    lines.append(
        'To load what fits and keep the rest, use load_checkpoint(..., allow_partial=True), or in a config '
        "init_cfg=dict(type='Pretrained', checkpoint=..., allow_partial=True) of the backbone."
    )
    return '\n  '.join(lines)


def explain_version(source: Source, target: Target) -> str:
    """Return the message of a load of a Swin V2 into a V1, or of a V1 into a V2."""
    letter = published_letter(options_of({name: tuple(tensor.shape) for name, tensor in source.parameters.items()}))
    kind = {1: 'SwinBackbone, SwinDense in a config', 2: 'SwinV2Backbone, SwinDenseV2 in a config'}[source.version]
    name = f', or create_backbone({("swin_" if source.version == 1 else "swinv2_") + letter!r})' if letter else ''
    return (
        f'{source.described} ({source.family}) does not fit the model, which keeps its weights.\n'
        f'  It is a Swin V{source.version}, another network than the model, a Swin V{target.version}. '
        f'Build {kind}{name}.'
    )


def options_of(shapes: Mapping[str, Shape]) -> dict[str, Any]:
    """Read the options of a backbone off the shapes of its parameters, as far as they tell.

    Args:
        shapes: our parameter name to shape.
    """
    options: dict[str, Any] = {}
    if len(patch := shapes.get('patch_embed.proj.weight', ())) == 4:
        options.update(embed_dims=patch[0], in_channels=patch[1], patch_size=patch[2])
    blocks = [
        (int(match[1]), int(match[2]))
        for match in (re.match(r'layers\.(\d+)\.blocks\.(\d+)\.', n) for n in shapes)
        if match
    ]
    if blocks:
        stages = range(max(stage for stage, _ in blocks) + 1)
        options['depths'] = tuple(1 + max((b for s, b in blocks if s == stage), default=-1) for stage in stages)
        tables = [shapes.get(f'layers.{stage}.blocks.0.attn.relative_position_bias_table', ()) for stage in stages]
        scales = [shapes.get(f'layers.{stage}.blocks.0.attn.logit_scale', ()) for stage in stages]
        if all(len(table) == 2 for table in tables):
            options['num_heads'] = tuple(table[1] for table in tables)
        if all(len(scale) == 3 for scale in scales):
            options['num_heads'] = tuple(scale[0] for scale in scales)
        options['qkv_bias'] = any(name.endswith(('.attn.qkv.bias', '.attn.q_bias')) for name in shapes)
        if not any(scales):
            options['use_rel_pos_bias'] = any(name.endswith('.relative_position_bias_table') for name in shapes)
        if len(hidden := shapes.get('layers.0.blocks.0.mlp.fc1.weight', ())) == 2:
            options['mlp_ratio'] = hidden[0] / hidden[1]
        options['patch_norm'] = any('.downsample.norm.' in name or 'embed.norm.' in name for name in shapes)
        options['use_abs_pos_embed'] = 'absolute_pos_embed' in shapes
    if norms := {int(match[1]) for match in map(OUT_NORM.fullmatch, shapes) if match}:
        options['out_indices'] = tuple(sorted(norms))
    return options


def _causes(given: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Say which options of the model differ from those that the checkpoint was made with."""
    lines = []
    # The model may end at an earlier stage on purpose.
    stages = len(wanted.get('depths', ()))
    comparable = {key: value[:stages] if isinstance(value, tuple) else value for key, value in given.items()}
    if len(comparable.get('depths', ())) < stages:  # heads are compared as far as there are any
        wanted = {**wanted, 'num_heads': wanted.get('num_heads', ())[: len(comparable.get('num_heads', ()))]}
    told = [key for key in ('embed_dims', 'depths', 'num_heads') if key in comparable]
    different = {key for key in told if comparable[key] != wanted.get(key)}
    if different:
        letter = published_letter(given)
        advice = f'arch={letter!r}' if letter else ', '.join(f'{key}={given[key]}' for key in given if key in different)
        shown = ['depths', 'embed_dims'] + ['num_heads'] * ('num_heads' in different)
        lines.append(
            f'The checkpoint is {_architecture(given, shown)}, the model is {_architecture(wanted, shown)}: '
            f'build the model with {advice}.'
        )
    for key, value in given.items():
        if key in ('in_channels', *different) or key not in wanted or comparable[key] == wanted[key]:
            continue
        if key == 'out_indices' and set(wanted[key]) <= set(value):
            continue
        lines.append(
            f'The checkpoint was made with {key}={value!r}, the model with {key}={wanted[key]!r}; '
            f'build the model with {key}={value!r}.'
        )
    return lines


def _architecture(options: dict[str, Any], keys: Sequence[str]) -> str:
    letter = published_letter(options)
    shown = ' and '.join(f'{key} {options[key]}' for key in keys if key in options)
    return f'a Swin-{letter.upper()} with {shown}' if letter else f'a Swin with {shown}'

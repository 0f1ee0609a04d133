"""Error messages that explain why a checkpoint does not fit a model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from swin_dense.checkpoint.report import Report, listed
from swin_dense.checkpoint.source import Source
from swin_dense.checkpoint.target import Shape, Target
from swin_dense.models.archs import published_letter

LOAD_WHAT_FITS = (
    '\n  To load what fits and keep the rest, use load_checkpoint(..., allow_partial=True), or in a config '
    'allow_partial=True as an option of the backbone, which also applies to load_from.'
)
_CONVOLUTIONAL_STEM = re.compile(r'patch_embed\.proj(?:ection)?\.\d+\.weight')
_BLOCK = re.compile(r'stages\.(\d+)\.blocks\.(\d+)\.')


def has_other_stem(source: Source) -> bool:
    """Return whether the patch embedding of a checkpoint is a stem of several convolutions, as in CTransPath."""
    return any(map(_CONVOLUTIONAL_STEM.fullmatch, source.parameters))


def explain_misfit(source: Source, target: Target, report: Report, wrong: list[str], excess: list[str]) -> str:
    """Return the error message of a failed load: the likely cause, then the parameters.

    Args:
        source: the backbone of the checkpoint.
        target: the parameters of the model.
        report: the report of the load.
        wrong: parameters of the model that did not load.
        excess: keys of the checkpoint that are not part of the model.
    """
    given = options_of({name: tuple(tensor.shape) for name, tensor in source.parameters.items()})
    wanted = options_of({name: shape for name, shape in target.shapes.items() if shape is not None})
    lines = [f'{report.source} ({source.family}) does not fit the model, which keeps its weights.']
    if has_other_stem(source):  # no advice to load the blocks only: they were trained on the features of this stem
        lines.append(
            'Its patch embedding is a stem of several convolutions, as in CTransPath, but that of a Swin is one '
            'projection: it is another network, which no option of the model builds. Use the code of that network.'
        )
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
            f'Damaged: {listed(values, separator="; ")}. The training diverged, or the values overflowed in a '
            'conversion to a smaller type; use an earlier checkpoint.'
        )
    if excess:
        lines.append(f'In the checkpoint, but not in the model: {listed(excess)}.')
    return '\n  '.join(lines)


def explain_version(source: Source, target: Target) -> tuple[str, str]:
    """Return the error message of loading a Swin V2 into a V1 or the reverse, and the Python class to build instead."""
    letter = published_letter(options_of({name: tuple(tensor.shape) for name, tensor in source.parameters.items()}))
    kind = {1: 'SwinBackbone, SwinDense in a config', 2: 'SwinV2Backbone, SwinDenseV2 in a config'}[source.version]
    name = f'{"swin_" if source.version == 1 else "swinv2_"}{letter}'
    return (
        f'{source.described} ({source.family}) does not fit the model, which keeps its weights.\n'
        f'  It is a Swin V{source.version}{f", arch={name!r}" if letter else ""}; the model is a Swin '
        f'V{target.version}.',
        f' Build {kind}{f", or create_backbone({name!r})" if letter else ""}.',
    )


def options_of(shapes: Mapping[str, Shape]) -> dict[str, Any]:
    """Infer the options of a model from the shapes of its parameters; omit those on which parameters disagree.

    Args:
        shapes: maps our parameter names to shapes.
    """
    inferred: dict[str, set[Any]] = {'use_abs_pos_embed': {'absolute_pos_embed' in shapes}}
    if len(patch := shapes.get('patch_embed.projection.weight', ())) == 4:
        inferred.update(in_channels={patch[1]}, patch_size={patch[2]})
    if len(head := shapes.get('head.weight', ())) == 2:
        inferred['num_classes'] = {head[0]}
    blocks = sorted({(int(match[1]), int(match[2])) for match in map(_BLOCK.match, shapes) if match})
    stages = range(blocks[-1][0] + 1 if blocks else 0)
    if blocks:
        inferred['depths'] = {tuple(1 + max((b for s, b in blocks if s == stage), default=-1) for stage in stages)}
    heads: list[set[int]] = [set() for _ in stages]
    for stage, block in blocks:
        stem = f'stages.{stage}.blocks.{block}.'
        table, scale = (
            shapes.get(f'{stem}attn.w_msa.{name}') for name in ('relative_position_bias_table', 'logit_scale')
        )
        heads[stage] |= {shape[axis] for shape, axis in ((table, -1), (scale, 0)) if shape}
        if qkv := shapes.get(f'{stem}attn.w_msa.qkv.weight'):
            inferred.setdefault('embed_dims', set()).add(qkv[-1] // 2**stage)
            biases = {f'{stem}attn.w_msa.{name}' for name in ('qkv.bias', 'q_bias')}
            inferred.setdefault('qkv_bias', set()).add(not biases.isdisjoint(shapes))
            if scale is None:
                inferred.setdefault('use_rel_pos_bias', set()).add(table is not None)
        if len(hidden := shapes.get(f'{stem}ffn.layers.0.0.weight', ())) == 2:
            inferred.setdefault('mlp_ratio', set()).add(hidden[0] / hidden[1])
    if heads and all(len(numbers) == 1 for numbers in heads):
        inferred['num_heads'] = {tuple(number for numbers in heads for number in numbers)}
    inferred['patch_norm'] = {
        f'{name.removesuffix(layer)}norm.weight' in shapes
        for layer in ('projection.weight', 'reduction.weight')
        for name in shapes
        if name.endswith(f'.{layer}')
    }
    return {option: value for option, values in inferred.items() if len(values) == 1 for value in values}


def _causes(given: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Return one line for each difference between the options of the model and those of the checkpoint."""
    lines = []
    # The model may end at an earlier stage on purpose.
    stages = len(wanted.get('depths', ()))
    comparable = {key: value[:stages] if isinstance(value, tuple) else value for key, value in given.items()}
    if len(comparable.get('depths', ())) < stages:  # compare the heads of common stages only
        wanted = {**wanted, 'num_heads': wanted.get('num_heads', ())[: len(comparable.get('num_heads', ()))]}
    common = [key for key in ('embed_dims', 'depths', 'num_heads') if key in comparable and key in wanted]
    different = {key for key in common if comparable[key] != wanted[key]}
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
        lines.append(
            f'The checkpoint was made with {key}={value!r}, the model with {key}={wanted[key]!r}; '
            f'build the model with {key}={value!r}.'
        )
    return lines


def _architecture(options: dict[str, Any], keys: Sequence[str]) -> str:
    letter = published_letter(options)
    shown = ' and '.join(f'{key} {options[key]}' for key in keys if key in options)
    return f'a Swin-{letter.upper()} with {shown}' if letter else f'a Swin with {shown}'

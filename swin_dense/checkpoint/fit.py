"""Fit the backbone of a checkpoint to a model, and say why where it does not fit."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from swin_dense.archs import ARCHS
from swin_dense.checkpoint import resize
from swin_dense.checkpoint.report import CheckpointError, Report, listed
from swin_dense.checkpoint.source import Source

Shape = tuple[int, ...]
_STAGE = re.compile(r'layers\.(\d+)\.')
_OUT_NORM = re.compile(r'norm(\d+)\.(weight|bias)')


@dataclass(frozen=True)
class Options:
    """How a load treats what does not match; see :func:`swin_dense.checkpoint.load_checkpoint`."""

    allow_partial: bool = False
    final_norm: bool = False
    table_resize: str = 'bicubic'
    in_channels: str = 'repeat'


@dataclass(frozen=True)
class Target:
    """What a model expects.

    Attributes:
        shapes: parameter to shape; None where a sharded parameter does not tell.
        window: window of the model in tokens.
    """

    shapes: Mapping[str, Shape | None]
    window: tuple[int, int]

    @property
    def grid(self) -> tuple[int, int] | None:
        shape = self.shapes.get('absolute_pos_embed')
        return None if shape is None else (shape[2], shape[3])

    @property
    def stages(self) -> int:
        return 1 + max(int(match[1]) for match in map(_STAGE.match, self.shapes) if match)


def fit(source: Source, target: Target, options: Options, described: str) -> tuple[dict[str, Tensor], Report]:
    """Return the parameters to load, in the shapes of the target, and the report.

    Args:
        source: the backbone of the checkpoint.
        target: what the model expects.
        options: what may differ.
        described: the checkpoint, as messages call it.

    Raises:
        CheckpointError: parameters are missing, have wrong shapes or have no place in the model.
    """
    report = Report(described, source.label, source.prefix, left_out=dict(source.left_out))
    report.unexpected = list(source.unexpected)
    parameters = dict(source.parameters)
    if options.final_norm:
        _use_final_norm(parameters, target)
    fitted = {}
    for name, shape in target.shapes.items():
        tensor = parameters.get(name)
        if tensor is None:
            report.missing.append(name)
            continue
        tensor, how = (tensor, None) if shape is None else _adapt(name, tensor, shape, target, options)
        if shape is not None and tuple(tensor.shape) != shape:
            report.mismatched[name] = f'{tuple(tensor.shape)} in the checkpoint, {shape} in the model'
            report.missing.append(name)
            continue
        fitted[name] = tensor
        report.loaded.append(name)
        if how is not None:
            report.resized[name] = how
    report.new = _new_norms(report.missing, parameters)
    excess = _sort_out(source, target, report)
    report.unexpected += [key for name in excess for key in source.keys[name]]
    wrong = [name for name in report.missing if name not in report.new]
    if (wrong or excess) and not options.allow_partial:
        raise CheckpointError(_explain(source, target, report, wrong, excess))
    return fitted, report


def _adapt(name: str, tensor: Tensor, shape: Shape, target: Target, options: Options) -> tuple[Tensor, str | None]:
    given = tuple(tensor.shape)
    if given == shape:
        return tensor, None
    if name.endswith('.relative_position_bias_table') and len(given) == 2 and given[1] == shape[1]:
        window = resize.square_window(given[0])
        if window is None:
            return tensor, None
        table = resize.resize_table(tensor, window, target.window, options.table_resize)
        return table, f'window {_by(window)} to {_by(target.window)}, {options.table_resize}'
    if name == 'absolute_pos_embed' and len(given) == 4 and given[:2] == shape[:2]:
        size = (shape[2], shape[3])
        return resize.resize_position(tensor, size), f'grid {_by(given[2:])} to {_by(size)}, bicubic'
    if name == 'patch_embed.proj.weight' and len(given) == 4 and (given[0], *given[2:]) == (shape[0], *shape[2:]):
        weight = resize.adapt_channels(tensor, shape[1], options.in_channels)
        return weight, f'image channels {given[1]} to {shape[1]}, in_channels={options.in_channels!r}'
    return tensor, None


def _by(pair: Sequence[int]) -> str:
    return f'{pair[0]}x{pair[1]}'


def _use_final_norm(parameters: dict[str, Tensor], target: Target) -> None:
    last = f'norm{target.stages - 1}'
    for leaf in ('.weight', '.bias'):
        if f'norm{leaf}' not in parameters:
            raise CheckpointError('final_norm=True, but the checkpoint has no final norm of a classifier')
        if f'{last}{leaf}' not in target.shapes:
            raise CheckpointError(f'final_norm=True, but the model has no {last}: it does not return its last stage')
        parameters[f'{last}{leaf}'] = parameters.pop(f'norm{leaf}')


def _new_norms(missing: list[str], parameters: Mapping[str, Tensor]) -> list[str]:
    """Return the missing output norms if the checkpoint is of a kind that has none, or only that of a last stage."""
    stages = {int(match[1]) for match in map(_STAGE.match, parameters) if match}
    norms = {int(match[1]) for match in map(_OUT_NORM.fullmatch, parameters) if match}
    if norms - {max(stages, default=-1)}:
        return []
    return [name for name in missing if (match := _OUT_NORM.fullmatch(name)) and int(match[1]) not in norms]


def _sort_out(source: Source, target: Target, report: Report) -> list[str]:
    """Note what the model leaves out on purpose, and return the parameters that have no place in it."""
    excess = []
    for name, keys in source.keys.items():
        if name in target.shapes:
            continue
        stage = _STAGE.match(name)
        if (stage and int(stage[1]) >= target.stages) or name.startswith(f'layers.{target.stages - 1}.downsample.'):
            reason = 'stages above the last output'
        elif _OUT_NORM.fullmatch(name):
            reason = 'norms of stages that are not returned'
        elif name in ('norm.weight', 'norm.bias'):
            reason = "the classifier's final norm"
        else:
            excess.append(name)
            continue
        report.left_out.update(dict.fromkeys(keys, reason))
    return excess


def _explain(source: Source, target: Target, report: Report, wrong: list[str], excess: list[str]) -> str:
    shapes = {name: tuple(tensor.shape) for name, tensor in source.parameters.items()}
    lines = [f'{report.source} ({source.label}) does not fit the model, which keeps its weights.']
    lines += _causes(describe(shapes), describe({name: shape for name, shape in target.shapes.items() if shape}))
    absent = [name for name in wrong if name not in report.mismatched]
    if absent:
        lines.append(f'Missing in the checkpoint: {listed(absent)}.')
    if report.mismatched:
        wrong_shapes = [f'{name} is {how}' for name, how in report.mismatched.items()]
        lines.append(f'Wrong shape: {listed(wrong_shapes)}.')
    if excess:
        lines.append(f'In the checkpoint, without a place in the model: {listed(excess)}.')
    lines.append('To load what fits and keep the rest, pass allow_partial=True to load_checkpoint.')
    return '\n  '.join(lines)


def describe(shapes: Mapping[str, Shape]) -> dict[str, Any]:
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
        if all(len(table) == 2 for table in tables):
            options['num_heads'] = tuple(table[1] for table in tables)
        options['qkv_bias'] = any(name.endswith('.attn.qkv.bias') for name in shapes)
        options['use_rel_pos_bias'] = any(name.endswith('.relative_position_bias_table') for name in shapes)
        if len(hidden := shapes.get('layers.0.blocks.0.mlp.fc1.weight', ())) == 2:
            options['mlp_ratio'] = hidden[0] / hidden[1]
        options['patch_norm'] = 'patch_embed.norm.weight' in shapes
        options['use_abs_pos_embed'] = 'absolute_pos_embed' in shapes
    return options


def _causes(given: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Say which options of the model differ from those that the checkpoint was made with."""
    lines = []
    if 'depths' in given and 'depths' in wanted:
        stages = min(len(given['depths']), len(wanted['depths']))
        given, wanted = (
            {key: value[:stages] if isinstance(value, tuple) else value for key, value in options.items()}
            for options in (given, wanted)
        )
    different = [key for key in ('embed_dims', 'depths', 'num_heads') if given.get(key) != wanted.get(key)]
    if different:
        lines.append(
            f'The checkpoint has {_architecture(given)}; the model has {_architecture(wanted)}.{_advice(given)}'
        )
    for key in given:
        if key not in different and key not in ('in_channels',) and key in wanted and given[key] != wanted[key]:
            lines.append(
                f'The checkpoint was made with {key}={given[key]!r}, the model with {key}={wanted[key]!r}; '
                f'build the model with {key}={given[key]!r}.'
            )
    return lines


def _architecture(options: dict[str, Any]) -> str:
    shown = ', '.join(f'{key} {options[key]}' for key in ('depths', 'embed_dims', 'num_heads') if key in options)
    letter = _letter(options)
    return shown + (f': this is Swin-{letter.upper()}' if letter else '')


def _letter(options: dict[str, Any]) -> str | None:
    for letter, arch in ARCHS.items():
        if all(
            key not in options or options[key] == value[: len(options[key])]
            if isinstance(value, tuple)
            else options.get(key) == value
            for key, value in vars(arch).items()
        ):
            return letter
    return None


def _advice(given: dict[str, Any]) -> str:
    letter = _letter(given)
    return f" Build the model with arch='{letter}'." if letter else ' Build the model with those.'

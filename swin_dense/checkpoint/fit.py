"""Fit the backbone of a checkpoint to a model, and say why where it does not fit."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from swin_dense import checks
from swin_dense.archs import ARCHS
from swin_dense.checkpoint import resize
from swin_dense.checkpoint.report import CheckpointError, Report, listed
from swin_dense.checkpoint.source import Source
from swin_dense.checkpoint.target import STAGE, Shape, Target

_OUT_NORM = re.compile(r'norm(\d+)\.(weight|bias)')


@dataclass(frozen=True)
class Options:
    """How a load treats what does not match; see :func:`swin_dense.checkpoint.load_checkpoint`.

    Raises:
        ValueError: a method or policy is unknown.
    """

    allow_partial: bool = False
    final_norm: bool = False
    table_resize: str = 'bicubic'
    in_channels: str = 'repeat'
    window_size: resize.Pair | None = None

    def __post_init__(self) -> None:
        checks.one_of('table_resize', self.table_resize, resize.TABLE_METHODS)
        checks.one_of('in_channels', self.in_channels, resize.CHANNEL_POLICIES)


def fit(source: Source, target: Target, options: Options) -> tuple[dict[str, Tensor], Report]:
    """Return the parameters to load, in the shapes of the target, and the report.

    Args:
        source: the backbone of the checkpoint.
        target: what the model expects.
        options: what may differ.

    Raises:
        CheckpointError: parameters are missing, have wrong shapes or have no place in the model.
    """
    if options.final_norm:
        _use_final_norm(source, target)
    report = Report(source.described, source.family, source.prefix, left_out=dict(source.left_out))
    fitted = {}
    for name, shape in target.shapes.items():
        tensor = source.parameters.get(name)
        if tensor is None:
            report.missing.append(name)
            continue
        tensor, how = (tensor, None) if shape is None else _adapt(name, tensor, shape, source, target, options)
        if shape is not None and tuple(tensor.shape) != shape:
            report.mismatched[name] = f'{tuple(tensor.shape)} in the checkpoint, {shape} in the model'
            report.missing.append(name)
            continue
        fitted[name] = tensor
        report.loaded.append(name)
        if how is not None:
            report.resized[name] = how
    report.new = _new_norms(report.missing, source.keys)
    excess = _sort_out(source, target, report)
    report.unexpected = excess + source.unexpected
    wrong = [name for name in report.missing if name not in report.new]
    if not target.complete:  # FSDP hides parameters: pass on what there is, its own hooks go on from there
        fitted.update({name: source.parameters[name] for name in source.parameters if name not in fitted})
    elif (wrong or excess) and not options.allow_partial:
        raise CheckpointError(_explain(source, target, report, wrong, excess))
    return fitted, report


def _adapt(
    name: str, tensor: Tensor, shape: Shape, source: Source, target: Target, options: Options
) -> tuple[Tensor, str | None]:
    given = tuple(tensor.shape)
    if name.endswith('.relative_position_bias_table') and len(given) == 2 and given[1] == shape[1]:
        window = _window(name, given[0], source, target, options)
        if window is None or window == target.window:
            return tensor, None
        table = resize.resize_table(tensor, window, target.window, options.table_resize)
        return table, f'window {_by(window)} to {_by(target.window)}, {options.table_resize}'
    if given == shape:
        return tensor, None
    if name == 'absolute_pos_embed' and len(given) == 4 and given[:2] == shape[:2]:
        size = (shape[2], shape[3])
        return resize.resize_position(tensor, size), f'grid {_by(given[2:])} to {_by(size)}, bicubic'
    if name == 'patch_embed.proj.weight' and len(given) == 4 and (given[0], *given[2:]) == (shape[0], *shape[2:]):
        weight = resize.adapt_channels(tensor, shape[1], options.in_channels)
        return weight, f'image channels {given[1]} to {shape[1]}, in_channels={options.in_channels!r}'
    return tensor, None


def _window(name: str, length: int, source: Source, target: Target, options: Options) -> resize.Pair | None:
    """Return the window that a table of the checkpoint belongs to, as far as it can be known."""
    if options.window_size is not None and length == math.prod(resize.offsets(options.window_size)):
        return options.window_size
    if name in source.windows:
        return source.windows[name]
    if length == math.prod(resize.offsets(target.window)):
        return target.window
    return resize.square_window(length)


def _by(pair: Sequence[int]) -> str:
    return f'{pair[0]}x{pair[1]}'


def _use_final_norm(source: Source, target: Target) -> None:
    last = f'norm{target.stages - 1}'
    for leaf in ('.weight', '.bias'):
        if f'norm{leaf}' not in source.parameters:
            raise CheckpointError('final_norm=True, but the checkpoint has no final norm of a classifier')
        if f'{last}{leaf}' not in target.shapes:
            raise CheckpointError(f'final_norm=True, but the model has no {last}, as it does not return that stage')
        source.parameters[last + leaf] = source.parameters.pop(f'norm{leaf}')
        source.keys[last + leaf] = source.keys.pop(f'norm{leaf}')


def _new_norms(missing: list[str], given: Collection[str]) -> list[str]:
    """Return the missing output norms if the checkpoint is of a kind that has none, or only that of a last stage."""
    stages = {int(match[1]) for match in map(STAGE.match, given) if match}
    norms = {int(match[1]) for match in map(_OUT_NORM.fullmatch, given) if match}
    if norms - {max(stages, default=-1)}:
        return []
    return [name for name in missing if (match := _OUT_NORM.fullmatch(name)) and int(match[1]) not in norms]


def _sort_out(source: Source, target: Target, report: Report) -> list[str]:
    """Note what the model leaves out on purpose, and return the keys that have no place in it."""
    excess = list(source.foreign)
    for name, keys in source.keys.items():
        if name in target.shapes:
            continue
        stage = STAGE.match(name)
        if name.startswith(f'layers.{target.stages - 1}.downsample.') or (stage and int(stage[1]) >= target.stages):
            reason = 'stages above the last output'
        elif _OUT_NORM.fullmatch(name):
            reason = 'norms of stages that are not returned'
        elif name in ('norm.weight', 'norm.bias'):
            reason = "the classifier's final norm"
        else:
            excess += keys
            continue
        report.left_out.update(dict.fromkeys(keys, reason))
    return excess


def _explain(source: Source, target: Target, report: Report, wrong: list[str], excess: list[str]) -> str:
    given = describe({name: tuple(tensor.shape) for name, tensor in source.parameters.items()})
    wanted = describe({name: shape for name, shape in target.shapes.items() if shape is not None})
    lines = [f'{report.source} ({source.family}) does not fit the model, which keeps its weights.']
    if any('logit_scale' in key or 'cpb_mlp' in key for key in excess):
        lines.append('It is a Swin V2, another network; this one is a Swin V1.')
    lines += _causes(given, wanted)
    absent = [name for name in wrong if name not in report.mismatched]
    if absent:
        lines.append(f'Missing in the checkpoint: {listed(absent)}.')
    if report.mismatched:
        wrong_shapes = [f'{name} is {how}' for name, how in report.mismatched.items()]
        lines.append(f'Wrong shape: {listed(wrong_shapes, separator="; ")}.')
    if excess:
        lines.append(f'In the checkpoint, without a place in the model: {listed(excess)}.')
    lines.append('To load what fits and keep the rest, use load_checkpoint(..., allow_partial=True).')
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
        options['patch_norm'] = any('.downsample.norm.' in name or 'embed.norm.' in name for name in shapes)
        options['use_abs_pos_embed'] = 'absolute_pos_embed' in shapes
    return options


def _causes(given: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Say which options of the model differ from those that the checkpoint was made with."""
    lines = []
    # The model may end at an earlier stage on purpose.
    stages = len(wanted.get('depths', ()))
    comparable = {key: value[:stages] if isinstance(value, tuple) else value for key, value in given.items()}
    different = {key for key in ('embed_dims', 'depths', 'num_heads') if comparable.get(key) != wanted.get(key)}
    if different:
        letter = _letter(given)
        advice = f'arch={letter!r}' if letter else ', '.join(f'{key}={given[key]}' for key in given if key in different)
        shown = ['depths', 'embed_dims'] + ['num_heads'] * ('num_heads' in different)
        lines.append(
            f'The checkpoint has {_architecture(given, shown)}, the model has {_architecture(wanted, shown)}: '
            f'build the model with {advice}.'
        )
    for key, value in given.items():
        if key in wanted and key not in different and key != 'in_channels' and comparable[key] != wanted[key]:
            lines.append(
                f'The checkpoint was made with {key}={value!r}, the model with {key}={wanted[key]!r}; '
                f'build the model with {key}={value!r}.'
            )
    return lines


def _architecture(options: dict[str, Any], keys: Sequence[str]) -> str:
    shown = ' and '.join(f'{key} {options[key]}' for key in keys if key in options)
    letter = _letter(options)
    return f'{shown}, that is Swin-{letter.upper()}' if letter else shown


def _letter(options: dict[str, Any]) -> str | None:
    """Return the published architecture that the options are of."""
    for letter, arch in ARCHS.items():
        if all(options.get(key, value) == value for key, value in vars(arch).items()):
            return letter
    return None

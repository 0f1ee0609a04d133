"""Fit the backbone of a checkpoint to a model, and say why where it does not fit."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swin_dense import checks
from swin_dense.checkpoint import resize
from swin_dense.checkpoint.misfit import explain_misfit, explain_version
from swin_dense.checkpoint.report import CheckpointError, Report
from swin_dense.checkpoint.source import Source
from swin_dense.checkpoint.target import OUT_NORM, STAGE, Shape, Target


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
    if source.version != target.version:
        raise CheckpointError(explain_version(source, target))
    if source.version == 2 and not options.allow_partial:
        _check_trained_windows(source, target)
    if options.final_norm:
        _use_final_norm(source, target)
    if not target.complete:
        target = target.with_hidden(source.parameters)
    report = Report(
        source.described, source.family, source.prefix, version=source.version, left_out=dict(source.left_out)
    )
    fitted = {}
    for name, shape in target.shapes.items():
        tensor = source.parameters.get(name)
        if tensor is None:
            report.missing.append(name)
            continue
        if not tensor.is_floating_point():
            report.mismatched[name] = f'{tensor.dtype} in the checkpoint, floating point in the model'
            report.missing.append(name)
            continue
        if count := _not_finite(tensor):
            report.damaged[name] = f'{count} of its {tensor.numel()} values are NaN or infinite'
            report.missing.append(name)
            continue
        tensor, how = (tensor, None) if shape is None else _adapt(name, tensor, shape, source, target, options)
        if shape is not None and tuple(tensor.shape) != shape:
            report.mismatched[name] = f'{tuple(tensor.shape)} in the checkpoint, {shape} in the model'
            if (
                name.endswith('.relative_position_bias_table')
                and resize.square_window(tensor.shape[:1].numel()) is None
            ):
                report.mismatched[name] += '; its window is not square, so pass window_size=(height, width) of it'
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
    if (wrong or excess) and not options.allow_partial:
        raise CheckpointError(explain_misfit(source, target, report, wrong, excess))
    return fitted, report


def _check_trained_windows(source: Source, target: Target) -> None:
    """Refuse a V2 model whose position networks would see other coordinates than they were trained with."""
    given = [source.trained_windows.get(stage) for stage in range(target.stages)]
    pairs = list(zip(given, target.trained_windows, strict=False))
    if target.clamps and pairs[0][0] == pairs[0][1]:  # later stages have smaller windows where their maps are smaller
        pairs = [(trained, own) for trained, own in pairs if trained and max(trained) > max(own)]
    if any(trained not in (None, own) for trained, own in pairs):
        sides = tuple(max(trained or own) for trained, own in zip(given, target.trained_windows, strict=False))
        raise CheckpointError(
            f'{source.described} ({source.family}): its position networks were trained with windows of '
            f'{", ".join(_by(trained) if trained else "?" for trained in given)} tokens from stage to stage, which the '
            f'model does not know; build it with pretrained_window_size={sides}, at any window_size'
        )


def _not_finite(tensor: Tensor) -> int:
    """Return how many values are NaN or infinite in float32, as far as the tensor shows its values."""
    if tensor.is_meta or tensor.layout != torch.strided:
        return 0
    # Torch cannot ask numbers of 8 bits; those of 64 may be finite and yet infinite in a model.
    tensor = tensor.float() if tensor.element_size() in (1, 8) else tensor
    return int((~tensor.isfinite()).sum())


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
    last = f'norm{max((int(match[1]) for match in map(STAGE.match, source.keys) if match), default=0)}'
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
    norms = {int(match[1]) for match in map(OUT_NORM.fullmatch, given) if match}
    if norms - {max(stages, default=-1)}:
        return []
    return [name for name in missing if (match := OUT_NORM.fullmatch(name)) and int(match[1]) not in norms]


def _sort_out(source: Source, target: Target, report: Report) -> list[str]:
    """Note what the model leaves out on purpose, and return the keys that have no place in it."""
    excess = list(source.foreign)
    for name, keys in source.keys.items():
        if name in target.shapes:
            continue
        stage = STAGE.match(name)
        if name.startswith(f'layers.{target.stages - 1}.downsample.') or (stage and int(stage[1]) >= target.stages):
            reason = 'stages above the last output'
        elif OUT_NORM.fullmatch(name):
            reason = 'norms of stages that are not returned'
        elif name in ('norm.weight', 'norm.bias'):
            reason = "the classifier's final norm"
        else:
            excess += keys
            continue
        report.left_out.update(dict.fromkeys(keys, reason))
    return excess

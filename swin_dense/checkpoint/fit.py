"""Adapt the backbone of a checkpoint to a model, and explain any mismatch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swin_dense.checkpoint import resize
from swin_dense.checkpoint.misfit import LOAD_WHAT_FITS, explain_misfit, explain_version, has_other_stem
from swin_dense.checkpoint.report import CheckpointError, Report
from swin_dense.checkpoint.source import Source
from swin_dense.checkpoint.target import OUT_NORM, STAGE, Shape, Target, is_standard
from swin_dense.utils import checks


@dataclass(frozen=True)
class Options:
    """Options for weights that do not match the model; see :func:`swin_dense.checkpoint.load_checkpoint`.

    Raises:
        ValueError: ``table_resize`` or ``in_channels`` is unknown.
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
    """Return the tensors to load, with the names and shapes of the model, and the report.

    Args:
        source: the backbone of the checkpoint.
        target: the parameters of the model.
        options: how to treat differences.

    Raises:
        CheckpointError: parameters are missing, have wrong shapes or are not part of the model.
    """
    if source.version != target.version:
        raise CheckpointError(*explain_version(source, target))
    if source.version == 2 and not options.allow_partial:
        _check_trained_windows(source, target)
    report = Report(
        source.described, source.family, source.prefix, version=source.version, left_out=dict(source.left_out)
    )
    if target.is_classifier:
        _take_head(source, report, options)
    elif not target.clamps and (source.head or 'norm.weight' in source.parameters):
        report.notes.append(
            'a classifier shrinks its windows to small maps, such as those of stage 4 at 224 pixels; to reproduce its '
            'outputs, build the model with clamp_window=True'
        )
    if options.final_norm or (target.is_classifier and 'norm.weight' in source.parameters):
        _use_final_norm(source, target)
    target = target.extended_by(source.parameters)
    fitted = {}
    for name, shape in target.shapes.items():
        tensor = _fit_one(name, shape, source, target, options, report)
        if tensor is None:
            report.missing.append(name)
        else:
            fitted[target.names[name]] = tensor
            report.loaded.append(name)
    report.new = [name for name in report.missing if _is_new(name, source, target)]
    excess = _report_unused(source, target, report)
    wrong = [name for name in report.missing if name not in report.new]
    if (wrong or excess) and not options.allow_partial:
        advice = '' if has_other_stem(source) else LOAD_WHAT_FITS
        raise CheckpointError(explain_misfit(source, target, report, wrong, excess), advice)
    return fitted, report


def _fit_one(
    name: str, shape: Shape | None, source: Source, target: Target, options: Options, report: Report
) -> Tensor | None:
    """Return the tensor for a parameter, or None. If the checkpoint has it but it cannot be used, report why."""
    tensor = source.parameters.get(name)
    if tensor is None:
        return None
    if not tensor.is_floating_point() and name not in target.added:
        report.mismatched[name] = f'{tensor.dtype} in the checkpoint, floating point in the model'
        return None
    if count := _count_non_finite(tensor):
        report.damaged[name] = f'{count} of its {tensor.numel()} values are NaN or infinite'
        return None
    if shape is None:
        return tensor
    adapted, how = _adapt(name, tensor, shape, source, target, options)
    if tuple(adapted.shape) != shape:
        report.mismatched[name] = f'{tuple(tensor.shape)} in the checkpoint, {shape} in the model'
        if _is_table(name) and resize.square_window(tensor.shape[:1].numel()) is None:
            report.mismatched[name] += (
                '; its window is not square, so pass the height and width of its window as `window_size` of '
                'load_checkpoint (--source-window-size of swin-dense convert)'
            )
        return None
    if how is not None:
        report.resized[name] = how
    return adapted


def _take_head(source: Source, report: Report, options: Options) -> None:
    """Move the weight and bias of the classifier's head to ``source.parameters``."""
    if source.head.keys() == {'weight', 'bias'}:
        for leaf, key in source.head_keys.items():
            source.parameters[f'head.{leaf}'], source.keys[f'head.{leaf}'] = source.head[leaf], [key]
            report.left_out.pop(key, None)
    elif not options.allow_partial:
        raise CheckpointError(f'{source.described} ({source.family}) contains no linear head of a classifier')


def _is_new(name: str, source: Source, target: Target) -> bool:
    """Return whether a missing parameter is an output norm or not part of a Swin, so that its absence is no error."""
    norm = OUT_NORM.fullmatch(name)
    if norm is None or target.is_classifier:
        return name in target.added and name not in source.keys
    return source.keys.keys().isdisjoint(f'norm{norm[1]}.{leaf}' for leaf in ('weight', 'bias'))


def _check_trained_windows(source: Source, target: Target) -> None:
    """Raise a CheckpointError if a V2 model would give its position networks coordinates of another scale."""
    given = [source.trained_windows.get(stage) for stage in range(target.stages)]
    pairs = list(zip(given, target.trained_windows, strict=False))
    if target.clamps and pairs[0][0] == pairs[0][1]:  # later stages have smaller windows where their maps are smaller
        pairs = [(trained, own) for trained, own in pairs if trained and max(trained) > max(own)]
    if any(trained not in (None, own) for trained, own in pairs):
        sides = tuple(max(trained or own) for trained, own in zip(given, target.trained_windows, strict=False))
        raise CheckpointError(
            f'{source.described} ({source.family}): its position networks were trained with windows of '
            f'{", ".join(_by(trained) if trained else "?" for trained in given)} tokens per stage, other than those of '
            f'the model; build the model with pretrained_window_size={sides} and any window_size'
        )


def _count_non_finite(tensor: Tensor) -> int:
    """Return the number of values that are NaN or infinite in float32; 0 for meta and non-strided tensors."""
    if tensor.is_meta or tensor.layout != torch.strided:
        return 0
    # isfinite does not support 8-bit types; finite 64-bit values can overflow in the model.
    tensor = tensor.float() if tensor.element_size() in (1, 8) else tensor
    return int((~tensor.isfinite()).sum())


def _adapt(
    name: str, tensor: Tensor, shape: Shape, source: Source, target: Target, options: Options
) -> tuple[Tensor, str | None]:
    given = tuple(tensor.shape)
    if _is_table(name) and len(given) == 2 and given[1] == shape[1]:
        window = _window(name, given[0], source, target, options)
        if window is None or window == target.window:
            return tensor, None
        table = resize.resize_table(tensor, window, target.window, options.table_resize)
        return table, f'window {_by(window)} to {_by(target.window)}, {options.table_resize}'
    if name == 'absolute_pos_embed' and len(given) == 3 and (given[0], given[2]) == (shape[0], shape[2]):
        grid = source.grid or (target.grid if given == shape else resize.square_grid(given[1]))
        if grid is None or grid == target.grid:
            return tensor, None
        position = resize.resize_position(tensor, grid, target.grid)
        return position, f'grid {_by(grid)} to {_by(target.grid)}, bicubic'
    if given == shape:
        return tensor, None
    if name == 'patch_embed.projection.weight' and len(given) == 4 and (given[0], *given[2:]) == (shape[0], *shape[2:]):
        weight = resize.adapt_channels(tensor, shape[1], options.in_channels)
        return weight, f'image channels {given[1]} to {shape[1]}, in_channels={options.in_channels!r}'
    return tensor, None


def _is_table(name: str) -> bool:
    return name.endswith('.relative_position_bias_table')


def _window(name: str, length: int, source: Source, target: Target, options: Options) -> resize.Pair | None:
    """Return the window of a bias table in the checkpoint, or None if it cannot be determined."""
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
            raise CheckpointError('final_norm=True, but the checkpoint has no final norm; it needs a classifier')
        if f'{last}{leaf}' not in target.shapes:
            raise CheckpointError(f'final_norm=True, but the model has no {last} because it does not return that stage')
        source.parameters[last + leaf] = source.parameters.pop(f'norm{leaf}')
        source.keys[last + leaf] = source.keys.pop(f'norm{leaf}')


def _report_unused(source: Source, target: Target, report: Report) -> list[str]:
    """Report the checkpoint entries without a parameter in the model; return those that are parameters of a Swin."""
    excess = []
    for name, keys in source.keys.items():
        if name in target.shapes:
            continue
        stage = STAGE.match(name)
        if name.startswith(f'stages.{target.stages - 1}.downsample.') or (stage and int(stage[1]) >= target.stages):
            reason = 'stages above the last output'
        elif OUT_NORM.fullmatch(name) and not any(own.startswith(f'{name.partition(".")[0]}.') for own in target.names):
            reason = 'norms of stages that are not returned'
        elif name in ('norm.weight', 'norm.bias'):
            reason = "the classifier's final norm"
        else:
            report.unexpected += keys
            if is_standard(name) or name.startswith(source.stems):
                excess += keys
            continue
        report.left_out.update(dict.fromkeys(keys, reason))
    return excess

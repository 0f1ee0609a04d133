"""Fit the backbone of a checkpoint to a model: what the model expects, and what of it the checkpoint has."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from swin_dense.checkpoint.families import MMDET, plain_name
from swin_dense.checkpoint.find import Found
from swin_dense.checkpoint.report import CheckpointError, Report, misfit, other_version
from swin_dense.checkpoint.resize import adapt_channels, offsets, resize_position, resize_table
from swin_dense.models.options import options_of, square_grid, square_window
from swin_dense.ops.windows import Pair
from swin_dense.utils import checks

Shape = tuple[int, ...]
STAGE = re.compile(r'stages\.(\d{1,3})\.')
OUT_NORM = re.compile(r'norm(\d{1,3})\.(weight|bias)')
HEAD = ('head.weight', 'head.bias')
TABLE_METHODS = ('bicubic', 'geometric')
CHANNEL_POLICIES = ('repeat', 'mean', 'zero')
# Wrappers of PyTorch whose own load hooks remove this component from parameter names.
_SELF_RENAMING = re.compile(r'(?:_fsdp_wrapped_module|_checkpoint_wrapped_module)\.')
_CONVOLUTIONAL_STEM = re.compile(r'patch_embed\.proj(?:ection)?\.\d+\.weight')
_OF_CLASSIFIER = (
    'a classifier shrinks its windows to small maps, such as those of stage 4 at 224 pixels; to reproduce its '
    'outputs, build the model with clamp_window=True'
)
_NOT_SQUARE = (
    '; its window is not square, so pass the height and width of its window as `window_size` of load_checkpoint '
    '(--source-window-size of swin-dense convert)'
)


@dataclass(frozen=True)
class Target:
    """The parameters and persistent buffers of a backbone, or of a classifier.

    Attributes:
        names: maps our names to names in the module, which wrappers of submodules may extend.
        shapes: maps our names to shapes, or to None if the parameter is sharded and its full shape is unknown.
        added: our names of parameters that no Swin has, such as those of an adapter.
        window: window of the backbone in tokens.
        grid: (H, W) of the absolute position embedding.
        stages: number of stages of the model.
        version: the version of Swin, 1 or 2.
        trained_windows: per stage, the pretraining window to which V2's position networks scale their coordinates.
        clamps: whether windows shrink to small maps.
        is_classifier: whether the model has a classification head.
        is_meta: whether the parameters are on the meta device, without values.
        complete: whether the module lists all its parameters. FSDP may hide those of submodules in flat parameters.
    """

    names: Mapping[str, str]
    shapes: Mapping[str, Shape | None]
    added: frozenset[str]
    window: Pair
    grid: Pair
    stages: int
    complete: bool
    version: int
    trained_windows: tuple[Pair, ...]
    clamps: bool
    is_classifier: bool
    is_meta: bool

    @classmethod
    def of(cls, model: nn.Module) -> Target:
        """Describe a SwinBackbone or a SwinClassifier.

        Raises:
            TypeError: ``model`` is neither.
        """
        is_classifier = getattr(model, 'is_swin_classifier', False) is True
        backbone: Any = model.backbone if is_classifier else model
        window, grid = (getattr(backbone, name, None) for name in ('window_size', 'position_grid'))
        if not hasattr(backbone, 'patch_embed') or not isinstance(window, tuple) or not isinstance(grid, tuple):
            inside = '; pass its .backbone' if hasattr(model, 'backbone') else ''
            raise TypeError(f'backbone must be a SwinBackbone, got {type(model).__name__}{inside}')
        state = dict(state_of(model))
        keys = {plain_name(key): key for key in state if not key.endswith('_flat_param')}
        if is_classifier:
            keys = {name.removeprefix('backbone.'): key for name, key in keys.items()}
        sharded = {key for key in state if '_fsdp_wrapped_module.' in key or state[key].numel() == 0}
        trained = getattr(backbone, 'pretrained_window_size', None)  # of V2 only
        return cls(
            names={name: _SELF_RENAMING.sub('', key) for name, key in keys.items()},
            shapes={name: None if key in sharded else tuple(state[key].shape) for name, key in keys.items()},
            added=frozenset(name for name in keys if not (is_standard(name) or (is_classifier and name in HEAD))),
            window=window,
            grid=grid,
            stages=len(backbone.stages),
            complete=not any(key.endswith('_flat_param') for key in state),
            version=1 if trained is None else 2,
            trained_windows=tuple((side, side) if side else window for side in trained or ()),
            clamps=getattr(backbone, 'clamp_window', False) is True,
            is_classifier=is_classifier,
            is_meta=any(tensor.is_meta for tensor in state.values()),
        )

    def extended_by(self, given: Mapping[str, Tensor]) -> Target:
        """Return the target with the ``given`` parameters of a Swin added, which a wrapper renames or hides."""
        if not self.complete:  # FSDP loads the parameters that it hides by their usual names
            unbuilt = f'stages.{self.stages - 1}.downsample.'
            stages = {name: match for name in given if (match := STAGE.match(name)) and not name.startswith(unbuilt)}
            hidden = {name for name, match in stages.items() if int(match[1]) < self.stages}
            names, shapes = {name: name for name in hidden}, dict.fromkeys(hidden)
            return replace(self, names={**names, **self.names}, shapes={**shapes, **self.shapes})
        ours = {own: name for name, tensor in given.items() if (own := self._wrapped(name, tuple(tensor.shape)))}
        return replace(
            self,
            names={ours.get(own, own): key for own, key in self.names.items()},
            shapes={ours.get(own, own): shape for own, shape in self.shapes.items()},
            added=self.added - ours.keys(),
        )

    def _wrapped(self, name: str, shape: Shape) -> str | None:
        """Return the parameter of this shape and of this name with components inserted (by LoRA, say), if unique."""
        dots = [index for index, character in enumerate(name) if character == '.']
        inside = [
            own
            for own in self.added
            if self.shapes[own] == shape
            and any(own.startswith(name[:dot]) and own.endswith(name[dot:]) for dot in dots)
        ]
        return inside[0] if len(inside) == 1 else None


def is_standard(name: str) -> bool:
    """Return whether one of our names is that of a backbone parameter, for any options."""
    read = MMDET.read(name)
    return read is not None and read.role != 'final_norm'


def state_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors of all parameters and persistent buffers of a model."""
    yield from model.named_parameters(remove_duplicate=False)
    for path, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f'{path}.{name}' if path else name, buffer


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
    window_size: Pair | None = None

    def __post_init__(self) -> None:
        checks.one_of('table_resize', self.table_resize, TABLE_METHODS)
        checks.one_of('in_channels', self.in_channels, CHANNEL_POLICIES)


def fit(found: Found, target: Target, options: Options) -> tuple[dict[str, Tensor], Report]:
    """Return the tensors to load, with the names and shapes of the model, and the report.

    Args:
        found: the backbone of the checkpoint.
        target: the parameters of the model.
        options: how to treat differences.

    Raises:
        CheckpointError: parameters are missing, have wrong shapes or are not part of the model.
    """
    if found.version != target.version:
        raise other_version(f'{found.described} ({found.family})', found.version, _options_of(found))
    if not options.allow_partial:
        tables = [table for name, table in found.parameters.items() if _is_table(name)]
        if len({table.shape[:1] for table in tables}) > 1 or len(set(found.windows.values())) > 1:
            _check_windows(found, target)
        if found.version == 2:
            _check_trained_windows(found, target)
    report = Report(found.described, found.family, found.prefix, version=found.version, left_out=dict(found.left_out))
    if target.is_classifier and 'head.weight' not in found.parameters and not options.allow_partial:
        raise CheckpointError(f'{found.described} ({found.family}) contains no linear head of a classifier')
    if not (target.is_classifier or target.clamps) and {'head.weight', 'norm.weight'} & found.parameters.keys():
        report.notes.append(_OF_CLASSIFIER)
    if options.final_norm or (target.is_classifier and 'norm.weight' in found.parameters):
        _use_final_norm(found, target)
    absent = {n: x for n, x in found.parameters.items() if n not in target.shapes and is_standard(n)}
    if absent:
        target = target.extended_by(absent)
    fitted = {}
    for name, shape in target.shapes.items():
        tensor = _fit_one(name, shape, found, target, options, report)
        if tensor is None:
            report.missing.append(name)
        else:
            fitted[target.names[name]] = tensor
            report.loaded.append(name)
    report.new = [name for name in report.missing if _is_new(name, found, target)]
    excess = _report_unused(found, target, report)
    wrong = [name for name in report.missing if name not in report.new]
    if (wrong or excess) and not options.allow_partial:
        wanted = options_of({name: shape for name, shape in target.shapes.items() if shape is not None})
        has_other_stem = any(map(_CONVOLUTIONAL_STEM.fullmatch, found.parameters))  # as in CTransPath
        raise misfit(report, _options_of(found), wanted, has_other_stem, wrong, excess)
    return fitted, report


def _options_of(found: Found) -> dict[str, Any]:
    return options_of({name: tuple(tensor.shape) for name, tensor in found.parameters.items()})


def _fit_one(
    name: str, shape: Shape | None, found: Found, target: Target, options: Options, report: Report
) -> Tensor | None:
    """Return the tensor for a parameter, or None. If the checkpoint has it but it cannot be used, report why."""
    if name in found.unusable:
        report.mismatched[name] = found.unusable[name]
    tensor = found.parameters.get(name)
    if tensor is None:
        return None
    if tensor.is_meta and not target.is_meta:
        report.mismatched[name] = 'without values in the checkpoint (device meta)'
        return None
    if not tensor.is_floating_point() and name not in target.added:
        report.mismatched[name] = f'{tensor.dtype} in the checkpoint, floating point in the model'
        return None
    if count := _count_non_finite(tensor):
        report.damaged[name] = f'{count} of its {tensor.numel()} values are NaN or infinite'
        return None
    if shape is None:
        return tensor
    adapted, how = _adapt(name, tensor, shape, found, target, options)
    if tuple(adapted.shape) != shape:
        report.mismatched[name] = f'{tuple(tensor.shape)} in the checkpoint, {shape} in the model'
        if _is_table(name) and square_window(tensor.shape[:1].numel()) is None:
            report.mismatched[name] += _NOT_SQUARE
        return None
    if how is not None:
        report.resized[name] = how
    return adapted


def _is_new(name: str, found: Found, target: Target) -> bool:
    """Return whether a missing parameter is an output norm or not part of a Swin, so that its absence is no error."""
    norm = OUT_NORM.fullmatch(name)
    if norm is None or target.is_classifier:
        return name in target.added and name not in found.keys
    return found.keys.keys().isdisjoint(f'norm{norm[1]}.{leaf}' for leaf in ('weight', 'bias'))


def _check_windows(found: Found, target: Target) -> None:
    """Raise a CheckpointError if windows differ per stage, as far as buffers or lengths of tables determine them."""
    windows = {}
    for name, table in found.parameters.items():
        if _is_table(name) and table.ndim == 2 and (stage := STAGE.match(name)) and int(stage[1]) < target.stages:
            window = found.windows.get(name) or square_window(len(table))
            if window is not None:
                windows[int(stage[1])] = window
    if len(set(windows.values())) > 1:
        shown = ', '.join(_by(window) for _, window in sorted(windows.items()))
        raise CheckpointError(
            f'{found.described} ({found.family}): its windows differ per stage ({shown} tokens), but a model has one '
            'window for all stages, so the tables of other stages would be resized, which changes their maps',
            '. To resize them, build the model with one of these windows as window_size and use '
            'load_checkpoint(..., allow_partial=True)',
        )


def _check_trained_windows(found: Found, target: Target) -> None:
    """Raise a CheckpointError if a V2 model would give its position networks coordinates of another scale."""
    given = [found.trained_windows.get(stage) for stage in range(target.stages)]
    pairs = list(zip(given, target.trained_windows, strict=False))
    if target.clamps and pairs[0][0] == pairs[0][1]:  # later stages have smaller windows where their maps are smaller
        pairs = [(trained, own) for trained, own in pairs if trained and max(trained) > max(own)]
    if any(trained not in (None, own) for trained, own in pairs):
        sides = tuple(max(trained or own) for trained, own in zip(given, target.trained_windows, strict=False))
        raise CheckpointError(
            f'{found.described} ({found.family}): its position networks were trained with windows of '
            f'{", ".join(_by(trained) if trained else "?" for trained in given)} tokens per stage, other than those of '
            f'the model; build the model with pretrained_window_size={sides} and any window_size'
        )


def _count_non_finite(tensor: Tensor) -> int:
    """Return the number of values that are NaN or infinite in float32; 0 for tensors without values."""
    if tensor.is_meta:
        return 0
    # isfinite does not support 8-bit types; finite 64-bit values can overflow in the model.
    tensor = tensor.float() if tensor.element_size() in (1, 8) else tensor
    return int((~tensor.isfinite()).sum())


def _adapt(
    name: str, tensor: Tensor, shape: Shape, found: Found, target: Target, options: Options
) -> tuple[Tensor, str | None]:
    given = tuple(tensor.shape)
    if _is_table(name) and len(given) == 2 and given[1] == shape[1]:
        window = _window(name, given[0], shape[0], found, target, options)
        if window is None or window == target.window:
            return tensor, None
        table = resize_table(tensor, window, target.window, options.table_resize)
        return table, f'window {_by(window)} to {_by(target.window)}, {options.table_resize}'
    if name == 'absolute_pos_embed' and len(given) == 3 and (given[0], given[2]) == (shape[0], shape[2]):
        grid = found.grid or (target.grid if given == shape else square_grid(given[1]))
        if grid is None or grid == target.grid:
            return tensor, None
        position = resize_position(tensor, grid, target.grid)
        return position, f'grid {_by(grid)} to {_by(target.grid)}, bicubic'
    if given == shape:
        return tensor, None
    if name == 'patch_embed.projection.weight' and len(given) == 4 and (given[0], *given[2:]) == (shape[0], *shape[2:]):
        weight = adapt_channels(tensor, shape[1], options.in_channels)
        return weight, f'image channels {given[1]} to {shape[1]}, in_channels={options.in_channels!r}'
    return tensor, None


def _is_table(name: str) -> bool:
    return name.endswith('.relative_position_bias_table')


def _window(name: str, length: int, rows: int, found: Found, target: Target, options: Options) -> Pair | None:
    """Return the window of a bias table of ``length``, where the model has ``rows``, or None if it is not known."""
    if options.window_size is not None and length == math.prod(offsets(options.window_size)):
        return options.window_size
    if name in found.windows:
        return found.windows[name]
    if length == rows:
        return target.window
    return square_window(length)


def _by(pair: Sequence[int]) -> str:
    return f'{pair[0]}x{pair[1]}'


def _use_final_norm(found: Found, target: Target) -> None:
    last = f'norm{max((int(match[1]) for match in map(STAGE.match, found.keys) if match), default=0)}'
    for leaf in ('.weight', '.bias'):
        if f'norm{leaf}' not in found.parameters:
            raise CheckpointError('final_norm=True, but the checkpoint has no final norm; it needs a classifier')
        if f'{last}{leaf}' not in target.shapes:
            raise CheckpointError(f'final_norm=True, but the model has no {last} because it does not return that stage')
        found.parameters[last + leaf] = found.parameters.pop(f'norm{leaf}')
        found.keys[last + leaf] = found.keys.pop(f'norm{leaf}')


def _report_unused(found: Found, target: Target, report: Report) -> list[str]:
    """Report the checkpoint entries without a parameter in the model; return those that are parameters of a Swin."""
    excess = []
    for name, keys in found.keys.items():
        if name in target.shapes:
            continue
        stage = STAGE.match(name)
        if name.startswith(f'stages.{target.stages - 1}.downsample.') or (stage and int(stage[1]) >= target.stages):
            reason = 'stages above the last output'
        elif OUT_NORM.fullmatch(name) and not any(own.startswith(f'{name.partition(".")[0]}.') for own in target.names):
            reason = 'norms of stages that are not returned'
        elif name in ('norm.weight', 'norm.bias'):
            reason = "the classifier's final norm"
        elif name in HEAD:
            reason = 'the classifier'
        else:
            report.unexpected += keys
            if is_standard(name) or name.startswith(found.stems):
                excess += keys
            continue
        report.left_out.update(dict.fromkeys(keys, reason))
    return excess

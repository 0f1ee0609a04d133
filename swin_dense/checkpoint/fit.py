"""Fit the backbone of a checkpoint to a model: what the model expects, and what of it the checkpoint has."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from swin_dense.archs.shapes import options_of, square_window
from swin_dense.checkpoint.families import MMDET, plain_name
from swin_dense.checkpoint.find import OUT_NORM, Found, is_table
from swin_dense.checkpoint.report import CheckpointError, Report, misfit, other_version
from swin_dense.checkpoint.resize import adapt_channels, offsets, resize_position, resize_table
from swin_dense.ops.windows import Pair

Shape = tuple[int, ...]
STAGE = re.compile(r'stages\.(\d{1,3})\.')
HEAD = ('head.weight', 'head.bias')
# Wrappers of PyTorch whose own load hooks remove this component from parameter names.
_SELF_RENAMING = re.compile(r'(?:_fsdp_wrapped_module|_checkpoint_wrapped_module)\.')
_OF_CLASSIFIER = (
    'a classifier shrinks its windows to small maps, such as those of the last stage at 224 pixels; to reproduce its '
    'outputs, build the model with clamp_window=True'
)
_WINDOWS_UNKNOWN = (
    'neither the checkpoint nor the model records the windows that the position networks were trained with; they are '
    'taken to be those of the model, {window}; if they were others, build the model with pretrained_window_size'
)
_NOT_SQUARE = (
    '; its window is not square, so pass the height and width of its window as `window_size` of load_checkpoint'
)


@dataclass(frozen=True)
class Target:
    """The parameters and persistent buffers of a backbone, or of a classifier."""

    model: nn.Module
    is_classifier: bool
    backbone: Any  # of a classifier, or the model itself
    names: Mapping[str, str]  # by our names, those in the model, which wrappers of submodules may extend
    known: Mapping[str, Shape]  # by the names in the model, the shapes of parameters that are not sharded
    is_meta: bool  # the parameters have no values
    complete: bool  # the model lists all its parameters; FSDP may hide those of submodules in flat parameters

    @classmethod
    def of(cls, model: nn.Module) -> Target:
        """Describe a SwinBackbone or a SwinClassifier; raise TypeError for other modules."""
        is_classifier = getattr(model, 'is_swin_classifier', False) is True
        backbone: Any = model.backbone if is_classifier else model
        if not hasattr(backbone, 'patch_embed') or not hasattr(backbone, 'position_grid'):
            advice = '; pass its .backbone' if hasattr(model, 'backbone') else ''
            raise TypeError(f'backbone must be a SwinBackbone, got {type(model).__name__}{advice}')
        state = dict(state_of(model))
        inside = 'backbone.' if is_classifier else ''
        keys = {key: _SELF_RENAMING.sub('', key) for key in state if not key.endswith('_flat_param')}
        whole = [key for key in keys if '_fsdp_wrapped_module.' not in key and state[key].numel()]
        return cls(
            model,
            is_classifier,
            backbone,
            names={plain_name(key).removeprefix(inside): own for key, own in keys.items()},
            known={keys[key]: tuple(state[key].shape) for key in whole},
            is_meta=any(tensor.is_meta for tensor in state.values()),
            complete=len(keys) == len(state),
        )

    @cached_property
    def shapes(self) -> dict[str, Shape | None]:
        """The shapes by our names; None if the parameter is sharded, so that its full shape is unknown."""
        return {name: self.known.get(key) for name, key in self.names.items()}

    @cached_property
    def added(self) -> frozenset[str]:
        """Our names of parameters that no Swin has, such as those of LoRA."""
        own_head = HEAD if self.is_classifier else ()
        return frozenset(name for name in self.names if not is_standard(name) and name not in own_head)

    @property
    def version(self) -> int:
        return 2 if hasattr(self.backbone, 'pretrained_window_size') else 1

    @property
    def stages(self) -> int:
        return len(self.backbone.stages)

    def size_of(self, name: str) -> Any:
        """Return the window of a bias table, or the grid of the position embedding, of the model, (height, width)."""
        stage = STAGE.match(name)
        if is_table(name) and stage:
            return self.backbone.windows[int(stage[1])]
        return self.backbone.position_grid if name == 'absolute_pos_embed' else None

    def extended_by(self, given: Mapping[str, Tensor]) -> Target:
        """Return the target with the ``given`` parameters of a Swin added, which a wrapper renames or hides."""
        if not self.complete:  # FSDP loads the parameters that it hides by their usual names
            unbuilt = f'stages.{self.stages - 1}.downsample.'
            stages = {name: match for name in given if (match := STAGE.match(name)) and not name.startswith(unbuilt)}
            hidden = {name: name for name, match in stages.items() if int(match[1]) < self.stages}
            return replace(self, names={**hidden, **self.names})
        ours = {}
        for name, tensor in given.items():
            of_this_shape = [own for own in self.added if self.shapes[own] == tensor.shape]
            wrapped = [own for own in of_this_shape if _is_wrapped(own, name)]
            if len(wrapped) == 1:
                ours[wrapped[0]] = name
        names = {ours.get(own, own): key for own, key in self.names.items()}
        return replace(self, names=names)


def _is_wrapped(own: str, name: str) -> bool:
    """Return whether one name is the other with components inserted, by LoRA, say."""
    dots = [index for index, character in enumerate(name) if character == '.']
    return any(own.startswith(name[:dot]) and own.endswith(name[dot:]) for dot in dots)


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
class LoadOptions:
    """Options for weights that do not match the model; see :func:`swin_dense.checkpoint.load_checkpoint`."""

    allow_partial: bool = False
    final_norm: bool = False
    window_size: Pair | None = None


def fit(found: Found, target: Target, options: LoadOptions) -> tuple[dict[str, Tensor], Report]:
    """Return the tensors to load, with the names and shapes of the model, and the report, or raise CheckpointError."""
    if options.window_size is not None:
        for name, table in found.parameters.items():
            if is_table(name) and table.shape[:1].numel() == math.prod(offsets(options.window_size)):
                found.sizes[name] = options.window_size
    _check_network(found, target, options)
    report = Report(found.described, found.family, found.prefix, version=found.version, left_out=dict(found.left_out))
    if found.version == 2 and not found.trained_windows:
        report.doubts += doubts_about_windows(target)
    if options.final_norm or (target.is_classifier and 'norm.weight' in found.parameters):
        _use_final_norm(found, target)
    others = {name: tensor for name, tensor in found.parameters.items() if name not in target.names}
    renamed = {name: tensor for name, tensor in others.items() if is_standard(name)}
    if renamed:
        target = target.extended_by(renamed)
    fitted = {}
    for name, shape in target.shapes.items():
        tensor = _fit_one(name, shape, found, target, report)
        if tensor is not None:
            fitted[name] = tensor
    report.loaded = list(fitted)
    report.missing = [name for name in target.shapes if name not in fitted]
    report.new = [name for name in report.missing if _is_new(name, found, target)]
    unused = [name for name in found.keys if name not in target.shapes]
    excess = [key for name in unused for key in _report_unused(name, found, target, report)]
    if (excess or len(report.missing) > len(report.new)) and not options.allow_partial:
        wanted = options_of({name: shape for name, shape in target.shapes.items() if shape is not None})
        raise misfit(report, options_of(found.shapes), wanted, excess)
    return {target.names[name]: tensor for name, tensor in fitted.items()}, report


def _check_network(found: Found, target: Target, options: LoadOptions) -> None:
    """Raise a CheckpointError if the model computes something else with these weights, whatever their shapes."""
    described = f'{found.described} ({found.family})'
    if found.version != target.version:
        raise other_version(described, found.version, options_of(found.shapes))
    if options.allow_partial:
        return
    if target.is_classifier and 'head.weight' not in found.parameters:
        raise CheckpointError(f'{described} contains no linear head of a classifier')
    _check_windows(found, target)
    if found.version == 2:
        check_trained_windows(described, found.trained_windows, target)


def _check_windows(found: Found, target: Target) -> None:
    """Raise a CheckpointError if windows differ per stage, and from the model's, as far as the checkpoint has them."""
    windows = {}
    for name in found.parameters:
        stage, window = STAGE.match(name), found.size_of(name)
        if is_table(name) and stage and window and int(stage[1]) < target.stages:
            windows[int(stage[1])] = window
    if len(set(windows.values())) > 1 and any(own != target.backbone.windows[stage] for stage, own in windows.items()):
        shown = ', '.join(_by(window) for _, window in sorted(windows.items()))
        raise CheckpointError(
            f'{found.described} ({found.family}): its windows differ per stage ({shown} tokens), and from those of the '
            'model, so tables would be resized, which changes the maps',
            '. Build the model with these windows, as a list window_size, or resize them with '
            'load_checkpoint(..., allow_partial=True)',
        )


def doubts_about_windows(target: Target) -> list[str]:
    """Return what may be wrong if a checkpoint does not record the windows that a V2 was trained with."""
    if 0 not in target.backbone.pretrained_window_size:
        return []
    windows = dict.fromkeys(map(_by, target.backbone.windows))
    return [_WINDOWS_UNKNOWN.format(window=', '.join(windows))]


def check_trained_windows(described: str, trained_windows: Mapping[int, Pair], target: Target) -> None:
    """Raise a CheckpointError if a V2 model would give its position networks coordinates of another scale."""
    given = [trained_windows.get(stage) for stage in range(target.stages)]
    pairs = list(zip(given, target.backbone.trained_windows, strict=False))
    sides = pretrained_sides([trained or own for trained, own in pairs])
    if target.backbone.clamp_window and pairs[0][0] == pairs[0][1]:
        # Later stages have smaller windows where their maps are smaller.
        pairs = [(trained, own) for trained, own in pairs if trained and max(trained) > max(own)]
    if any(trained not in (None, own) for trained, own in pairs):
        oblong = {trained for trained in given if trained and trained[0] != trained[1]}
        advice = f'pretrained_window_size={sides} and any window_size'
        if oblong:
            advice = f'window_size={min(oblong)} and pretrained_window_size={sides}: only that window may be oblong'
        raise CheckpointError(
            f'{described}: its position networks were trained with windows of '
            f'{", ".join(_by(trained) if trained else "?" for trained in given)} tokens per stage, other than those of '
            f'the model; build the model with {advice}'
        )


def pretrained_sides(trained: Sequence[Pair | None]) -> tuple[int, ...]:
    """Return ``pretrained_window_size``: 0, which is the model's window, where a window is oblong or unknown."""
    return tuple(window[0] if window and window[0] == window[1] else 0 for window in trained)


def _fit_one(name: str, shape: Shape | None, found: Found, target: Target, report: Report) -> Tensor | None:
    """Return the tensor for a parameter, or None. If the checkpoint has it but it cannot be used, report why."""
    tensor = found.parameters.get(name)
    if tensor is None:
        if name in found.unusable:
            report.mismatched[name] = found.unusable[name]
    elif tensor.is_meta and not target.is_meta:
        report.mismatched[name] = 'without values in the checkpoint (device meta)'
    elif not tensor.is_floating_point() and name not in target.added:
        report.mismatched[name] = f'{tensor.dtype} in the checkpoint, floating point in the model'
    # In float32, because finite 64-bit values can overflow in the model.
    elif not tensor.is_meta and (count := int((~tensor.float().isfinite()).sum())):
        report.damaged[name] = f'{count} of its {tensor.numel()} values are NaN or infinite'
    elif shape is None:
        return tensor
    else:
        return _resized(name, tensor, shape, found, target, report)
    return None


def _resized(name: str, tensor: Tensor, shape: Shape, found: Found, target: Target, report: Report) -> Tensor | None:
    """Return the tensor for a parameter in the model's shape, or None, and report the change or why there is none."""
    given, old, new = tuple(tensor.shape), found.size_of(name), target.size_of(name)
    if given == shape and found.sizes.get(name) in (None, new):
        return tensor
    fits_but_for_axis_1 = given[:1] == shape[:1] and given[2:] == shape[2:]
    if old and is_table(name) and given[1:] == shape[1:]:
        tensor = resize_table(tensor, old, new)
        report.resized[name] = f'window {_by(old)} to {_by(new)}, bicubic'
    elif old and name == 'absolute_pos_embed' and fits_but_for_axis_1:
        tensor = resize_position(tensor, old, new)
        report.resized[name] = f'grid {_by(old)} to {_by(new)}, bicubic'
    elif name == 'patch_embed.projection.weight' and fits_but_for_axis_1:
        tensor = adapt_channels(tensor, shape[1])
        report.resized[name] = f'image channels {given[1]} to {shape[1]}'
    if tensor.shape == shape:
        return tensor
    report.mismatched[name] = f'{given} in the checkpoint, {shape} in the model'
    if is_table(name) and square_window(tensor.shape[:1].numel()) is None:
        report.mismatched[name] += _NOT_SQUARE
    return None


def _by(pair: Sequence[int]) -> str:
    return f'{pair[0]}x{pair[1]}'


def _use_final_norm(found: Found, target: Target) -> None:
    """Rename the final norm of a classifier to the output norm of the last stage."""
    last = f'norm{max((int(match[1]) for match in map(STAGE.match, found.keys) if match), default=0)}'
    for leaf in ('.weight', '.bias'):
        if f'norm{leaf}' not in found.parameters:
            raise CheckpointError('final_norm=True, but the checkpoint has no final norm; it needs a classifier')
        if f'{last}{leaf}' not in target.shapes:
            raise CheckpointError(f'final_norm=True, but the model has no {last} because it does not return that stage')
        found.parameters[last + leaf] = found.parameters.pop(f'norm{leaf}')
        found.keys[last + leaf] = found.keys.pop(f'norm{leaf}')


def _is_new(name: str, found: Found, target: Target) -> bool:
    """Return whether a missing parameter is an output norm or not part of a Swin, so that its absence is no error."""
    norm = OUT_NORM.fullmatch(name)
    if norm is None or target.is_classifier:
        return name in target.added and name not in found.keys
    return found.keys.keys().isdisjoint(f'norm{norm[1]}.{leaf}' for leaf in ('weight', 'bias'))


def _report_unused(name: str, found: Found, target: Target, report: Report) -> list[str]:
    """Report an entry of the checkpoint without a parameter in the model; return its keys if it is one of a Swin."""
    keys, stage, norm = found.keys[name], STAGE.match(name), OUT_NORM.fullmatch(name)
    if name.startswith(f'stages.{target.stages - 1}.downsample.') or (stage and int(stage[1]) >= target.stages):
        reason = 'stages above the last output'
    elif norm and not any(own.startswith(f'norm{norm[1]}.') for own in target.names):
        reason = 'norms of stages that are not returned'
    elif name in ('norm.weight', 'norm.bias', *HEAD):
        reason = 'the classifier' if name in HEAD else "the classifier's final norm"
        if not target.backbone.clamp_window and _OF_CLASSIFIER not in report.notes:
            report.notes.append(_OF_CLASSIFIER)
    else:
        report.unexpected += keys
        return keys if is_standard(name) or name.startswith(found.stems) else []
    report.left_out.update(dict.fromkeys(keys, reason))
    return []

"""Compare the weights of a checkpoint with a model: which fit, which have to be resized, and which are missing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor, nn

from swin_dense.archs.spec import Spec
from swin_dense.checkpoint.convert import TABLE, ConvertedBackbone
from swin_dense.checkpoint.families import COORDINATES, is_standard, plain_name
from swin_dense.checkpoint.infer import pretrained_sides
from swin_dense.checkpoint.report import OTHER_PARTS, Report
from swin_dense.checkpoint.resize import adapt_channels, resize_table
from swin_dense.ops.layout import resize_position
from swin_dense.ops.windows import Size
from swin_dense.utils import private
from swin_dense.utils.errors import CheckpointError

Shape = tuple[int, ...]
STAGE = re.compile(r'stages\.(\d{1,3})\.')
OUT_NORM = re.compile(r'norm(\d{1,3})\.(weight|bias)')
HEAD = ('head.weight', 'head.bias')
OF_CLASSIFIER = frozenset({'norm.weight', 'norm.bias', *HEAD})
# Wrappers of PyTorch whose own load hooks remove this component from parameter names.
_SELF_RENAMING = re.compile(r'(?:_fsdp_wrapped_module|_checkpoint_wrapped_module)\.')
_ORIGINAL = re.compile(r'\.(base_layer|original_module)\.')  # the names of PEFT for what it wraps
_CLASSIFIER_CLAMPS = (
    'a classifier shrinks its windows to small maps, such as those of the last stage at 224 pixels; to reproduce its '
    'outputs, build the model with clamp_window=True'
)
_TRANSPOSED = 'linear weights are (inputs, outputs) in the checkpoint, as Paddle stores them, and were transposed'


@dataclass(frozen=True)
class Target:
    """The parameters and persistent buffers of a backbone, or of a classifier."""

    model: nn.Module
    spec: Spec
    names: Mapping[str, str]  # by our names, those in the model, which wrappers of submodules may extend
    shapes: Mapping[str, Shape | None]  # by our names; None if the parameter is sharded, so that its shape is unknown
    is_meta: bool  # the parameters have no values
    complete: bool  # the model lists all its parameters; FSDP may hide those of submodules in flat parameters

    @classmethod
    def of(cls, model: nn.Module) -> Target:
        """Describe a SwinBackbone or a SwinClassifier; raise TypeError for other modules."""
        describe = getattr(model, 'spec', None)
        spec = describe() if callable(describe) else None
        if not isinstance(spec, Spec):
            advice = '; pass its .backbone' if hasattr(model, 'backbone') else ''
            raise TypeError(f'backbone must be a SwinBackbone, got {type(model).__name__}{advice}')
        state = dict(state_of(model))
        names, shapes = {}, {}
        for key, tensor in state.items():
            if not key.endswith(('_flat_param', COORDINATES)):  # the model computes the latter
                name = plain_name(key).removeprefix('backbone.' if spec.is_classifier else '')
                is_whole = '_fsdp_wrapped_module.' not in key and tensor.numel()
                names[name] = _SELF_RENAMING.sub('', key)
                shapes[name] = tuple(tensor.shape) if is_whole else None
        is_meta = any(tensor.is_meta for tensor in state.values())
        complete = not any(key.endswith('_flat_param') for key in state)
        return cls(model, spec, names, shapes, is_meta, complete)

    @cached_property
    def added(self) -> frozenset[str]:
        """Our names of parameters that no Swin has, such as those of LoRA."""
        own_head = HEAD if self.spec.is_classifier else ()
        return frozenset(name for name in self.names if not is_standard(name) and name not in own_head)

    def is_unbuilt(self, name: str) -> bool:
        """Return whether a parameter belongs to a stage above the last output, or to the patch merging before it."""
        stage, stages = STAGE.match(name), self.spec.stages
        return stage is not None and (int(stage[1]) >= stages or name.startswith(f'stages.{stages - 1}.downsample.'))

    def extended_by(self, given: Mapping[str, Tensor]) -> Target:
        """Return the target with the ``given`` parameters of a Swin added, which a wrapper renames or hides."""
        if not self.complete:  # FSDP loads the parameters that it hides by their usual names
            hidden = {name: name for name in given if STAGE.match(name) and not self.is_unbuilt(name)}
            shapes = {**dict.fromkeys(hidden), **self.shapes}
            return replace(self, names={**hidden, **self.names}, shapes=shapes)
        ours = {}
        for name, tensor in given.items():
            wrapped = [own for own in self.added if self.shapes[own] == tensor.shape and _is_wrapped(own, name)]
            # The matrices of LoRA may have the shape of the weight, and its copies in modules_to_save have.
            originals = [own for own in wrapped if _ORIGINAL.search(own)] or wrapped
            if len(originals) == 1:
                ours[originals[0]] = name
        names = {ours.get(own, own): key for own, key in self.names.items()}
        shapes = {ours.get(own, own): shape for own, shape in self.shapes.items()}
        return replace(self, names=names, shapes=shapes)


def _is_wrapped(own: str, name: str) -> bool:
    """Return whether a name is the other with components inserted, as LoRA does."""
    dots = [index for index, character in enumerate(name) if character == '.']
    return any(own.startswith(name[:dot]) and own.endswith(name[dot:]) for dot in dots)


def state_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors of all parameters and persistent buffers of a model."""
    yield from model.named_parameters(remove_duplicate=False)
    for path, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if private.is_persistent(module, name):
                yield f'{path}.{name}' if path else name, buffer


def compare(
    weights: ConvertedBackbone, target: Target, allow_partial: bool = False, final_norm: bool = False
) -> tuple[dict[str, Tensor], Report]:
    """Return the tensors to load, with the names and shapes of the model, and the report, or raise CheckpointError.

    For ``allow_partial`` and ``final_norm``, see :func:`swin_dense.load_checkpoint`.
    """
    described = f'{weights.described} ({weights.label})'
    network = weights.family.network
    report = Report(weights.described, weights.label, weights.prefix, version=1 if network == 'swin' else 2)
    if network != target.spec.network:
        from swin_dense.checkpoint import explain

        raise explain.other_network(report, weights)
    if target.spec.is_classifier and 'head.weight' not in weights.tensors and not allow_partial:
        raise CheckpointError(f'{described} contains no linear head of a classifier')
    report.left_out = dict(weights.left_out)
    report.notes = [_TRANSPOSED] * weights.is_transposed
    report.doubts = check_windows(described, weights, target, allow_partial)
    if final_norm or (target.spec.is_classifier and 'norm.weight' in weights.tensors):
        weights = _with_final_norm(weights, target)
    others = {name: tensor for name, tensor in weights.tensors.items() if name not in target.names}
    renamed = {name: tensor for name, tensor in others.items() if is_standard(name)}
    if renamed:
        weights = _with_copies(weights, target, renamed)
        target = target.extended_by(renamed)
    fitted = _fit_all(weights, target, report)
    report.loaded = list(fitted)
    report.missing = [name for name in target.shapes if name not in fitted]
    report.new = [name for name in report.missing if _is_new(name, weights, target)]
    excess = _report_unused(weights, target, report)
    if (excess or len(report.missing) > len(report.new)) and not allow_partial:
        from swin_dense.checkpoint import explain

        raise explain.misfit(report, weights, target.shapes, target.names, excess)
    return {target.names[name]: tensor for name, tensor in fitted.items()}, report


def _fit_all(weights: ConvertedBackbone, target: Target, report: Report) -> dict[str, Tensor]:
    """Return the tensors that fit by our names; report those that do not, and those that were resized."""
    fitted = {}
    for name in [name for name in target.shapes if name in weights.parameters]:
        given = weights.parameters[name].tensor
        if given is not None and given.is_floating_point() and not given.is_meta:
            # In float32, because finite 64-bit values can overflow in the model.
            damaged = int((~given.float().isfinite()).sum())
            if damaged:
                report.damaged[name] = f'{damaged} of its {given.numel()} values are NaN or infinite'
                continue
        tensor, how = _fit(name, weights, target)
        if tensor is None:
            report.mismatched[name] = how
        else:
            fitted[name] = tensor
            if how:
                report.resized[name] = how
    return fitted


def _report_unused(weights: ConvertedBackbone, target: Target, report: Report) -> list[str]:
    """Report entries that the model does not have; return the keys of those that another Swin has."""
    excess: list[str] = []
    unused = [name for name in weights.parameters if name not in target.shapes]
    if not OF_CLASSIFIER.isdisjoint(unused) and weights.is_classifier and not target.spec.clamp_window:
        report.notes.append(_CLASSIFIER_CLAMPS)
    for name in unused:
        keys = weights.parameters[name].keys
        reason = _why_left_out(name, target, weights.is_classifier)
        if reason:
            report.left_out.update(dict.fromkeys(keys, reason))
            continue
        report.unexpected += keys
        if is_standard(name) or weights.family.is_numbered(name):
            excess += keys
    return excess


def _fit(name: str, weights: ConvertedBackbone, target: Target) -> tuple[Tensor | None, str]:
    """Return the tensor for a parameter, and how it was resized, if it was; or None, and why there is none."""
    parameter, shape = weights.parameters[name], target.shapes[name]
    tensor = parameter.tensor
    if tensor is None:
        return None, parameter.unusable
    if tensor.is_meta and not target.is_meta:
        return None, 'without values in the checkpoint (device meta)'
    if not tensor.is_floating_point() and name not in target.added:
        return None, f'{tensor.dtype} in the checkpoint, floating point in the model'
    old, new = parameter.size, None
    if name == 'absolute_pos_embed':
        new = target.spec.grid
    elif name.endswith(TABLE) and (stage := STAGE.match(name)):
        new = target.spec.windows[int(stage[1])]
    if shape is None or (tensor.shape == shape and (old == new or not parameter.size_is_known)):
        return tensor, ''
    return _resized(name, tensor, old, new, shape)


def _resized(name: str, tensor: Tensor, old: Size | None, new: Size | None, shape: Shape) -> tuple[Tensor | None, str]:
    """Return a tensor in the shape of the model, and how it was resized; or None, and why it cannot be."""
    given = tuple(tensor.shape)
    fits_but_for_axis_1 = given[:1] == shape[:1] and given[2:] == shape[2:]
    if old and new and name.endswith(TABLE) and given[1:] == shape[1:]:
        return resize_table(tensor, old, new), f'window {_by(old)} to {_by(new)}, bicubic'
    if old and new and name == 'absolute_pos_embed' and fits_but_for_axis_1:
        resized = resize_position(tensor, old, new).flatten(1, 2).contiguous().to(tensor.dtype)
        return resized, f'grid {_by(old)} to {_by(new)}, bicubic'
    if name == 'patch_embed.projection.weight' and fits_but_for_axis_1:
        return adapt_channels(tensor, shape[1]), f'image channels {given[1]} to {shape[1]}'
    why = f'{given} in the checkpoint, {shape} in the model'
    if name.endswith(TABLE) and old is None:
        why += (
            '; its window is not square, so pass the height and width of its window as `window_size` of load_checkpoint'
        )
    return None, why


def check_windows(described: str, weights: ConvertedBackbone, target: Target, allow_partial: bool = False) -> list[str]:
    """Raise a CheckpointError if windows would change the maps, as far as the checkpoint has them; return doubts.

    With ``allow_partial``, only return the doubts.
    """
    spec = target.spec
    windows = {stage: weights.windows[stage] for stage in range(spec.stages) if stage in weights.windows}
    are_of_model = all(window == spec.windows[stage] for stage, window in windows.items())
    error, doubts = '', []
    if weights.family.network == 'swinv2':
        error, doubts = _other_trained_windows(weights, spec), _unknown_windows(weights, spec)
    elif len(set(windows.values())) > 1 and not are_of_model:
        shown = ', '.join(map(_by, windows.values()))
        error = (
            f'its windows differ per stage ({shown} tokens), and from those of the model, so tables would be resized, '
            'which changes the maps. Build the model with these windows, as a list window_size, or resize them with '
            'load_checkpoint(..., allow_partial=True)'
        )
    if error and not allow_partial:
        raise CheckpointError(f'{described}: {error}')
    return doubts


def _unknown_windows(weights: ConvertedBackbone, spec: Spec) -> list[str]:
    """Return a doubt about the windows of a V2 if nothing records those of its training."""
    if weights.trained_windows or None not in spec.given_windows:
        return []
    taken = ', '.join(dict.fromkeys(map(_by, spec.windows)))
    return [
        'neither the checkpoint nor the model records the windows that the position networks were trained with; they '
        f'are taken to be those of the model, {taken}; if they were others, build the model with pretrained_window_size'
    ]


def _other_trained_windows(weights: ConvertedBackbone, spec: Spec) -> str:
    """Return why a V2, which needs the windows of its training, does not fit the model; '' if it does."""
    given = [weights.trained_windows.get(stage) for stage in range(spec.stages)]
    pairs = list(zip(given, spec.trained_windows, strict=False))
    sides = pretrained_sides([trained or own for trained, own in pairs])
    if spec.clamp_window and pairs[0][0] == pairs[0][1]:
        # Later stages have smaller windows where their maps are smaller.
        pairs = [(trained, own) for trained, own in pairs if trained and max(trained) > max(own)]
    if all(trained in (None, own) for trained, own in pairs):
        return ''
    oblong = {trained for trained in given if trained and trained[0] != trained[1]}
    advice = f'pretrained_window_size={sides} and any window_size'
    if oblong:
        advice = f'window_size={min(oblong)} and pretrained_window_size={sides}: only that window may be oblong'
    shown = ', '.join(_by(trained) if trained else '?' for trained in given)
    return (
        f'its position networks were trained with windows of {shown} tokens per stage, other than those of the model; '
        f'build the model with {advice}'
    )


def _with_final_norm(weights: ConvertedBackbone, target: Target) -> ConvertedBackbone:
    """Return weights whose final norm, of a classifier, is the output norm of the last stage."""
    stages = [int(match[1]) for match in map(STAGE.match, weights.parameters) if match]
    last = f'norm{max(stages, default=0)}'
    parameters = dict(weights.parameters)
    for leaf in ('.weight', '.bias'):
        if f'norm{leaf}' not in weights.tensors:
            raise CheckpointError('final_norm=True, but the checkpoint has no final norm; it needs a classifier')
        if f'{last}{leaf}' not in target.names:
            raise CheckpointError(f'final_norm=True, but the model has no {last} because it does not return that stage')
        parameters[last + leaf] = parameters.pop(f'norm{leaf}')
    return replace(weights, parameters=parameters)


def _with_copies(weights: ConvertedBackbone, target: Target, names: Iterable[str]) -> ConvertedBackbone:
    """Return weights that also have the copies of modules that PEFT trains, as its modules_to_save."""
    parameters = dict(weights.parameters)
    for own in [own for own in target.added if '.modules_to_save.' in own]:
        for name in [name for name in names if _is_wrapped(own, name)]:
            parameters.setdefault(own, weights.parameters[name])
    return replace(weights, parameters=parameters)


def _is_new(name: str, weights: ConvertedBackbone, target: Target) -> bool:
    """Return whether a missing parameter is an output norm or not part of a Swin, so that its absence is no error."""
    norm = OUT_NORM.fullmatch(name)
    if norm is None or target.spec.is_classifier:
        return name in target.added and name not in weights.parameters
    return weights.parameters.keys().isdisjoint(f'norm{norm[1]}.{leaf}' for leaf in ('weight', 'bias'))


def _why_left_out(name: str, target: Target, is_classifier: bool) -> str:
    """Return why a model does not need an entry of the checkpoint, or '' for entries that it should have.

    ``is_classifier`` says that the head and the final norm are those of a classifier of a library.
    """
    if target.is_unbuilt(name):
        return 'stages above the last output'
    norm = OUT_NORM.fullmatch(name)
    if norm and not any(own.startswith(f'norm{norm[1]}.') for own in target.names):
        return 'norms of stages that are not returned'
    if name in OF_CLASSIFIER:
        if not is_classifier:
            return OTHER_PARTS
        return 'the classifier' if name in HEAD else "the classifier's final norm"
    return ''


def _by(pair: Sequence[int]) -> str:
    return f'{pair[0]}x{pair[1]}'

"""Load a checkpoint into a backbone or classifier, and the hook with which ``load_state_dict`` does it too."""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor, nn

from swin_dense.archs.published import recognised_preset
from swin_dense.checkpoint.compare import HEAD, Target, check_windows, compare, state_of
from swin_dense.checkpoint.convert import ConvertedBackbone, convert
from swin_dense.checkpoint.families import COORDINATES
from swin_dense.checkpoint.read import Checkpoint, read_checkpoint
from swin_dense.checkpoint.report import Report, log_report
from swin_dense.utils import checks
from swin_dense.utils.checks import first_few
from swin_dense.utils.errors import CheckpointError
from swin_dense.utils.names import unwrapped_module

_logger = logging.getLogger(__package__)
Log = Callable[[Report], Any]
_NO_BACKBONE = (
    'the checkpoint has no backbone weights: no key begins with {prefix!r}. If it is a checkpoint of a backbone or a '
    "classifier, load it into the backbone: with init_cfg=dict(type='Pretrained', checkpoint=...) of the backbone in a "
    'config, or with load_checkpoint(model.backbone, ...). To keep the weights of the backbone, load it inside "with '
    'swin_dense.allow_partial_loading():", or give allow_partial=True (in a config, to the backbone)'
)
_TORCHS_LOAD = nn.Module.load_state_dict.__code__

# Which backbone parameters the hook requires: 'all', 'some', or 'nothing' to skip the hook for converted weights.
_required = contextvars.ContextVar('required', default='all')


def load_checkpoint(
    backbone: nn.Module,
    source: Checkpoint,
    *,
    prefix: str | None = None,
    ema: bool = False,
    allow_partial: bool = False,
    final_norm: bool = False,
    window_size: int | Sequence[int] | None = None,
    trust: bool = False,
    log: Log | None = log_report,
) -> Report:
    """Load the weights of a Swin from a checkpoint of any supported library.

    Either all parameters load, or an error explains the mismatch and the model keeps its weights.

    Args:
        backbone: a SwinBackbone or a SwinClassifier, bare or wrapped for data parallelism or compilation.
        source: a path of a file or of a ``save_pretrained`` folder; the name of published weights, such as
            'swin_t.in1k' (``swin-dense weights`` lists them); an address, which may end in ``#sha256=DIGEST`` to
            verify the file; a state dict; or a whole checkpoint dict.
        prefix: which backbone, if the checkpoint contains several: the prefix of its parameter names, such as
            'teacher.backbone', or a part of it that no other has, such as 'teacher'.
        ema: load the running average that the checkpoint stores in addition to the weights. In files of mmengine's
            EMAHook, the weights already are the average.
        allow_partial: accept parameters that are missing, have wrong shapes or are not part of the model, and windows
            that differ per stage.
        final_norm: use a classifier's final norm as the output norm of the last stage. A SwinClassifier always loads
            its final norm.
        window_size: the window of the checkpoint, side or (height, width) in tokens. Only needed if the window is
            not square and cannot be inferred.
        trust: unpickle everything, also whole models, which can execute arbitrary code.
        log: a function called with the report, such as ``print``, or None. The default logs to
            ``swin_dense.checkpoint``, as a warning if parameters were resized or did not load.

    Returns:
        The report, after it was logged.

    Raises:
        CheckpointError: the checkpoint cannot be read or does not fit. The model keeps its weights.
        FileNotFoundError: the file does not exist.

    Examples:
        >>> from swin_dense import SwinBackbone, export_state_dict
        >>> report = load_checkpoint(SwinBackbone('t'), export_state_dict(SwinBackbone('t'), 'official'))
        >>> report.family, len(report.loaded), report.missing
        ('official', 177, [])
    """
    window = None if window_size is None else checks.pair('window_size', window_size)
    backbone = unwrapped_module(backbone)
    target = Target.of(backbone)
    if target.is_meta:
        raise CheckpointError('the backbone is on the meta device and has no memory; call to_empty(...) first')
    if any(hasattr(parameter, 'device_mesh') for parameter in backbone.parameters()):
        raise CheckpointError('the backbone is sharded over devices; load the checkpoint before fully_shard(...)')
    checkpoint, described = read_checkpoint(source, trust)
    weights = convert(checkpoint, described, prefix, ema, window)
    return load_weights(weights, target, allow_partial, final_norm, log)


def load_weights(
    weights: ConvertedBackbone,
    target: Target,
    allow_partial: bool = False,
    final_norm: bool = False,
    log: Log | None = log_report,
) -> Report:
    """Load converted weights into a model; see :func:`load_checkpoint`."""
    parameters, report = compare(weights, target, allow_partial, final_norm)
    if not report.loaded:
        raise CheckpointError(f'{report.source} ({report.family}): none of its parameters fits the model')
    with _requiring('nothing'):
        target.model.load_state_dict(parameters, strict=False)
    projection = weights.shapes.get('patch_embed.projection.weight')
    preset = None
    if projection is not None:
        family = weights.family
        preset = recognised_preset(family.name, family.network, weights.prefix, weights.described, projection[1])
    target.model.input_preset = preset  # type: ignore[assignment]
    if preset is not None:
        report.notes.append(f'these weights expect normalization={preset!r}, the default for their features')
    if log is not None:
        log(report)
    return report


@contextlib.contextmanager
def allow_partial_loading() -> Iterator[None]:
    """Allow ``load_state_dict`` to load only some of a backbone's parameters, or none.

    Outside this context, ``load_state_dict`` raises an error if backbone parameters are missing. With
    ``strict=False``, torch's method loads a part of the model's own state dict, such as a shard, and a warning names
    what is missing; any other state dict raises the error. Inside the context, a state dict of only a head or of part
    of a backbone of any library loads. In a config, the backbone's option ``allow_partial=True`` does the same.

    Examples:
        >>> from swin_dense import SwinBackbone
        >>> backbone = SwinBackbone('t')
        >>> patch = {name: x for name, x in backbone.state_dict().items() if name.startswith('patch_embed')}
        >>> with allow_partial_loading():
        ...     kept = backbone.load_state_dict(patch, strict=False).missing_keys
        >>> len(kept) + len(patch) == len(backbone.state_dict())
        True
    """
    with _requiring('some'):
        yield


@contextlib.contextmanager
def _requiring(parameters: str) -> Iterator[None]:
    token = _required.set(parameters)
    try:
        yield
    finally:
        _required.reset(token)


def convert_before_load(module: Any, state_dict: MutableMapping[str, Any], prefix: str, *_: Any) -> None:
    """Convert the entries of a backbone in ``state_dict`` in place, before ``load_state_dict`` reads them.

    A hook for ``register_load_state_dict_pre_hook``, which passes the arguments; ``state_dict`` is a copy made for
    this load. PyTorch and mmengine always pass True for ``strict``, so it is ignored; see :func:`_loads_own_part`.
    """
    if _required.get() != 'nothing':
        _convert_in_place(module, state_dict, prefix)
        if f'{prefix}patch_embed.projection.weight' in state_dict:
            module.input_preset = None  # it belonged to the weights before


def _convert_in_place(module: Any, state_dict: MutableMapping[str, Any], prefix: str) -> None:
    partial = _required.get() == 'some' or module.allow_partial
    target = Target.of(module)
    given = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
    described = f'the state dict under {prefix!r}' if prefix else 'the state dict'
    if not _is_to_convert(given, prefix, target, described, partial):
        return
    try:
        fitted, report = compare(convert(given, described), target, partial)
    except CheckpointError as error:
        if not partial:
            raise
        _logger.warning('The state dict is not converted: %s', error)
        return
    for key in given:
        if key not in report.unexpected:
            del state_dict[prefix + key]
    state_dict.update({prefix + name: tensor for name, tensor in fitted.items()})
    if not partial:
        # With strict=True, parameters that the checkpoint cannot have must not count as missing.
        new = {target.names[name] for name in report.new}
        kept = {key: own.detach() for key, own in state_of(module) if key in new and not own.is_meta}
        state_dict.update({prefix + key: own for key, own in kept.items()})
    # A backbone of a framework logs the report in the framework's own log.
    module.log_load(report)


def _is_to_convert(given: Mapping[str, Any], prefix: str, target: Target, described: str, partial: bool) -> bool:
    """Return whether a state dict has other names or shapes than the model; check its own as far as it has them."""
    is_part = not partial and _loads_own_part()
    if not given and partial:
        return False
    if not given and not (prefix and is_part):
        raise CheckpointError(_NO_BACKBONE.format(prefix=prefix) if prefix else 'the state dict is empty')
    parameters = {key: value for key, value in given.items() if not key.endswith(f'.{COORDINATES}')}
    if parameters and parameters.keys() <= {target.names[name] for name in target.added}:
        return False
    is_own = _is_own(parameters, target, is_part)
    if is_own:
        _check_own(given, target, described, partial)
    return not is_own


def _check_own(given: Mapping[str, Any], target: Target, described: str, partial: bool) -> None:
    """Log which parameters a state dict with the names of the model lacks; check the windows of a V2."""
    missing = [name for name, key in target.names.items() if key not in given and name not in target.added]
    if missing:
        level = logging.INFO if {*missing} <= {*HEAD} else logging.WARNING
        text = '%s has %d parameters of the backbone; with strict=False, the others keep their values: %s'
        found = sum(not key.endswith(f'.{COORDINATES}') for key in given)
        _logger.log(level, text, described, found, first_few(missing))
    elif target.spec.network == 'swinv2' and not target.spec.is_classifier and not partial:
        doubts = check_windows(described, convert(given, described), target)
        # A classifier, whose hook was asked before that of its backbone, has the windows of its training.
        for doubt in doubts if not target.spec.clamp_window else ():
            _logger.warning('%s: %s', described, doubt)


def _is_own(given: Mapping[str, Any], target: Target, is_part: bool) -> bool:
    """Return whether a state dict has exactly the module's keys and shapes, or some of them."""
    keys = set(target.names.values())
    if not target.complete or not (given.keys() <= keys if is_part else given.keys() == keys):
        return False
    tensors = {name: given[key] for name, key in target.names.items() if key in given}
    return all(
        isinstance(tensor, Tensor) and target.shapes[name] in (None, tuple(tensor.shape))
        for name, tensor in tensors.items()
    )


def _loads_own_part() -> bool:
    """Return whether torch's ``load_state_dict`` is called with ``strict=False`` and only keys of the model itself.

    Libraries do so for shards, and for the weights that an adapter has trained. torch passes neither to its hooks, so
    this reads the frame.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not _TORCHS_LOAD:
        frame = frame.f_back
    if frame is None or frame.f_locals['strict']:
        return False
    own = {name for name, _ in state_of(frame.f_locals['self'])}
    return bool(own.issuperset(frame.f_locals['state_dict']))

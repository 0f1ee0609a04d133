"""A pre-hook that makes ``load_state_dict`` convert checkpoints of other libraries."""

from __future__ import annotations

import contextlib
import contextvars
import logging
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor, nn

from swin_dense.checkpoint.fit import Options, fit
from swin_dense.checkpoint.report import CheckpointError, Report
from swin_dense.checkpoint.source import flatten, read_source
from swin_dense.checkpoint.target import Target, state_of

_logger = logging.getLogger(__package__)

# Which backbone parameters the hook requires: 'all', 'some', or 'nothing' to skip the hook for converted weights.
_required = contextvars.ContextVar('required', default='all')


@contextlib.contextmanager
def allow_partial_loading() -> Iterator[None]:
    """Allow ``load_state_dict`` to load only some of a backbone's parameters, or none.

    Outside this context, ``load_state_dict`` raises an error if backbone parameters are missing, also with
    ``strict=False``. Inside it, a state dict of only a head or of part of a backbone loads. In a config, the
    backbone's option ``allow_partial=True`` does the same.

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
def loading_converted() -> Iterator[None]:
    """Disable the hook, for weights already converted by :func:`swin_dense.checkpoint.fit.fit`."""
    with _requiring('nothing'):
        yield


@contextlib.contextmanager
def _requiring(parameters: str) -> Iterator[None]:
    token = _required.set(parameters)
    try:
        yield
    finally:
        _required.reset(token)


def convert_before_load(
    module: nn.Module,
    state_dict: MutableMapping[str, Any],
    prefix: str,
    local_metadata: Mapping[str, Any],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Convert the entries of a backbone in ``state_dict`` in place, before ``load_state_dict`` reads them.

    A hook for ``register_load_state_dict_pre_hook``, which passes the arguments; ``state_dict`` is a copy made for
    this load. ``strict`` is ignored: PyTorch and mmengine always pass True to the hook.

    Raises:
        CheckpointError: parameters of the backbone are missing or do not fit. The backbone keeps its weights.
    """
    if _required.get() == 'nothing':
        return
    partial = _required.get() == 'some' or getattr(module, 'allow_partial', False)
    target = Target.of(module)
    given = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
    if _needs_no_conversion(given, target) or (partial and not given):
        return
    if not given:
        raise CheckpointError(_no_keys_message(prefix))
    described = f'the state dict under {prefix!r}' if prefix else 'the state dict'
    try:
        found = read_source(flatten(given), described)
        parameters, report = fit(found, target, Options(allow_partial=partial))
    except CheckpointError as error:
        if not partial:
            raise
        _logger.warning('The state dict is not converted: %s', error)
        return
    for key in given:
        if key not in report.unexpected:
            del state_dict[prefix + key]
    state_dict.update({prefix + name: tensor for name, tensor in parameters.items()})
    if not partial:
        # With strict=True, parameters that the checkpoint cannot have must not count as missing.
        own = dict(state_of(module))
        for key in [target.names[name] for name in report.new]:
            if key in own and not own[key].is_meta:
                state_dict[prefix + key] = own[key].detach()
    # A backbone of a framework logs the report in the framework's own log.
    getattr(module, 'log_load', log_report)(report)


def log_report(report: Report) -> None:
    """Log the report of a load at its level."""
    _logger.log(report.level, '%s', report)


def _needs_no_conversion(given: Mapping[str, Any], target: Target) -> bool:
    """Return whether a state dict has exactly the module's keys and shapes, or only added ones (of an adapter, say)."""
    own = {key: name for name, key in target.names.items()}
    if not given or not given.keys() <= own.keys():
        return False
    if all(own[key] in target.added for key in given):
        return True
    return (
        target.complete
        and len(given) == len(own)
        and all(
            isinstance(tensor, Tensor) and target.shapes[own[key]] in (None, tuple(tensor.shape))
            for key, tensor in given.items()
        )
    )


def _no_keys_message(prefix: str) -> str:
    if not prefix:
        return 'the state dict is empty'
    return (
        f'the checkpoint has no backbone weights: no key begins with {prefix!r}. If it is a checkpoint of a backbone '
        "or a classifier, load it into the backbone: with init_cfg=dict(type='Pretrained', checkpoint=...) of the "
        'backbone in a config, or with load_checkpoint(model.backbone, ...). To keep the weights of the backbone, '
        'load it inside "with swin_dense.allow_partial_loading():", or in a config set allow_partial=True as an '
        'option of the backbone'
    )

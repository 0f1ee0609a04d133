"""Make ``load_state_dict``, of the backbone and of any model around it, understand every checkpoint."""

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

# What the hook demands: 'all' parameters must arrive, or 'some' may; 'nothing' where all is converted already.
_demand = contextvars.ContextVar('demand', default='all')


@contextlib.contextmanager
def allow_partial_loading() -> Iterator[None]:
    """Let ``load_state_dict`` leave parameters of backbones as they are.

    Outside, a ``load_state_dict`` that brings a backbone none or only some of its parameters raises, with
    ``strict=False`` too. Inside, a head alone or half a backbone loads. In a config, the backbone's option
    ``allow_partial=True`` does the same.

    Examples:
        >>> from swin_dense import SwinBackbone
        >>> backbone = SwinBackbone('t')
        >>> patch = {name: x for name, x in backbone.state_dict().items() if name.startswith('patch_embed')}
        >>> with allow_partial_loading():
        ...     kept = backbone.load_state_dict(patch, strict=False).missing_keys
        >>> len(kept) + len(patch) == len(backbone.state_dict())
        True
    """
    with _demanding('some'):
        yield


@contextlib.contextmanager
def loading_converted() -> Iterator[None]:
    """Let ``load_state_dict`` take what :func:`swin_dense.checkpoint.fit.fit` returned as it is."""
    with _demanding('nothing'):
        yield


@contextlib.contextmanager
def _demanding(demand: str) -> Iterator[None]:
    token = _demand.set(demand)
    try:
        yield
    finally:
        _demand.reset(token)


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
    """Convert the entries of a backbone in place, before ``load_state_dict`` reads them.

    A hook for ``register_load_state_dict_pre_hook``, which passes the arguments; ``state_dict`` is the copy that
    belongs to the load. PyTorch and mmengine pass ``strict=True`` always, so it tells nothing.

    Raises:
        CheckpointError: the parameters of the backbone do not arrive. The backbone keeps its weights.
    """
    if _demand.get() == 'nothing':
        return
    partial = _demand.get() == 'some' or getattr(module, 'allow_partial', False)
    target = Target.of(module)
    given = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
    if _needs_no_conversion(given, target) or (partial and not given):
        return
    if not given:
        raise CheckpointError(_nothing_given(prefix))
    described = f'the state dict under {prefix!r}' if prefix else 'the state dict'
    try:
        found = read_source(flatten(given), described)
        parameters, report = fit(found, target, Options(allow_partial=partial))
    except CheckpointError as error:
        if not partial:
            raise
        _logger.warning('Nothing is converted: %s', error)
        return
    for key in given:
        if key not in report.unexpected:
            del state_dict[prefix + key]
    state_dict.update({prefix + name: tensor for name, tensor in parameters.items()})
    if not partial:
        # What the checkpoint cannot have shall not count as missing with strict=True.
        own = dict(state_of(module))
        for key in [target.names[name] for name in report.new]:
            if key in own and not own[key].is_meta:
                state_dict[prefix + key] = own[key].detach()
    # A backbone that belongs to a framework says it in the framework's log.
    getattr(module, 'log_load', log_report)(report)


def log_report(report: Report) -> None:
    """Log what a load did."""
    _logger.log(report.level, '%s', report)


def _needs_no_conversion(given: Mapping[str, Any], target: Target) -> bool:
    """Return whether a state dict has all of the module's own keys, or only such that no Swin has, as of an adapter."""
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


def _nothing_given(prefix: str) -> str:
    if not prefix:
        return 'the state dict is empty'
    return (
        f'the checkpoint holds nothing for the backbone: no key begins with {prefix!r}. If it is a backbone or a '
        "classifier on its own, load it into the backbone: with init_cfg=dict(type='Pretrained', checkpoint=...) of "
        'the backbone in a config, or with load_checkpoint(model.backbone, ...). If it is meant to leave the '
        'backbone alone, load it inside "with swin_dense.allow_partial_loading():", in a config with '
        'allow_partial=True as an option of the backbone'
    )

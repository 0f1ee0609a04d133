"""Load the weights of any Swin into a backbone, or say exactly why not; and write them for others.

Three ways in, one conversion: :func:`load_checkpoint` for files and dicts, and :func:`convert_before_load`, a hook that
makes ``load_state_dict`` of the backbone, and of any model around it, understand the same checkpoints.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor, nn

from swin_dense import checks
from swin_dense.checkpoint.export import export_state_dict
from swin_dense.checkpoint.families import plain_name
from swin_dense.checkpoint.files import read_file
from swin_dense.checkpoint.fit import Options, Target, fit
from swin_dense.checkpoint.report import CheckpointError, Report
from swin_dense.checkpoint.resize import CHANNEL_POLICIES, TABLE_METHODS
from swin_dense.checkpoint.source import flatten, read_source

__all__ = [
    'CheckpointError',
    'Report',
    'allow_partial_loading',
    'convert_before_load',
    'export_state_dict',
    'load_checkpoint',
]

# What the hook does: 'all' parameters must arrive, or 'some' may, or it is 'off' as all is converted already.
_demand = contextvars.ContextVar('demand', default='all')


def load_checkpoint(
    backbone: nn.Module,
    source: str | os.PathLike[str] | Mapping[str, Any],
    *,
    prefix: str | None = None,
    ema: bool = False,
    allow_partial: bool = False,
    final_norm: bool = False,
    table_resize: str = 'bicubic',
    in_channels: str = 'repeat',
    window_size: int | Sequence[int] | None = None,
    trust: bool = False,
    log: Callable[[str], Any] | None = print,
) -> Report:
    """Load the weights of a Swin of any family into a backbone: all of them, or none and an error that says why.

    Args:
        backbone: a SwinBackbone, or one wrapped for data parallelism.
        source: a path, an address, a state dict, or a whole checkpoint dict.
        prefix: where the backbone is in the checkpoint, as in 'teacher.backbone', if it holds several.
        ema: take the running average of the weights that the checkpoint holds beside the weights.
        allow_partial: load what fits and keep the rest, where parameters are missing or have wrong shapes.
        final_norm: give a classifier's final norm to the output of the last stage.
        table_resize: how relative position tables get to another window, 'bicubic' or 'geometric'.
        in_channels: how the patch projection gets to other image channels, 'repeat', 'mean' or 'zero'.
        window_size: the window that the checkpoint was made for, side or (height, width) in tokens; needed only if
            it is not square and the checkpoint does not tell.
        trust: unpickle classes that are not known to be harmless, which can run any code.
        log: takes the text of the report; None for silence.

    Returns:
        The report, which has been logged.

    Raises:
        CheckpointError: the checkpoint cannot be read or does not fit. The backbone keeps its weights.
        FileNotFoundError: there is no such file.
    """
    checks.one_of('table_resize', table_resize, TABLE_METHODS)
    checks.one_of('in_channels', in_channels, CHANNEL_POLICIES)
    window = None if window_size is None else checks.pair('window_size', window_size)
    if isinstance(source, Mapping):
        checkpoint, described = source, 'the given dict'
    else:
        checkpoint, described = read_file(source, trust=trust), os.fspath(source)
    backbone = _unwrap(backbone)
    names, target = _target(backbone)
    options = Options(allow_partial, final_norm, table_resize, in_channels, window)
    try:
        fitted, report = fit(read_source(flatten(checkpoint), target.grid, prefix, ema), target, options, described)
    except CheckpointError as error:
        if str(error).startswith(described):
            raise
        raise CheckpointError(f'{described}: {error}') from None
    if not report.loaded:
        raise CheckpointError(f'{described} ({report.family}): not one parameter fits the model')
    with _demanding('off'):
        backbone.load_state_dict({names[name]: tensor for name, tensor in fitted.items()}, strict=False)
    if log is not None:
        log(str(report))
    return report


@contextlib.contextmanager
def allow_partial_loading() -> Iterator[None]:
    """Let ``load_state_dict`` leave parameters of backbones as they are.

    Outside, a ``load_state_dict`` that brings a backbone none or only some of its parameters raises, with
    ``strict=False`` too. Inside, it is for those who mean it: to load a head alone, an adapter, or half a backbone.
    """
    with _demanding('some'):
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

    A hook for ``register_load_state_dict_pre_hook``; ``state_dict`` is the copy that belongs to the load.

    Raises:
        CheckpointError: the parameters of the backbone do not arrive.
    """
    if _demand.get() == 'off':
        return
    partial = _demand.get() == 'some'
    names, target = _target(module)
    given = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
    if _is_ours(given, names, target) or (partial and not given):
        return
    if not given:
        raise CheckpointError(
            f'the checkpoint holds nothing for the backbone: no key begins with {prefix!r}. If it is a backbone or '
            "classifier of its own, load it into the backbone: init_cfg=dict(type='Pretrained', checkpoint=...) in a "
            'config, or load_checkpoint(model.backbone, ...). To load other parts of the model alone, do so inside '
            '"with allow_partial_loading():"'
        )
    where = f'the state dict under {prefix!r}' if prefix else 'the state dict'
    try:
        fitted, report = fit(read_source(flatten(given), target.grid), target, Options(partial), where)
    except CheckpointError:
        if partial:
            return
        raise
    used = {*report.left_out, *given} - set(report.unexpected)
    for key in used:
        state_dict.pop(prefix + key, None)
    state_dict.update({prefix + names[name]: tensor for name, tensor in fitted.items()})
    if not partial:
        parameters = dict(module.named_parameters(remove_duplicate=False))
        # What such a checkpoint never holds is not missing to load_state_dict either.
        state_dict.update({prefix + names[name]: parameters[name].detach() for name in report.new})
    _announce(report)


def _is_ours(given: Mapping[str, Any], names: Mapping[str, str], target: Target) -> bool:
    """Whether a state dict is exactly that of the backbone, so that there is nothing to do."""
    if given.keys() != set(names.values()):
        return False
    return all(
        isinstance(given[names[name]], Tensor) and shape in (None, tuple(given[names[name]].shape))
        for name, shape in target.shapes.items()
    )


def _target(backbone: nn.Module) -> tuple[dict[str, str], Target]:
    """Return what the backbone calls its parameters, by plain name, and what it expects of them."""
    names, shapes = {}, {}
    for name, parameter in backbone.named_parameters(remove_duplicate=False):
        plain = plain_name(name)
        names[plain] = name
        shapes[plain] = tuple(parameter.shape)
    return names, Target(shapes, backbone.window_size)  # type: ignore[arg-type]


def _unwrap(model: nn.Module) -> nn.Module:
    while not hasattr(model, 'patch_embed') and isinstance(getattr(model, 'module', None), nn.Module):
        model = model.module  # type: ignore[assignment]
    if not hasattr(model, 'patch_embed') or not hasattr(model, 'window_size'):
        raise TypeError(
            f'backbone must be a SwinBackbone, got {type(model).__name__}; '
            'if it is a detector or segmentor, pass its .backbone'
        )
    return model


def _announce(report: Report) -> None:
    """Tell what a hook did: into the log of mmengine where it runs, else to the standard output."""
    if 'mmengine.logging' in sys.modules:
        sys.modules['mmengine.logging'].print_log(str(report), logger='current')
    else:
        print(report)

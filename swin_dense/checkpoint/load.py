"""Load a checkpoint into a model: all of it, or nothing and an error that says why."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from swin_dense.checkpoint.fetch import local_file, shown
from swin_dense.checkpoint.files import read_file
from swin_dense.checkpoint.fit import Options, fit
from swin_dense.checkpoint.hook import loading_converted, log_report
from swin_dense.checkpoint.report import CheckpointError, Report
from swin_dense.checkpoint.source import Source, flatten, read_source
from swin_dense.checkpoint.target import Target
from swin_dense.utils import checks

_STANDARD = Options()
Checkpoint = str | os.PathLike[str] | Mapping[str, Any]


def load_checkpoint(
    backbone: nn.Module,
    source: Checkpoint,
    *,
    prefix: str | None = None,
    ema: bool = False,
    allow_partial: bool = False,
    final_norm: bool = False,
    table_resize: str = 'bicubic',
    in_channels: str = 'repeat',
    window_size: int | Sequence[int] | None = None,
    trust: bool = False,
    log: Callable[[Report], Any] | None = log_report,
) -> Report:
    """Load the weights of a Swin of any family: all of them, or none and an error that says why.

    Args:
        backbone: a SwinBackbone or a SwinClassifier, bare or wrapped for data parallelism or compilation.
        source: a path, of a file or of what ``save_pretrained`` of others wrote; an address, which may end in
            ``#sha256=`` and the digest of the file; a state dict; or a whole checkpoint dict.
        prefix: where the backbone is in the checkpoint if it holds several, as in 'teacher.backbone'; the end of it
            is enough.
        ema: take the running average of the weights that the checkpoint holds beside the weights. Without, the
            weights; in files of mmengine's EMAHook these are the average already.
        allow_partial: accept parameters that are missing, have wrong shapes or have no place in the model.
        final_norm: give a classifier's final norm to the output of the last stage. A SwinClassifier gets it anyway.
        table_resize: how relative position tables get to another window: 'bicubic', or 'geometric', the way of the
            fine-tuning of SimMIM and BEiT.
        in_channels: how the patch projection gets to another number of image channels: 'repeat' takes the channels
            in turn, 'mean' their average, both rescaled so that a grey image keeps its response; 'zero' adds zeros.
        window_size: the window that the checkpoint was made for, side or (height, width) in tokens; needed only if
            it is not square and the checkpoint does not tell.
        trust: unpickle classes that are not known to be harmless, which can run any code.
        log: takes the report, as ``print`` would; None for silence. By default it goes to the logger
            ``swin_dense.checkpoint``, as a warning where parameters were resized or did not arrive.

    Returns:
        The report, which has been logged.

    Raises:
        CheckpointError: the checkpoint cannot be read or does not fit. The model keeps its weights.
        FileNotFoundError: there is no such file.

    Examples:
        >>> from swin_dense import SwinBackbone, export_state_dict
        >>> report = load_checkpoint(SwinBackbone('t'), export_state_dict(SwinBackbone('t'), 'official'))
        >>> report.family, len(report.loaded), report.missing
        ('official', 177, [])
    """
    if prefix is not None and not isinstance(prefix, str):
        raise TypeError(f'prefix must be a string such as "teacher.backbone", got {prefix!r}')
    window = None if window_size is None else checks.pair('window_size', window_size)
    options = Options(allow_partial, final_norm, table_resize, in_channels, window)
    model = _ready(backbone)
    return load_found(model, find_backbone(source, prefix, ema, trust), options, log)


def find_backbone(source: Checkpoint, prefix: str | None = None, ema: bool = False, trust: bool = False) -> Source:
    """Read a checkpoint from anywhere and find the backbone in it; see :func:`load_checkpoint`."""
    if isinstance(source, Mapping):
        return read_source(flatten(source), 'the given dict', prefix, ema)
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(f'a checkpoint must be a path, an address or a dict, got {type(source).__name__}')
    with local_file(source) as path:
        checkpoint = read_file(path, trust)
    return read_source(flatten(checkpoint), shown(source), prefix, ema)


def load_found(
    model: nn.Module, found: Source, options: Options = _STANDARD, log: Callable[[Report], Any] | None = log_report
) -> Report:
    """Load what :func:`find_backbone` found; see :func:`load_checkpoint`."""
    parameters, report = fit(found, Target.of(model), options)
    if not report.loaded:
        raise CheckpointError(f'{report.source} ({report.family}): not one parameter fits the model')
    with loading_converted():
        model.load_state_dict(parameters, strict=False)
    if log is not None:
        log(report)
    return report


def _ready(model: nn.Module) -> nn.Module:
    """Return the module inside data parallelism or compilation, if weights can be copied into it."""
    while not hasattr(model, 'patch_embed') or hasattr(model, '_orig_mod'):
        inner = getattr(model, 'module', getattr(model, '_orig_mod', None))
        if not isinstance(inner, nn.Module):
            break
        model = inner
    Target.of(model)  # refuses other models
    for parameter in model.parameters():
        if parameter.is_meta:
            raise CheckpointError('the backbone is on the meta device and holds no weights; call to_empty(...) first')
        if hasattr(parameter, 'device_mesh'):
            raise CheckpointError('the backbone is sharded over devices; load the checkpoint before fully_shard(...)')
    return model

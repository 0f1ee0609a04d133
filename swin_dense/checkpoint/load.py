"""Load a checkpoint into a backbone or classifier."""

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
    """Load the weights of a Swin from a checkpoint of any supported library.

    Either all parameters load, or an error explains the mismatch and the model keeps its weights.

    Args:
        backbone: a SwinBackbone or a SwinClassifier, bare or wrapped for data parallelism or compilation.
        source: a path of a file or of a ``save_pretrained`` folder; an address, which may end in ``#sha256=DIGEST``
            to verify the file; a state dict; or a whole checkpoint dict.
        prefix: the prefix of the backbone's parameter names, such as 'teacher.backbone', if the checkpoint contains
            several backbones. The end of the prefix is enough.
        ema: load the running average that the checkpoint stores in addition to the weights. In files of mmengine's
            EMAHook, the weights already are the average.
        allow_partial: accept parameters that are missing, have wrong shapes or are not part of the model.
        final_norm: use a classifier's final norm as the output norm of the last stage. A SwinClassifier always loads
            its final norm.
        table_resize: how to resize relative position bias tables to another window: 'bicubic', or 'geometric' as in
            the fine-tuning code of SimMIM and BEiT.
        in_channels: how to adapt the patch projection to another number of image channels: 'repeat' repeats the
            channels in turn and 'mean' repeats their mean, both rescaled so that a grey image keeps its response;
            'zero' initialises further channels to zero.
        window_size: the window of the checkpoint, side or (height, width) in tokens. Only needed if the window is
            not square and cannot be inferred.
        trust: unpickle classes that are not known to be safe, which can execute arbitrary code.
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
    if prefix is not None and not isinstance(prefix, str):
        raise TypeError(f'prefix must be a string such as "teacher.backbone", got {prefix!r}')
    window = None if window_size is None else checks.pair('window_size', window_size)
    options = Options(allow_partial, final_norm, table_resize, in_channels, window)
    model = _unwrap(backbone)
    return load_found(model, find_backbone(source, prefix, ema, trust), options, log)


def find_backbone(source: Checkpoint, prefix: str | None = None, ema: bool = False, trust: bool = False) -> Source:
    """Read a checkpoint from a path, an address or a dict and return its backbone; see :func:`load_checkpoint`."""
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
    """Load the result of :func:`find_backbone` into a model; see :func:`load_checkpoint`."""
    parameters, report = fit(found, Target.of(model), options)
    if not report.loaded:
        raise CheckpointError(f'{report.source} ({report.family}): none of its parameters fits the model')
    with loading_converted():
        model.load_state_dict(parameters, strict=False)
    if log is not None:
        log(report)
    return report


def _unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside wrappers of data parallelism and compilation.

    Raises:
        TypeError: it is not a backbone or a classifier.
        CheckpointError: weights cannot be copied into it.
    """
    while not hasattr(model, 'patch_embed') or hasattr(model, '_orig_mod'):
        inner = getattr(model, 'module', getattr(model, '_orig_mod', None))
        if not isinstance(inner, nn.Module):
            break
        model = inner
    Target.of(model)  # raises a TypeError for other models
    for parameter in model.parameters():
        if parameter.is_meta:
            raise CheckpointError('the backbone is on the meta device and has no memory; call to_empty(...) first')
        if hasattr(parameter, 'device_mesh'):
            raise CheckpointError('the backbone is sharded over devices; load the checkpoint before fully_shard(...)')
    return model

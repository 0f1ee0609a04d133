"""Load a checkpoint into a backbone: all of it, or nothing and an error that says why."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from swin_dense import checks
from swin_dense.checkpoint.fetch import local_file, shown
from swin_dense.checkpoint.files import read_file
from swin_dense.checkpoint.fit import Options, fit
from swin_dense.checkpoint.hook import loading_converted
from swin_dense.checkpoint.report import CheckpointError, Report
from swin_dense.checkpoint.source import Source, flatten, read_source
from swin_dense.checkpoint.target import Target
from swin_dense.windows import Pair

_logger = logging.getLogger(__package__)

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
    log: Callable[[str], Any] | None = _logger.info,
) -> Report:
    """Load the weights of a Swin of any family into a backbone: all of them, or none and an error that says why.

    Args:
        backbone: a SwinBackbone, bare or wrapped for data parallelism or compilation.
        source: a path, of a file or of what ``save_pretrained`` of others wrote; an address, which may end in
            ``#sha256=`` and the digest of the file; a state dict; or a whole checkpoint dict.
        prefix: where the backbone is in the checkpoint if it holds several, as in 'teacher.backbone'; the end of it
            is enough.
        ema: take the running average of the weights that the checkpoint holds beside the weights. Without, the
            weights; in files of mmengine's EMAHook these are the average already.
        allow_partial: accept parameters that are missing, have wrong shapes or have no place in the model.
        final_norm: give a classifier's final norm to the output of the last stage.
        table_resize: how relative position tables get to another window: 'bicubic', or 'geometric', the way of the
            fine-tuning of SimMIM and BEiT.
        in_channels: how the patch projection gets to another number of image channels: 'repeat' takes the channels
            in turn, 'mean' their average, both rescaled so that a grey image keeps its response; 'zero' adds zeros.
        window_size: the window that the checkpoint was made for, side or (height, width) in tokens; needed only if
            it is not square and the checkpoint does not tell.
        trust: unpickle classes that are not known to be harmless, which can run any code.
        log: takes the text of the report, as ``print`` would; None for silence. Without it the text is logged as INFO
            of the logger ``swin_dense.checkpoint``.

    Returns:
        The report, which has been logged.

    Raises:
        CheckpointError: the checkpoint cannot be read or does not fit. The backbone keeps its weights.
        FileNotFoundError: there is no such file.
    """
    if prefix is not None and not isinstance(prefix, str):
        raise TypeError(f'prefix must be a string such as "teacher.backbone", got {prefix!r}')
    backbone = _unwrap(backbone)
    for parameter in backbone.parameters():
        if parameter.is_meta:
            raise CheckpointError('the backbone is on the meta device and holds no weights; call to_empty(...) first')
        if hasattr(parameter, 'device_mesh'):
            raise CheckpointError('the backbone is sharded over devices; load the checkpoint before fully_shard(...)')
    window = None if window_size is None else checks.pair('window_size', window_size)
    options = Options(allow_partial, final_norm, table_resize, in_channels, window)
    target = Target.of(backbone)
    found = find_backbone(source, target.grid, prefix, ema, trust)
    parameters, report = fit(found, target, options)
    if not report.loaded:
        raise CheckpointError(f'{report.source} ({report.family}): not one parameter fits the model')
    with loading_converted():
        backbone.load_state_dict({target.names[name]: tensor for name, tensor in parameters.items()}, strict=False)
    if log is not None:
        log(str(report))
    return report


def find_backbone(source: Checkpoint, grid: Pair | None, prefix: str | None, ema: bool, trust: bool) -> Source:
    """Read a checkpoint from anywhere and find the backbone in it; see :func:`load_checkpoint`."""
    if isinstance(source, Mapping):
        return read_source(flatten(source), 'the given dict', grid, prefix, ema)
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(f'a checkpoint must be a path, an address or a dict, got {type(source).__name__}')
    with local_file(source) as path:
        checkpoint = read_file(path, trust)
    return read_source(flatten(checkpoint), shown(source), grid, prefix, ema)


def _unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside data parallelism or compilation."""
    while not hasattr(model, 'patch_embed') or hasattr(model, '_orig_mod'):
        inner = getattr(model, 'module', getattr(model, '_orig_mod', None))
        if not isinstance(inner, nn.Module):
            break
        model = inner
    return model

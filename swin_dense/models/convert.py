"""Convert the backbone of any Swin checkpoint to the format of another library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from swin_dense.checkpoint import Report
from swin_dense.checkpoint.export import as_checkpoint, export_parameters, write_file
from swin_dense.checkpoint.find import Found
from swin_dense.checkpoint.fit import Options, Target, fit
from swin_dense.checkpoint.load import find_backbone
from swin_dense.models.create import BACKBONES, infer_options
from swin_dense.models.swin import SwinBackbone
from swin_dense.utils import checks


def convert(
    source: str,
    out: Path,
    family: str,
    *,
    options: Mapping[str, Any],
    source_window_size: Sequence[int] | None = None,
    table_resize: str = 'bicubic',
    channel_policy: str = 'repeat',
    prefix: str | None = None,
    ema: bool = False,
    final_norm: bool = False,
    trust: bool = False,
    force: bool = False,
    add_hash: bool = False,
) -> tuple[Path, Report]:
    """Convert a checkpoint, and return the path of the written file and the report.

    Args:
        source: file or address.
        out: file to write, with the suffix .safetensors, or any other for ``torch.save``.
        family: the library; see :func:`swin_dense.export_state_dict`.
        options: options of the backbone to fit the weights to; those that are None are the checkpoint's.
        source_window_size: window of the checkpoint, if it does not store it; for Swin V2 also one side per stage.
        table_resize: see :func:`swin_dense.load_checkpoint`.
        channel_policy: ``in_channels`` of :func:`swin_dense.load_checkpoint`.
        prefix: likewise.
        ema: likewise.
        final_norm: likewise.
        trust: likewise.
        force: replace an existing file.
        add_hash: append digits of the hash of the file to its name.

    Raises:
        CheckpointError: the checkpoint cannot be read, does not determine the backbone, or does not fit.
        OSError: the file cannot be written.
    """
    found = find_backbone(source, prefix, ema, trust)
    given = {name: value for name, value in options.items() if value is not None}
    window = None
    if source_window_size is not None and found.version == 2:
        one_for_all = len(source_window_size) == 1
        trained = source_window_size[0] if one_for_all else source_window_size
        given = {'window_size': max(source_window_size), 'pretrained_window_size': trained, **given}
    elif source_window_size is not None:
        window = checks.pair('source_window_size', source_window_size)
    target = Target.of(_built_for(found, given, window))
    fitting = Options(
        final_norm=final_norm,
        table_resize=table_resize,
        in_channels=channel_policy,
        window_size=window,
    )
    parameters, report = fit(found, target, fitting)
    checkpoint = as_checkpoint(export_parameters(parameters, family, target), family, flat=out.suffix == '.safetensors')
    return write_file(out, checkpoint, force, add_hash), report


def _built_for(found: Found, options: Mapping[str, Any], window: tuple[int, int] | None) -> SwinBackbone:
    """Build the backbone of a checkpoint with this window on the meta device, without memory for weights."""
    of_source = {} if window is None else {'window_size': window}
    inferred = infer_options(found, {**options, **of_source}, any_heads=True)
    with torch.device('meta'):
        return BACKBONES[found.network](**{**inferred, **options})

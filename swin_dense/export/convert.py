"""Convert the backbone of any Swin checkpoint to the format of another library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from swin_dense.checkpoint import CheckpointError, Report
from swin_dense.checkpoint.adapters import adapter_options, base_digest, is_same_base, merge_pairs
from swin_dense.checkpoint.export import as_checkpoint, export_adapter, export_parameters, write_file
from swin_dense.checkpoint.find import Found
from swin_dense.checkpoint.fit import Options, Target, fit
from swin_dense.checkpoint.infer import infer_options
from swin_dense.checkpoint.load import find_backbone, read_checkpoint
from swin_dense.models.create import BACKBONES
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
    adapter_checkpoint: str | None = None,
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
        adapter_checkpoint: file of an adapter that was trained from the checkpoint, to be merged into its weights.
        prefix: likewise.
        ema: likewise.
        final_norm: likewise.
        trust: likewise.
        force: replace an existing file.
        add_hash: append digits of the hash of the file to its name.

    Raises:
        CheckpointError: the checkpoint cannot be read, does not determine the backbone, or does not fit, or it has
            an adapter of Mona, which no other library has.
        OSError: the file cannot be written.
    """
    found = find_backbone(source, prefix, ema, trust)
    if adapter_checkpoint is not None:
        _add_adapter(found, find_backbone(adapter_checkpoint, trust=trust))
    merged = _merge(found)
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
    report.notes += merged
    checkpoint = as_checkpoint(export_parameters(parameters, family, target), family, flat=out.suffix == '.safetensors')
    return write_file(out, checkpoint, force, add_hash), report


def write_adapter(
    source: str,
    out: Path,
    *,
    prefix: str | None = None,
    trust: bool = False,
    force: bool = False,
    add_hash: bool = False,
) -> Path:
    """Write a checkpoint without the base of its backbone, see :func:`swin_dense.save_adapter`, and return the path.

    The checkpoint is one of a backbone or of a whole model, such as those that ``swin-dense train`` writes.

    Raises:
        CheckpointError: the checkpoint cannot be read, or has no backbone with an adapter.
        OSError: the file cannot be written.
    """
    checkpoint, described = read_checkpoint(source, trust)
    state: dict[str, Any] = export_adapter(checkpoint.get('state_dict', checkpoint), described, prefix)
    if out.suffix != '.safetensors' and 'state_dict' in checkpoint:
        # The names of the classes, with which mmdet and mmseg describe predictions.
        facts = (checkpoint.get('meta') or {}).get('dataset_meta')
        state = {'meta': {} if facts is None else {'dataset_meta': facts}, 'state_dict': state}
    return write_file(out, state, force, add_hash)


def _add_adapter(found: Found, adapter: Found) -> None:
    """Add the parameters of an adapter to those of its base."""
    if adapter.base is None:
        raise CheckpointError(f'{adapter.described} is not an adapter alone; convert it as a checkpoint')
    if not is_same_base(adapter.base, base_digest(found.parameters)):
        raise CheckpointError(
            f'{adapter.described} has an adapter for a base with other weights than those of {found.described}'
        )
    found.parameters.update(adapter.parameters)
    found.keys.update(adapter.keys)


def _merge(found: Found) -> list[str]:
    """Merge LoRA into the weights of a checkpoint, and return notes on it."""
    options = adapter_options(found.shapes)
    if options is None or found.base is not None:
        return []
    if options['type'] != 'lora':
        raise CheckpointError(
            f'{found.described} has the adapter {options}, whose convolutions no other library has and no weight can '
            'hold; use create_backbone and swin-dense export, which support it'
        )
    found.parameters = merge_pairs(found.parameters)
    found.keys = {name: keys for name, keys in found.keys.items() if name in found.parameters}
    return [f'the adapter {options} was merged into the weights']


def _built_for(found: Found, options: Mapping[str, Any], window: tuple[int, int] | None) -> SwinBackbone:
    """Build the backbone of a checkpoint with this window on the meta device, without memory for weights."""
    of_source = {} if window is None else {'window_size': window}
    inferred = infer_options(found, {**options, **of_source}, any_heads=True)
    with torch.device('meta'):
        return BACKBONES[found.network](**{**inferred, **options})

"""Find the backbone in a checkpoint and convert it to our names and layouts."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from swin_dense.checkpoint import v2
from swin_dense.checkpoint.families import EXPORTED, OFFICIAL, OFFICIAL_V2, find_backbones, resolve_family
from swin_dense.checkpoint.names import MMDET, Family, Name, plain_name
from swin_dense.checkpoint.report import CheckpointError, listed
from swin_dense.checkpoint.resize import window_of_index
from swin_dense.ops.windows import Pair

# Name components that mark a running average of the weights.
_AVERAGES = {'ema', 'ema_state_dict', 'model_ema', 'state_dict_ema', 'ema_model', 'module_ema'}
# The momentum encoder of contrastive pretraining, which is not used for dense prediction.
_MOMENTUM_BRANCHES = {'encoder_k'}
# Entries under the backbone's prefix that are not backbone parameters, and the reason to skip them.
_LEFT_OUT = {
    re.compile(r'.*(relative_position_index|relative_coords_table|attn_mask)'): 'buffers that are computed here',
    re.compile(r'(head|classifier|fc)\..*'): 'the classifier',
    re.compile(r'(.*\.)?mask_token'): 'mask token of the pretraining',
    re.compile(r'decoder\..*'): 'decoder of the pretraining',
}

_HEAD = re.compile(r'(.*?)(?:head\.fc|head|classifier)\.(weight|bias)')
_MAX_DEPTH = 32  # of nested dicts


@dataclass
class Source:
    """The backbone in a checkpoint.

    Attributes:
        described: the name of the checkpoint in messages.
        family: the name of the library in reports.
        prefix: the prefix of the backbone's keys in the checkpoint.
        parameters: maps our parameter names to tensors in our layout. Entries that no Swin has keep their names.
        keys: maps our parameter names to their keys in the checkpoint; includes parameters with missing parts.
        grid: (H, W) of the absolute position embedding, or None if the checkpoint does not determine it.
        windows: maps our names of relative position tables, or of V2's ``logit_scale``, to windows that the
            checkpoint determines.
        version: the version of Swin, 1 or 2.
        trained_windows: maps stages to the window with which V2's position networks were trained, if known.
        head: 'weight' and 'bias' of the classifier on the backbone, or empty.
        head_keys: maps 'weight' and 'bias' to the keys of the head in the checkpoint.
        left_out: maps keys that are skipped on purpose to the reason.
        stems: the common beginnings of the names in stages and of the output norms.
    """

    described: str
    family: str
    prefix: str
    parameters: dict[str, Tensor] = field(default_factory=dict)
    keys: dict[str, list[str]] = field(default_factory=dict)
    grid: Pair | None = None
    windows: dict[str, Pair] = field(default_factory=dict)
    version: int = 1
    trained_windows: dict[int, Pair] = field(default_factory=dict)
    head: dict[str, Tensor] = field(default_factory=dict)
    head_keys: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    stems: tuple[str, ...] = ()

    @property
    def network(self) -> str:
        """The beginning of model names: 'swin' or 'swinv2'."""
        return 'swin' if self.version == 1 else 'swinv2'


def flatten(checkpoint: Mapping[Any, Any]) -> dict[str, Tensor]:
    """Return all tensors in nested dicts by dotted name, so that keys of containers become prefixes.

    Cycles, ``optimizer`` states and dicts nested deeper than 32 levels are skipped.
    """
    tensors: dict[str, Tensor] = {}
    # A stack instead of recursion, because a file may nest deeper than the recursion limit. Items are pushed in
    # reverse to keep the order of the file.
    pending: list[tuple[str, Any, frozenset[int]]] = [('', checkpoint, frozenset())]
    while pending:
        name, value, around = pending.pop()
        if isinstance(value, nn.Module):
            value = value.state_dict()
        if isinstance(value, np.ndarray) and value.dtype.kind in 'fi' and value.dtype.itemsize <= 8:
            value = torch.from_numpy(np.ascontiguousarray(value, value.dtype.newbyteorder('=')))
        if isinstance(value, Tensor):
            tensors[name] = value.detach()
        elif isinstance(value, Mapping) and id(value) not in around and len(around) < _MAX_DEPTH:
            prefix = f'{name}.' if around else ''
            pending += [
                (f'{prefix}{key}', item, around | {id(value)})
                for key, item in reversed(list(value.items()))
                if isinstance(item, (Tensor, np.ndarray, nn.Module)) or (isinstance(key, str) and key != 'optimizer')
            ]
    return tensors


def read_source(tensors: Mapping[str, Tensor], described: str, prefix: str | None = None, ema: bool = False) -> Source:
    """Find the backbone among the tensors of a checkpoint.

    Args:
        tensors: maps dotted names to tensors.
        described: the name of the checkpoint in messages.
        prefix: the prefix of the backbone's keys, or the end of that prefix; None to detect it.
        ema: use the running average of the weights instead of the weights.

    Raises:
        CheckpointError: the checkpoint has no Swin backbone, or several.
    """
    plain_names = {key: plain_name(key) for key in tensors}
    # mmengine's EMAHook saves the average as state_dict and the current weights as ema_state_dict.
    ema = ema and 'ema_state_dict.steps' not in tensors
    try:
        spelling, prefix = _choose(plain_names.values(), prefix, ema)
    except CheckpointError as error:
        raise CheckpointError(f'{described}: {error}') from None
    family = resolve_family(spelling, prefix, plain_names.values())
    label = _label(family, prefix, plain_names.values())
    source = Source(described, label, prefix, version=family.version, stems=family.stems)
    parts: dict[Name, dict[int, str]] = {}
    for key, plain in plain_names.items():
        if not plain.startswith(prefix):
            source.left_out[key] = 'other parts of the model'
            continue
        plain = plain.removeprefix(prefix)
        name = family.read(plain)
        reason = next((reason for pattern, reason in _LEFT_OUT.items() if pattern.fullmatch(plain)), None)
        if name is not None:
            found = parts.setdefault(dataclasses.replace(name, part=0), {})
            if name.part in found:
                raise CheckpointError(f'{described}: {found[name.part]} and {key} are the same parameter')
            found[name.part] = key
        elif reason is not None:
            source.left_out[key] = reason
        else:
            source.parameters[plain], source.keys[plain] = tensors[key], [key]
    for name, found in parts.items():
        source.keys[name.ours] = keys = [found[part] for part in sorted(found)]
        # Only concatenate parts of the same shape and kind; integers among floats are not weights.
        kinds = {(tensors[key].shape, tensors[key].is_floating_point()) for key in keys}
        if len(found) == len(family.write(name)) and len(kinds) == 1:
            source.parameters[name.ours] = family.decode(name, [tensors[key] for key in keys])
        if name.role == 'position' and tensors[keys[0]].ndim == 4:
            source.grid = (tensors[keys[0]].shape[2], tensors[keys[0]].shape[3])
        index = tensors.get(keys[0].replace('relative_position_bias_table', 'relative_position_index'))
        if name.role == 'table' and index is not None:
            window = window_of_index(index, tensors[keys[0]].shape[:1].numel())
            if window is not None:
                source.windows[name.ours] = window
        coordinates = tensors.get(keys[0].replace('logit_scale', v2.COORDINATES))
        if name.role == 'logit_scale' and coordinates is not None and coordinates.ndim == 4 and not coordinates.is_meta:
            source.windows[name.ours] = v2.window_of(coordinates)
            trained = v2.trained_window(coordinates)
            if trained is not None:
                source.trained_windows[name.stage or 0] = trained
    _find_head(source, plain_names, tensors)
    if family.joined_bias:
        v2.split_biases(source.parameters, source.keys)
    return source


def _find_head(source: Source, plain_names: Mapping[str, str], tensors: Mapping[str, Tensor]) -> None:
    """Store the classifier's linear layer in ``source``. It is a sibling of the stages or of the backbone."""
    parents = {source.prefix, source.prefix.rstrip('.').rpartition('.')[0] + '.' if '.' in source.prefix[:-1] else ''}
    for key, plain in plain_names.items():
        match = _HEAD.fullmatch(plain)
        if match is not None and match[1] in parents:
            source.head[match[2]] = tensors[key]
            source.head_keys[match[2]] = key


def _choose(keys: Collection[str], prefix: str | None, ema: bool) -> tuple[Family, str]:
    found = find_backbones(keys)
    if not found:
        known = ', '.join(EXPORTED)
        raise CheckpointError(
            f'no parameters of a Swin Transformer were found; the checkpoint contains {listed(keys) or "no tensors"}. '
            f'Supported families: {known}'
        )
    if prefix is not None:
        wanted = plain_name(f'{prefix.rstrip(".")}.') if prefix else ''
        chosen = {
            choice: count
            for choice, count in found.items()
            if choice[1] == wanted or (wanted and choice[1].endswith(f'.{wanted}'))
        }
        if not chosen:
            raise CheckpointError(f'no backbone under prefix={prefix!r}, only under {_prefixes(found)}')
    else:
        chosen = {
            choice: count
            for choice, count in found.items()
            if _is_average(choice[1]) == ema and not _MOMENTUM_BRANCHES & set(choice[1].split('.'))
        }
        if not chosen and ema:
            raise CheckpointError('the checkpoint contains no running average of the weights; omit ema=True')
        if not chosen:
            raise CheckpointError(
                f'the checkpoint contains only running averages, under {_prefixes(found)}; load them with ema=True'
            )
    most = max(chosen.values())
    # A few unrelated keys may match a backbone's names; two actual backbones have similar numbers of parameters.
    rivals = [choice for choice, count in chosen.items() if 2 * count > most]
    if len(rivals) > 1:
        raise CheckpointError(
            f'the checkpoint contains several backbones, under {_prefixes(rivals)}; choose one with prefix=...'
        )
    return rivals[0]


def _prefixes(choices: Any) -> str:
    return ', '.join(sorted({repr(prefix) for _, prefix in choices}))


def _is_average(prefix: str) -> bool:
    return bool(_AVERAGES & set(prefix.split('.')))


def _label(family: Family, prefix: str, keys: Collection[str]) -> str:
    """Return the name of the library; other keys of the checkpoint distinguish libraries with the same names."""
    components = {component for key in keys for component in key.split('.')}
    if family in (OFFICIAL, OFFICIAL_V2) and prefix.endswith('encoder.'):
        if _MOMENTUM_BRANCHES & components:
            return 'moby'
        if 'mask_token' in components:
            return 'simmim'
    if family is MMDET:
        if 'decode_head' in components:
            return 'mmseg'
        if any(key.endswith('head.fc.weight') for key in keys):
            return 'mmpretrain'
    return family.name

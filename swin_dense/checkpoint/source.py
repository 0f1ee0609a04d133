"""Find the backbone in whatever a checkpoint holds, and bring it into our names and layouts."""

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
from swin_dense.checkpoint.families import EXPORTED, OFFICIAL, OFFICIAL_V2, find_backbones, settle
from swin_dense.checkpoint.names import MMDET, Family, Name, plain_name
from swin_dense.checkpoint.report import CheckpointError, listed
from swin_dense.checkpoint.resize import window_of_index
from swin_dense.ops.windows import Pair

# Components of names that mark a running average of the weights.
_AVERAGES = {'ema', 'ema_state_dict', 'model_ema', 'state_dict_ema', 'ema_model', 'module_ema'}
# The second, slowly moving encoder of contrastive pretraining; dense prediction has no use for it.
_MOMENTUM_BRANCHES = {'encoder_k'}
# Entries under the backbone's prefix that are not its parameters, with the reason to leave them out.
_LEFT_OUT = {
    re.compile(r'.*(relative_position_index|relative_coords_table|attn_mask)'): 'buffers that are computed here',
    re.compile(r'(head|classifier|fc)\..*'): 'the classifier',
    re.compile(r'(.*\.)?mask_token'): 'mask token of the pretraining',
    re.compile(r'decoder\..*'): 'decoder of the pretraining',
}

_HEAD = re.compile(r'(.*?)(?:head\.fc|head|classifier)\.(weight|bias)')
_DEEPEST = 32  # dicts in dicts


@dataclass
class Source:
    """The backbone in a checkpoint.

    Attributes:
        described: what messages call the checkpoint.
        family: what reports call the code base whose names it has.
        prefix: what stands before its names.
        parameters: our name to the tensor in our layout; of entries that no Swin has, their name to the tensor.
        keys: the same names to the keys of the checkpoint that hold them, all of them or only some.
        grid: (H, W) of the absolute position embedding, where the checkpoint tells.
        windows: our name of a relative position table, or of V2's scale, to its window, where the checkpoint tells.
        version: of Swin, 1 or 2.
        trained_windows: stage to the window that V2's position networks were trained with, where the checkpoint tells.
        head: 'weight' and 'bias' of the classifier on the backbone, where there is one.
        head_keys: the same to the keys of the checkpoint that hold them.
        left_out: keys left out on purpose, with the reason.
        stems: what the names of everything in a stage and of the output norms begin with.
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
        """What names of models begin with: 'swin' or 'swinv2'."""
        return 'swin' if self.version == 1 else 'swinv2'


def flatten(checkpoint: Mapping[Any, Any]) -> dict[str, Tensor]:
    """Return all tensors in nested dicts by dotted name, so that containers look like prefixes.

    A dict that holds itself brings nothing new there, nor does what is nested deeper than any training code nests.
    """
    tensors: dict[str, Tensor] = {}
    # Not by recursion, which a file could exhaust; the last is the next, so that the order is that of the file.
    pending: list[tuple[str, Any, frozenset[int]]] = [('', checkpoint, frozenset())]
    while pending:
        name, value, around = pending.pop()
        if isinstance(value, nn.Module):
            value = value.state_dict()
        if isinstance(value, np.ndarray) and value.dtype.kind in 'fi' and value.dtype.itemsize <= 8:
            value = torch.from_numpy(np.ascontiguousarray(value, value.dtype.newbyteorder('=')))
        if isinstance(value, Tensor):
            tensors[name] = value.detach()
        elif isinstance(value, Mapping) and id(value) not in around and len(around) < _DEEPEST:
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
        tensors: dotted name to tensor.
        described: what messages call the checkpoint.
        prefix: what stands before the backbone's names, or the end of it; None finds out.
        ema: take the running average of the weights instead of the weights.

    Raises:
        CheckpointError: there is no Swin backbone, or there are several.
    """
    plain_names = {key: plain_name(key) for key in tensors}
    # mmengine swaps the two when it saves: its state_dict is the average, its ema_state_dict the last weights.
    ema = ema and 'ema_state_dict.steps' not in tensors
    try:
        spelling, prefix = _choose(plain_names.values(), prefix, ema)
    except CheckpointError as error:
        raise CheckpointError(f'{described}: {error}') from None
    family = settle(spelling, prefix, plain_names.values())
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
                raise CheckpointError(f'{described}: {found[name.part]} and {key} are two names of one parameter')
            found[name.part] = key
        elif reason is not None:
            source.left_out[key] = reason
        else:
            source.parameters[plain], source.keys[plain] = tensors[key], [key]
    for name, found in parts.items():
        source.keys[name.ours] = keys = [found[part] for part in sorted(found)]
        # Parts that are joined must be alike; integers beside floats are not weights.
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
    """Note the classifier's linear layer, which is found beside the stages, or beside the backbone as a whole."""
    beside = {source.prefix, source.prefix.rstrip('.').rpartition('.')[0] + '.' if '.' in source.prefix[:-1] else ''}
    for key, plain in plain_names.items():
        match = _HEAD.fullmatch(plain)
        if match is not None and match[1] in beside:
            source.head[match[2]] = tensors[key]
            source.head_keys[match[2]] = key


def _choose(keys: Collection[str], prefix: str | None, ema: bool) -> tuple[Family, str]:
    found = find_backbones(keys)
    if not found:
        known = ', '.join(EXPORTED)
        raise CheckpointError(
            f'no parameters of a Swin Transformer were found; the checkpoint holds {listed(keys) or "no tensors"}. '
            f'Families that are understood: {known}'
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
            raise CheckpointError('the checkpoint holds no running average of the weights; leave out ema=True')
        if not chosen:
            raise CheckpointError(f'there are only running averages, under {_prefixes(found)}; ema=True loads them')
    most = max(chosen.values())
    # A stray name may look like a backbone; two real ones have about as many parameters.
    rivals = [choice for choice, count in chosen.items() if 2 * count > most]
    if len(rivals) > 1:
        raise CheckpointError(
            f'the checkpoint holds several backbones, under {_prefixes(rivals)}; choose one with prefix=...'
        )
    return rivals[0]


def _prefixes(choices: Any) -> str:
    return ', '.join(sorted({repr(prefix) for _, prefix in choices}))


def _is_average(prefix: str) -> bool:
    return bool(_AVERAGES & set(prefix.split('.')))


def _label(family: Family, prefix: str, keys: Collection[str]) -> str:
    """Return what to call the code base, which the neighbours of the backbone tell where its own names do not."""
    beside = {component for key in keys for component in key.split('.')}
    if family in (OFFICIAL, OFFICIAL_V2) and prefix.endswith('encoder.'):
        if _MOMENTUM_BRANCHES & beside:
            return 'moby'
        if 'mask_token' in beside:
            return 'simmim'
    if family is MMDET:
        if 'decode_head' in beside:
            return 'mmseg'
        if any(key.endswith('head.fc.weight') for key in keys):
            return 'mmpretrain'
    return family.name

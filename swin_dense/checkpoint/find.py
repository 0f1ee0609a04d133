"""Find the backbone in a checkpoint, and convert it to our names and layouts."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from swin_dense.archs.shapes import square_grid, square_window
from swin_dense.checkpoint.families import (
    COORDINATES,
    WINDOWS,
    Candidate,
    Family,
    Name,
    find_backbones,
    plain_name,
    resolve_family,
)
from swin_dense.checkpoint.report import CheckpointError, listed
from swin_dense.checkpoint.resize import trained_window, window_of_coordinates, window_of_index
from swin_dense.checkpoint.unpickler import StandIn
from swin_dense.ops.windows import Pair
from swin_dense.utils.choices import FAMILIES

Value = Tensor | StandIn

# Name components that mark a running average of the weights.
_AVERAGES = {'ema', 'ema_state_dict', 'model_ema', 'state_dict_ema', 'ema_model', 'module_ema'}
FIRST_SCALE = 'stages.0.blocks.0.attn.w_msa.logit_scale'
# The momentum encoder of contrastive pretraining, which is not used for dense prediction.
_MOMENTUM_BRANCHES = {'encoder_k'}
# Entries under the backbone's prefix that are not backbone parameters, and the reason to skip them.
_LEFT_OUT = {
    re.compile(r'.*(relative_position_index|relative_coords_table|attn_mask)'): 'buffers that are computed here',
    re.compile(r'(head|classifier|fc)\..*'): 'the classifier',
    re.compile(r'(.*\.)?mask_token'): 'mask token of the pretraining',
    re.compile(r'decoder\..*'): 'decoder of the pretraining',
}
# Entries that distinguish libraries with the same names: the library, the end of the backbone's prefix, the beginning
# of an entry beside the backbone, and the label of the family.
_LABELS = (
    ('official', 'encoder.', 'encoder_k.', 'moby'),
    ('official', 'encoder.', 'encoder.mask_token', 'simmim'),
    ('mmdet', '', 'decode_head.', 'mmseg'),
    ('mmdet', '', 'head.fc.weight', 'mmpretrain'),
)
_HEAD = re.compile(r'(.*?)(?:head\.fc|head|classifier)\.(weight|bias)')
OUT_NORM = re.compile(r'norm(\d{1,3})\.(weight|bias)')
_MAX_DEPTH = 32  # of nested dicts
_LONGEST_NAME = 1000  # characters of a dotted name, which is cut here; the same text can be in many names
_MAX_VISITS = 8  # of one dict under several names; a small file can contain a dict in any number of dicts


@dataclass
class Found:
    """The backbone in a checkpoint. Entries that no Swin has keep their names; all others have ours."""

    described: str  # the name of the checkpoint in messages
    family: str  # the name of the library in reports
    prefix: str  # of the backbone's keys in the checkpoint
    version: int  # of Swin, 1 or 2
    stems: tuple[str, ...]  # the common beginnings of the names in stages and of the output norms
    parameters: dict[str, Tensor] = field(default_factory=dict)  # in our layout
    keys: dict[str, list[str]] = field(default_factory=dict)  # in the checkpoint, also of parameters with missing parts
    unusable: dict[str, str] = field(default_factory=dict)  # what those are that are not dense tensors with values
    # The windows of relative position tables and of V2's logit_scale, and the grid (H, W) of the absolute position
    # embedding, if the checkpoint has more than their number of rows.
    sizes: dict[str, Pair] = field(default_factory=dict)
    windows: list[Pair] = field(default_factory=list)  # per stage, if our own V2 recorded them
    # By stage, the window with which V2's position networks were trained, if known.
    trained_windows: dict[int, Pair] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)  # why keys are skipped on purpose

    @property
    def network(self) -> str:
        return 'swin' if self.version == 1 else 'swinv2'

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.parameters.items()}

    @property
    def outputs(self) -> tuple[int, ...]:
        """The stages with an output norm."""
        stages = {int(match[1]) for match in map(OUT_NORM.fullmatch, self.parameters) if match}
        return tuple(sorted(stages))

    def size_of(self, name: str) -> Pair | None:
        """Return the window or grid of a parameter: if only the number of its rows is known, a square one."""
        shape = self.parameters[name].shape if name in self.parameters else ()
        if name in self.sizes:
            return self.sizes[name]
        if is_table(name) and len(shape) == 2:
            return square_window(shape[0])
        if name == 'absolute_pos_embed' and len(shape) == 3:
            return square_grid(shape[1])
        return None


def flatten(checkpoint: Mapping[Any, Any]) -> dict[str, Value]:
    """Return all tensors and stand-ins in nested dicts by dotted name, so that keys of containers become prefixes.

    Cycles, ``optimizer`` states, dicts nested too deep, and a dict that is in too many places are skipped.
    """
    return dict(_values('', checkpoint, (), Counter()))


def _values(name: str, value: Any, around: tuple[int, ...], visits: Counter[int]) -> Iterator[tuple[str, Value]]:
    identity = id(value)
    if isinstance(value, nn.Module):
        value = value.state_dict()
    if isinstance(value, np.ndarray) and value.dtype.kind in 'fi' and value.dtype.itemsize <= 8:
        value = torch.from_numpy(np.require(value, value.dtype.newbyteorder('='), ('C', 'W')))
    if isinstance(value, (Tensor, StandIn)):
        yield name, value.detach() if isinstance(value, Tensor) else value
    if isinstance(value, Mapping) and identity not in around and len(around) < _MAX_DEPTH:
        visits[identity] += 1
        if visits[identity] <= _MAX_VISITS:
            yield from _recorded_windows(f'{name}.' if around else '', value)
        for key, item in value.items() if visits[identity] <= _MAX_VISITS else ():
            is_tensor = isinstance(item, (Tensor, np.ndarray, nn.Module))
            if (isinstance(key, str) and key != 'optimizer') or (isinstance(key, int) and is_tensor):
                inner = f'{name}.{key}' if around else str(key)
                yield from _values(inner[:_LONGEST_NAME], item, (*around, identity), visits)


def windows_in(metadata: Any) -> Tensor | None:
    """Return the windows (2 * stages, 2) that a Swin V2 recorded in the metadata of its state dict, or None."""
    windows = metadata.get(WINDOWS) if isinstance(metadata, Mapping) else None
    if not isinstance(windows, (list, tuple)):
        return None
    sides = [side for window in windows if isinstance(window, (list, tuple)) and len(window) == 2 for side in window]
    are_sides = all(isinstance(side, int) and 1 < side < 1 << 16 for side in sides)
    is_valid = are_sides and len(sides) == 2 * len(windows) > 0 and len(windows) % 2 == 0
    return torch.tensor(sides).view(-1, 2) if is_valid else None


def trained_and_own(windows: Tensor) -> tuple[list[Pair], list[Pair]]:
    """Split recorded windows into those with which each stage was trained, and its own."""
    trained, own = windows.chunk(2)
    return list(map(tuple, trained.tolist())), list(map(tuple, own.tolist()))


def _recorded_windows(inside: str, state_dict: Mapping[Any, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the windows of each module in the metadata of a state dict, as if they were a tensor of the module."""
    metadata = getattr(state_dict, '_metadata', None)
    for module, recorded in metadata.items() if isinstance(metadata, dict) else ():
        windows = windows_in(recorded)
        if windows is not None and isinstance(module, str) and len(inside) + len(module) <= _LONGEST_NAME:
            yield f'{inside}{module}.{WINDOWS}' if module else f'{inside}{WINDOWS}', windows


def find(values: Mapping[str, Value], described: str, prefix: str | None = None, ema: bool = False) -> Found:
    """Find the backbone in the result of :func:`flatten`, and convert it; see :func:`load_checkpoint`."""
    plain_names = {key: plain_name(key) for key in values}
    # mmengine's EMAHook saves the average as state_dict and the current weights as ema_state_dict.
    ema = ema and 'ema_state_dict.steps' not in values
    candidates = find_backbones(plain_names.values())
    if not candidates:
        raise _none_found(values, described)
    scheme, prefix = _choose(candidates, described, prefix, ema)
    family = resolve_family(scheme, prefix, plain_names.values())
    label = family.name
    for library, end, beside, special in _LABELS:
        start = _around(prefix) + beside
        may_be = family.name == library and prefix.endswith(end)
        if may_be and any(plain.startswith(start) for plain in plain_names.values()):
            label = special
            break
    found = Found(described, label, prefix, family.version, family.stems)
    parts: dict[Name, dict[int, str]] = {}
    for key, plain in plain_names.items():
        if plain == f'{prefix}{WINDOWS}':
            trained, found.windows = trained_and_own(cast('Tensor', values[key]))
            found.trained_windows = dict(enumerate(trained))
            continue
        name = family.read(plain.removeprefix(prefix)) if plain.startswith(prefix) else None
        if name is not None:
            keys = parts.setdefault(dataclasses.replace(name, part=0), {})
            if name.part in keys:
                raise CheckpointError(f'{described}: {keys[name.part]} and {key} are the same parameter')
            keys[name.part] = key
        elif isinstance(values[key], Tensor):
            _keep_other(key, plain, values, family, found)
    for name, keys in parts.items():
        _convert(name, [keys[part] for part in sorted(keys)], values, family, found)
    if family.joined_bias:  # into a query and a value bias; the key bias has no effect and is dropped
        for joined in [ours for ours in found.parameters if ours.endswith('.attn.w_msa.qkv.bias')]:
            q_bias, _, v_bias = found.parameters.pop(joined).chunk(3)
            stem = joined.removesuffix('qkv.bias')
            found.parameters.update({f'{stem}q_bias': q_bias, f'{stem}v_bias': v_bias})
            found.keys[f'{stem}q_bias'] = found.keys[f'{stem}v_bias'] = found.keys.pop(joined)
    return found


def _convert(name: Name, keys: list[str], values: Mapping[str, Any], family: Family, found: Found) -> None:
    """Store a parameter of a Swin in ``found``."""
    parts = [values[key] for key in keys]
    why = next(filter(None, map(_why_unusable, parts)), '')
    # Integers among floats are not weights.
    if not why and len({(part.shape, part.is_floating_point(), part.device) for part in parts}) > 1:
        why = 'in parts of different shapes, types or devices'
    found.keys[name.ours] = keys
    if why:
        found.unusable[name.ours] = why
    elif len(parts) == len(family.templates(name.role)):
        found.parameters[name.ours] = family.decode(name, parts)
        if name.role == 'position' and parts[0].ndim == 4:
            found.sizes[name.ours] = (parts[0].shape[2], parts[0].shape[3])


def _keep_other(key: str, plain: str, values: Mapping[str, Any], family: Family, found: Found) -> None:
    """Store a tensor that is no parameter of a Swin: a classifier's head, a part to leave out, or one to report."""
    head = _HEAD.fullmatch(plain)
    why = _why_unusable(values[key])
    name = plain.removeprefix(found.prefix)
    # The head is a sibling of the stages or of the backbone.
    if head is not None and not why and head[1] in (found.prefix, _around(found.prefix)):
        name = f'head.{head[2]}'
    elif not plain.startswith(found.prefix):
        found.left_out[key] = 'other parts of the model'
        return
    elif reason := next((reason for pattern, reason in _LEFT_OUT.items() if pattern.fullmatch(name)), None):
        found.left_out[key] = reason
        if not why:
            _read_window(key, values, family, found)
        return
    found.keys[name] = [key]
    if why:
        found.unusable[name] = why
    else:
        found.parameters[name] = values[key]


def _read_window(key: str, values: Mapping[str, Any], family: Family, found: Found) -> None:
    """Store the window that a buffer determines, if it is one of those, by the name of the parameter beside it."""
    beside = key.replace('relative_position_index', 'relative_position_bias_table').replace(COORDINATES, 'logit_scale')
    name = family.read(plain_name(beside).removeprefix(found.prefix))
    if name is None or beside not in values or _why_unusable(values[beside]) or values[key].is_meta:
        return
    if name.role == 'table':
        window = window_of_index(values[key], values[beside].shape[:1].numel())
    else:
        window = window_of_coordinates(values[key]) if values[key].ndim == 4 else None
        trained = None if window is None else trained_window(values[key])
        if trained is not None:
            found.trained_windows[name.stage] = trained
    if window is not None:
        found.sizes[name.ours] = window


def _why_unusable(value: Value) -> str:
    """Return why a value cannot be copied into a parameter, or an empty string."""
    if isinstance(value, StandIn):
        return f'stored as {value.kind}, not as a dense tensor'
    if hasattr(value, 'device_mesh'):
        return 'a DTensor, which is sharded over devices; gather it with full_tensor()'
    if value.is_nested or value.layout != torch.strided:
        return 'not a dense tensor; store it with to_dense()'
    if value.is_quantized:
        return 'quantised; store it with dequantize()'
    if value.numel() == 0:
        return 'empty, as in a shard of DeepSpeed ZeRO-3 or FSDP; gather the parameters first, as zero_to_fp32.py does'
    return ''


def _none_found(values: Mapping[str, Value], described: str) -> CheckpointError:
    objects = {name: value for name, value in values.items() if isinstance(value, StandIn)}
    tensors = [name for name in values if name not in objects]
    models = [name for name, value in objects.items() if value.is_module]
    if models and not tensors:
        where = f' under {models[0]!r}' if models[0] else ''
        return CheckpointError(
            f'{described} holds a whole model, pickled as a {objects[models[0]].kind}{where}, not its weights. Reading '
            'it would run the code of its class; nothing was run. Where the class is installed, save the weights '
            "instead: torch.save(model.state_dict(), 'weights.pth')",
            '. Only if you trust the author of the file, load it with load_checkpoint(..., trust=True)',
        )
    kinds = listed(sorted({value.kind for value in objects.values()}))
    ignored = f' and objects of {kinds}, which are not read' if objects else ''
    return CheckpointError(
        f'{described}: no parameters of a Swin Transformer were found; the checkpoint contains '
        f'{listed(tensors) or "no tensors"}{ignored}. Supported families: {", ".join(FAMILIES)}'
    )


def _choose(candidates: dict[Candidate, set[str]], described: str, prefix: str | None, ema: bool) -> Candidate:
    """Return the naming scheme and the prefix of the backbone to load, among those of :func:`find_backbones`."""
    parts = {choice: set(choice[1].split('.')) for choice in candidates}
    chosen = [c for c in candidates if bool(_AVERAGES & parts[c]) == ema and not _MOMENTUM_BRANCHES & parts[c]]
    if prefix is not None:
        # Those with this prefix, or else those whose prefix contains its components.
        wanted = plain_name(f'{prefix.rstrip(".")}.') if prefix else ''
        named = [choice for choice in candidates if choice[1] == wanted]
        if not named and wanted:
            named = [choice for choice in candidates if f'.{wanted}' in f'.{choice[1]}']
        chosen = [choice for choice in named if choice in chosen] or named
    # A few unrelated keys may match, and the schemes of two libraries have the names of the MLP in common, but a
    # backbone, whole or partly wrapped, has more kinds of parameters.
    if chosen:
        enough = min(3, max(len(candidates[choice]) for choice in chosen))
        chosen = [choice for choice in chosen if len(candidates[choice]) >= enough]
    if len(chosen) != 1:
        raise CheckpointError(f'{described}: {_why_no_choice(candidates, chosen, prefix, ema)}')
    return chosen[0]


def _why_no_choice(candidates: Iterable[Candidate], chosen: list[Candidate], prefix: str | None, ema: bool) -> str:
    if chosen:
        return f'the checkpoint contains several backbones, under {_prefixes(chosen)}; choose one with prefix='
    if prefix is not None:
        return f'no backbone under prefix={prefix!r}, only under {_prefixes(candidates)}'
    if ema:
        return 'the checkpoint contains no running average of the weights; omit ema=True'
    return f'the checkpoint contains only running averages, under {_prefixes(candidates)}; load them with ema=True'


def _prefixes(choices: Iterable[Candidate]) -> str:
    return ', '.join(sorted({repr(prefix) for _, prefix in choices}))


def is_table(name: str) -> bool:
    return name.endswith('.relative_position_bias_table')


def _around(prefix: str) -> str:
    """Return the prefix of the module that contains the one with this prefix."""
    return ''.join(prefix[:-1].rpartition('.')[:2])

"""Find the backbone in a checkpoint, convert it to our names and layouts, and infer its options from its shapes."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from swin_dense.checkpoint.families import (
    COORDINATES,
    EXPORTED,
    MMDET,
    OFFICIAL,
    OFFICIAL_V2,
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

Value = Tensor | StandIn

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
_MAX_VISITS = 8  # of one dict under several names; a small file can contain a dict in any number of dicts


@dataclass
class Found:
    """The backbone in a checkpoint.

    Attributes:
        described: the name of the checkpoint in messages.
        family: the name of the library in reports.
        prefix: the prefix of the backbone's keys in the checkpoint.
        parameters: maps our parameter names to tensors in our layout. Entries that no Swin has keep their names.
        keys: maps our parameter names to their keys in the checkpoint; includes parameters with missing parts.
        unusable: maps our names of parameters that are not dense tensors with values to what they are.
        grid: (H, W) of the absolute position embedding, or None if the checkpoint does not determine it.
        windows: maps our names of relative position tables, or of V2's ``logit_scale``, to windows that the
            checkpoint determines.
        version: the version of Swin, 1 or 2.
        trained_windows: maps stages to the window with which V2's position networks were trained, if known.
        left_out: maps keys that are skipped on purpose to the reason.
        stems: the common beginnings of the names in stages and of the output norms.
    """

    described: str
    family: str
    prefix: str
    parameters: dict[str, Tensor] = field(default_factory=dict)
    keys: dict[str, list[str]] = field(default_factory=dict)
    unusable: dict[str, str] = field(default_factory=dict)
    grid: Pair | None = None
    windows: dict[str, Pair] = field(default_factory=dict)
    version: int = 1
    trained_windows: dict[int, Pair] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    stems: tuple[str, ...] = ()

    @property
    def network(self) -> str:
        """The beginning of model names: 'swin' or 'swinv2'."""
        return 'swin' if self.version == 1 else 'swinv2'


def flatten(checkpoint: Mapping[Any, Any]) -> dict[str, Value]:
    """Return all tensors and stand-ins in nested dicts by dotted name, so that keys of containers become prefixes.

    Cycles, ``optimizer`` states, dicts nested deeper than 32 levels, and a dict that is in more than 8 places are
    skipped.
    """
    values: dict[str, Value] = {}
    visits: Counter[int] = Counter()
    # A stack instead of recursion, because a file may nest deeper than the recursion limit. Items are pushed in
    # reverse to keep the order of the file.
    pending: list[tuple[str, Any, frozenset[int]]] = [('', checkpoint, frozenset())]
    while pending:
        name, value, around = pending.pop()
        if isinstance(value, nn.Module):
            value = value.state_dict()
        if isinstance(value, np.ndarray) and value.dtype.kind in 'fi' and value.dtype.itemsize <= 8:
            value = torch.from_numpy(np.require(value, value.dtype.newbyteorder('='), ('C', 'W')))
        if isinstance(value, Tensor):
            values[name] = value.detach()
        elif isinstance(value, StandIn):
            values[name] = value
        if isinstance(value, Mapping) and id(value) not in around and len(around) < _MAX_DEPTH:
            visits[id(value)] += 1
            if visits[id(value)] > _MAX_VISITS:
                continue
            prefix = f'{name}.' if around else ''
            pending += [
                (f'{prefix}{key}', item, around | {id(value)})
                for key, item in reversed(list(value.items()))
                if (isinstance(key, str) and key != 'optimizer')
                or (isinstance(key, (str, int)) and isinstance(item, (Tensor, np.ndarray, nn.Module)))
            ]
    return values


def find(values: Mapping[str, Value], described: str, prefix: str | None = None, ema: bool = False) -> Found:
    """Find the backbone among the tensors of a checkpoint.

    Args:
        values: maps dotted names to tensors, and to the objects in place of which stand-ins were read.
        described: the name of the checkpoint in messages.
        prefix: the prefix of the backbone's keys, or consecutive components of it that no other backbone has; None to
            detect it.
        ema: use the running average of the weights instead of the weights.

    Raises:
        CheckpointError: the checkpoint has no Swin backbone, or several.
    """
    plain_names = {key: plain_name(key) for key in values}
    # mmengine's EMAHook saves the average as state_dict and the current weights as ema_state_dict.
    ema = ema and 'ema_state_dict.steps' not in values
    candidates = find_backbones(plain_names.values())
    if not candidates:
        raise _none_found(values, described)
    spelling, prefix = _choose(candidates, described, prefix, ema)
    family = resolve_family(spelling, prefix, plain_names.values())
    found = Found(described, family.name, prefix, version=family.version, stems=family.stems)
    parts: dict[Name, dict[int, str]] = {}
    for key, plain in plain_names.items():
        if not plain.startswith(prefix):
            if isinstance(values[key], Tensor):
                found.left_out[key] = 'other parts of the model'
            continue
        plain = plain.removeprefix(prefix)
        name, value = family.read(plain), values[key]
        if name is not None:
            keys = parts.setdefault(dataclasses.replace(name, part=0), {})
            if name.part in keys:
                raise CheckpointError(f'{described}: {keys[name.part]} and {key} are the same parameter')
            keys[name.part] = key
        elif isinstance(value, Tensor):
            _keep_other(plain, key, value, found)
    for name, keys in parts.items():
        _convert(name, [keys[part] for part in sorted(keys)], values, family, found)
    _find_head(found, plain_names, values)
    found.family = _label(family, found, plain_names.values())
    if family.joined_bias:
        _split_biases(found)
    return found


def _keep_other(plain: str, key: str, value: Tensor, found: Found) -> None:
    """Store an entry under the backbone's prefix that is no parameter of a Swin."""
    reason = next((reason for pattern, reason in _LEFT_OUT.items() if pattern.fullmatch(plain)), None)
    if reason is not None:
        found.left_out[key] = reason
        return
    found.keys[plain] = [key]
    if why := _why_unusable(value):
        found.unusable[plain] = why
    else:
        found.parameters[plain] = value


def _convert(name: Name, keys: list[str], values: Mapping[str, Value], family: Family, found: Found) -> None:
    """Store a parameter in ``found``, and what its layout and the buffers beside it say about windows."""
    found.keys[name.ours] = keys
    parts = []
    for key in keys:
        value = values[key]
        if (why := _why_unusable(value)) or isinstance(value, StandIn):
            found.unusable[name.ours] = why
            return
        parts.append(value)
    # Integers among floats are not weights.
    if len({(part.shape, part.is_floating_point(), part.device) for part in parts}) > 1:
        found.unusable[name.ours] = 'in parts of different shapes, types or devices'
    elif len(parts) == len(family.write(name)):
        found.parameters[name.ours] = family.decode(name, parts)
    if name.role == 'position' and parts[0].ndim == 4:
        found.grid = (parts[0].shape[2], parts[0].shape[3])
    if name.role == 'table':
        index = _buffer(values, keys[0].replace('relative_position_bias_table', 'relative_position_index'))
        window = None if index is None else window_of_index(index, parts[0].shape[:1].numel())
        if window is not None:
            found.windows[name.ours] = window
    if name.role == 'logit_scale':
        coordinates = _buffer(values, keys[0].replace('logit_scale', COORDINATES))
        if coordinates is not None and coordinates.ndim == 4:
            found.windows[name.ours] = window_of_coordinates(coordinates)
            trained = trained_window(coordinates)
            if trained is not None:
                found.trained_windows[name.stage or 0] = trained


def _buffer(values: Mapping[str, Value], key: str) -> Tensor | None:
    value = values.get(key)
    return value if isinstance(value, Tensor) and not (_why_unusable(value) or value.is_meta) else None


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


def _find_head(found: Found, plain_names: Mapping[str, str], values: Mapping[str, Value]) -> None:
    """Store the classifier's linear layer as ``head``. It is a sibling of the stages or of the backbone."""
    parents = {found.prefix, found.prefix.rstrip('.').rpartition('.')[0] + '.' if '.' in found.prefix[:-1] else ''}
    for key, plain in plain_names.items():
        match, value = _HEAD.fullmatch(plain), values[key]
        if match is not None and match[1] in parents and isinstance(value, Tensor) and not _why_unusable(value):
            found.parameters[f'head.{match[2]}'], found.keys[f'head.{match[2]}'] = value, [key]
            found.left_out.pop(key, None)


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
        f'{listed(tensors) or "no tensors"}{ignored}. Supported families: {", ".join(EXPORTED)}'
    )


def _choose(
    candidates: Mapping[tuple[Family, str], Collection[str]], described: str, prefix: str | None, ema: bool
) -> tuple[Family, str]:
    """Return the naming scheme and the prefix of the backbone to load, among those of :func:`find_backbones`."""
    momentum = [choice for choice in candidates if _MOMENTUM_BRANCHES & set(choice[1].split('.'))]
    chosen = [choice for choice in candidates if _is_average(choice[1]) == ema and choice not in momentum]
    if prefix is not None:
        named = _named(candidates, prefix)
        chosen = [choice for choice in named if choice in chosen] or named
    # A few unrelated keys may match, and the schemes of two libraries have the names of the MLP in common, but a
    # backbone, whole or partly wrapped, has more kinds of parameters.
    enough = min(3, max((len(candidates[choice]) for choice in chosen), default=0))
    chosen = [choice for choice in chosen if len(candidates[choice]) >= enough]
    if len(chosen) != 1:
        raise CheckpointError(f'{described}: {_why_no_choice(candidates, chosen, prefix, ema)}')
    return chosen[0]


def _named(candidates: Iterable[tuple[Family, str]], prefix: str) -> list[tuple[Family, str]]:
    """Return the candidates with a prefix, or else those whose prefix contains its components."""
    wanted = plain_name(f'{prefix.rstrip(".")}.') if prefix else ''
    exact = [choice for choice in candidates if choice[1] == wanted]
    return exact or [choice for choice in candidates if wanted and f'.{wanted}' in f'.{choice[1]}']


def _why_no_choice(
    candidates: Iterable[tuple[Family, str]], chosen: list[tuple[Family, str]], prefix: str | None, ema: bool
) -> str:
    if chosen:
        return (
            f'the checkpoint contains several backbones, under {_prefixes(chosen)}; choose one with prefix=... of '
            'load_checkpoint or create_backbone, or with --prefix'
        )
    if prefix is not None:
        return f'no backbone under prefix={prefix!r}, only under {_prefixes(candidates)}'
    if ema:
        return 'the checkpoint contains no running average of the weights; omit ema=True'
    return f'the checkpoint contains only running averages, under {_prefixes(candidates)}; load them with ema=True'


def _prefixes(choices: Iterable[tuple[Family, str]]) -> str:
    return ', '.join(sorted({repr(prefix) for _, prefix in choices}))


def _is_average(prefix: str) -> bool:
    return bool(_AVERAGES & set(prefix.split('.')))


def _label(family: Family, found: Found, keys: Collection[str]) -> str:
    """Return the name of the library; other keys of the checkpoint distinguish libraries with the same names."""
    components = {component for key in keys for component in key.split('.')}
    if family in (OFFICIAL, OFFICIAL_V2) and found.prefix.endswith('encoder.'):
        if _MOMENTUM_BRANCHES & components:
            return 'moby'
        if 'mask_token' in components:
            return 'simmim'
    if family is MMDET:
        if 'decode_head' in components:
            return 'mmseg'
        if found.keys.get('head.weight', [''])[0].endswith('head.fc.weight'):  # beside the backbone
            return 'mmpretrain'
    return family.name


def _split_biases(found: Found) -> None:
    """Split each joined qkv bias of V2 into a query and a value bias. The key bias has no effect and is dropped."""
    for name in [name for name in found.parameters if name.endswith('.attn.w_msa.qkv.bias')]:
        q_bias, _, v_bias = found.parameters.pop(name).chunk(3)
        stem = name.removesuffix('qkv.bias')
        found.parameters.update({f'{stem}q_bias': q_bias, f'{stem}v_bias': v_bias})
        found.keys[f'{stem}q_bias'] = found.keys[f'{stem}v_bias'] = found.keys.pop(name)

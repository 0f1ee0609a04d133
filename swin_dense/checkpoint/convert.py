"""Convert the backbone of a checkpoint, of any family, to our names and layouts. The checkpoint is not changed."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from swin_dense.checkpoint.families import COORDINATES, LINEAR, Family, Name, Value, choose, outside, plain_name
from swin_dense.checkpoint.report import COMPUTED, OTHER_PARTS
from swin_dense.checkpoint.resize import offsets, window_of_index, windows_of_coordinates
from swin_dense.checkpoint.unpickler import StandIn
from swin_dense.ops.windows import Size
from swin_dense.utils.checks import shortened
from swin_dense.utils.errors import CheckpointError

TABLE = '.relative_position_bias_table'
# Entries under the backbone's prefix that are not backbone parameters, and the reason to skip them.
_LEFT_OUT = {
    r'.*(relative_position_(?:index|bias)|relative_coords_table|attn_mask)': COMPUTED,
    r'(head|classifier|fc)\..*': 'the classifier',
    r'(.*\.)?mask_token': 'mask token of the pretraining',
    r'decoder\..*': 'decoder of the pretraining',
}
_HEAD = re.compile(r'(.*?)(?:head\.fc|head|classifier)\.(weight|bias)')
_MAX_DEPTH = 32  # of nested dicts
_LONGEST_NAME = 1000  # characters of a dotted name, which is cut here; the same text can be in many names
_MAX_VISITS = 8  # of one dict under several names; a small file can contain a dict in any number of dicts
# Types of numbers that torch computes with; it has others that hold bits, or several numbers in a byte.
_NUMBERS = re.compile(r'torch\.(bool|u?int(8|16|32|64)|b?float(8_.*|16|32|64)|complex\d+)')


@dataclass(frozen=True)
class Parameter:
    """A parameter of a checkpoint, or another tensor under the prefix of its backbone."""

    keys: tuple[str, ...]  # in the checkpoint; several if it stores the parameter in parts
    tensor: Tensor | None  # in our layout
    unusable: str = ''  # why there is no tensor
    size: Size | None = None  # (height, width): the window of a table, the grid of the absolute position embedding
    size_is_known: bool = False  # rather than taken to be square


@dataclass(frozen=True)
class ConvertedBackbone:
    """The backbone of a checkpoint."""

    described: str  # the name of the checkpoint in messages
    family: Family
    label: str  # the name of the family in reports
    prefix: str  # of the backbone's keys in the checkpoint
    parameters: Mapping[str, Parameter]  # by our names; those that no Swin has keep their names
    windows: Mapping[int, Size]  # by stage, if known: of tables, or of the buffers beside V2's position networks
    trained_windows: Mapping[int, Size]  # by stage, if known: with which V2's position networks were trained
    left_out: Mapping[str, str]  # why keys are skipped on purpose
    is_transposed: bool  # linear weights were (inputs, outputs)

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors by our names, without those that are unusable."""
        named = {name: parameter.tensor for name, parameter in self.parameters.items()}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    @property
    def is_classifier(self) -> bool:
        """Whether it is a classifier of a library; a head beside a backbone under a prefix may be any module."""
        head = self.parameters.get('head.weight')
        if head is None or head.tensor is None:
            return 'norm.weight' in self.parameters
        is_inside = plain_name(head.keys[0]).startswith(self.prefix)
        return head.tensor.ndim == 2 and (is_inside or self.label in ('mmpretrain', 'transformers'))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}


def flatten(checkpoint: Mapping[Any, Any]) -> dict[str, Value]:
    """Return all tensors and stand-ins in nested dicts by dotted name, so that keys of containers become prefixes.

    Cycles, ``optimizer`` states, dicts nested too deep, and a dict that is in too many places are skipped.
    """
    found: dict[str, Value] = {}
    visits: Counter[int] = Counter()
    pending: list[tuple[str, Any, tuple[int, ...]]] = [('', checkpoint, ())]  # with the dicts around each value
    while pending:
        name, value, around = pending.pop()
        identity = id(value)
        if isinstance(value, nn.Module):
            value = value.state_dict()
        if isinstance(value, np.ndarray) and value.dtype.kind in 'fi' and value.dtype.itemsize <= 8:
            value = torch.from_numpy(np.require(value, value.dtype.newbyteorder('='), ('C', 'W')))
        if isinstance(value, (Tensor, StandIn)):
            found[name] = value.detach() if isinstance(value, Tensor) else value
        if not isinstance(value, Mapping) or identity in around or len(around) == _MAX_DEPTH:
            continue
        visits[identity] += 1
        if visits[identity] > _MAX_VISITS:
            continue
        inside = []
        for key, item in value.items():
            is_tensor = isinstance(item, (Tensor, np.ndarray, nn.Module))
            if (isinstance(key, str) and key != 'optimizer') or (isinstance(key, int) and is_tensor):
                inner = f'{name}.{key}' if around else str(key)
                inside.append((inner[:_LONGEST_NAME], item, (*around, identity)))
        pending += reversed(inside)
    return found


def convert(
    checkpoint: Mapping[Any, Any],
    described: str,
    prefix: str | None = None,
    ema: bool = False,
    window_size: Size | None = None,
) -> ConvertedBackbone:
    """Find the backbone in nested dicts of tensors, and convert it; see :func:`swin_dense.load_checkpoint`.

    ``described`` is the name of the checkpoint in messages. ``window_size`` is (height, width) in tokens.

    Raises CheckpointError if there is no backbone, if there are several, or if the checkpoint contradicts itself.
    """
    if prefix is not None and not isinstance(prefix, str):
        raise TypeError(f'prefix must be a string such as "teacher.backbone", got {prefix!r}')
    values: dict[str, Any] = flatten(checkpoint)
    names = {key: plain_name(key) for key in values}
    family, label, prefix = choose(values, names.values(), described, prefix, ema)
    keys_of, others = _keys_by_parameter(names, values, family, prefix, described)
    parts_of = {name: [values[key] for key in keys] for name, keys in keys_of.items()}
    unusable = {name: _why_unusable(parts, len(family.templates(name.role))) for name, parts in parts_of.items()}
    whole = {name: parts[0] for name, parts in parts_of.items() if len(parts) == 1 and not unusable[name]}
    is_transposed = _is_transposed(whole, described)
    parameters: dict[str, Parameter] = {}
    windows: dict[int, Size] = {}
    trained_windows: dict[int, Size] = {}
    for name, parts in parts_of.items():
        keys = keys_of[name]
        coordinates = _buffer_beside(keys[0], COORDINATES, values) if name.role == 'logit_scale' else None
        window, trained = (None, None) if coordinates is None else windows_of_coordinates(coordinates)
        if trained is not None:
            trained_windows[name.stage] = trained
        size, is_known = None, False
        if not unusable[name]:
            size, is_known = _size_of(name, keys[0], parts[0], values, window_size)
        window = size if name.role == 'table' else window
        if window is not None:
            windows[name.stage] = window
        tensor = None if unusable[name] else family.decode(name, parts, is_transposed)
        parameters[name.ours] = Parameter(keys, tensor, unusable[name], size, is_known)
    beside, left_out = _others(others, names, values, prefix, is_transposed)
    parameters |= beside
    if family.joined_bias:
        _split_biases(parameters)
    return ConvertedBackbone(
        described, family, label, prefix, parameters, windows, trained_windows, left_out, is_transposed
    )


def _keys_by_parameter(
    names: Mapping[str, str], values: Mapping[str, Any], family: Family, prefix: str, described: str
) -> tuple[dict[Name, tuple[str, ...]], list[str]]:
    """Return the keys of each parameter of the backbone in the order of its parts, and those of all other tensors."""
    found: dict[Name, dict[int, str]] = {}  # by part
    others = []
    for key, plain in names.items():
        read = family.read(plain.removeprefix(prefix)) if plain.startswith(prefix) else None
        if read is not None:
            keys = found.setdefault(replace(read, part=0), {})
            if read.part in keys:
                both = f'{shortened(keys[read.part])} and {shortened(key)}'
                raise CheckpointError(f'{described}: {both} are the same parameter')
            keys[read.part] = key
        elif isinstance(values[key], Tensor):
            others.append(key)
    return {name: tuple(keys[part] for part in sorted(keys)) for name, keys in found.items()}, others


def _others(
    keys: Sequence[str], names: Mapping[str, str], values: Mapping[str, Any], prefix: str, is_transposed: bool
) -> tuple[dict[str, Parameter], dict[str, str]]:
    """Return the tensors that are no parameters of a Swin: those of a head and within the prefix, and the rest.

    The rest are keys with the reason why they are left out.
    """
    parameters, left_out = {}, {}
    for key in keys:
        value, inner = values[key], names[key].removeprefix(prefix)
        head, why = _HEAD.fullmatch(names[key]), _why_unusable([value])
        if head is not None and not why and head[1] in (prefix, outside(prefix)):  # beside the stages or the backbone
            weight = value.T if is_transposed and value.ndim == 2 else value
            parameters[f'head.{head[2]}'] = Parameter((key,), weight)
        elif not names[key].startswith(prefix):
            left_out[key] = OTHER_PARTS
        elif reasons := [reason for pattern, reason in _LEFT_OUT.items() if re.fullmatch(pattern, inner)]:
            left_out[key] = reasons[0]
        else:
            parameters[inner] = Parameter((key,), None if why else value, why)
    return parameters, left_out


def _why_unusable(parts: list[Any], expected: int = 1) -> str:
    """Return why the parts of a parameter cannot be copied into one of a model, or an empty string."""
    for value in parts:
        if isinstance(value, StandIn):
            return f'stored as {shortened(value.kind)}, not as a dense tensor'
        if hasattr(value, 'device_mesh'):
            return 'a DTensor, which is sharded over devices; gather it with full_tensor()'
        if value.is_nested or value.layout != torch.strided:
            return 'not a dense tensor; store it with to_dense()'
        if value.is_quantized:
            return 'quantised; store it with dequantize()'
        if not _NUMBERS.fullmatch(str(value.dtype)):
            return f'of the type {value.dtype}, with which torch does not compute'
        if value.numel() == 0:
            return (
                'empty, as in a shard of DeepSpeed ZeRO-3 or FSDP; gather the parameters first, as zero_to_fp32.py does'
            )
    # Integers among floats are not weights.
    if len({(part.shape, part.is_floating_point(), part.device) for part in parts}) > 1:
        return 'in parts of different shapes, types or devices'
    return '' if len(parts) == expected else f'only {len(parts)} of the {expected} tensors that it consists of'


def _is_transposed(tensors: Mapping[Name, Tensor], described: str) -> bool:
    """Return whether linear weights are (inputs, outputs), which no file says and a square weight does not show.

    Raises CheckpointError if some are and others are not: which of the square ones are is then unknown.
    """
    found: dict[bool, Name] = {}  # a weight that is transposed, and one that is not
    for name, tensor in tensors.items():
        if name.leaf != '.weight' or name.role not in LINEAR or tensor.ndim != 2:
            continue
        rows, columns = tensor.shape
        bias = tensors.get(replace(name, leaf='.bias'))
        outputs = 0 if bias is None else bias.numel()
        if name.role == 'qkv':
            outputs = 3 * min(rows, columns)
        if rows != columns and outputs in (rows, columns):
            found.setdefault(outputs == columns, name)
    if len(found) == 2:
        raise CheckpointError(
            f'{described}: {found[True].ours} is (inputs, outputs), but {found[False].ours} is (outputs, inputs); '
            'store all linear weights as torch does, (outputs, inputs)'
        )
    return True in found


def _size_of(
    name: Name, key: str, tensor: Tensor, values: Mapping[str, Any], window_size: Size | None
) -> tuple[Size | None, bool]:
    """Return the window of a table, or the grid of the absolute position embedding, and whether the checkpoint says it.

    If their number of rows is all that it says, they are taken to be square.
    """
    if name.role == 'position' and tensor.ndim == 4:
        return (tensor.shape[2], tensor.shape[3]), True
    if name.role == 'position' and tensor.ndim == 3:
        side = math.isqrt(tensor.shape[1])
        return ((side, side) if side**2 == tensor.shape[1] else None), False
    if name.role != 'table' or tensor.ndim != 2:
        return None, False
    rows = tensor.shape[0]
    index = _buffer_beside(key, 'relative_position_index', values)
    window = None if index is None else window_of_index(index, rows)
    if window_size and rows == math.prod(offsets(window_size)):
        window = window_size
    if window is not None:
        return window, True
    side = (math.isqrt(rows) + 1) // 2
    return ((side, side) if rows == (2 * side - 1) ** 2 else None), False


def _buffer_beside(key: str, name: str, values: Mapping[str, Any]) -> Tensor | None:
    """Return a buffer of the module with a parameter, or None if there is none with values."""
    buffer = values.get(f'{key.rpartition(".")[0]}.{name}')
    return None if buffer is None or _why_unusable([buffer]) or buffer.is_meta else buffer


def _split_biases(parameters: dict[str, Parameter]) -> None:
    """Split the qkv biases of V2 into a query and a value bias; the key bias has no effect and is dropped."""
    for name in [ours for ours in parameters if ours.endswith('.attn.w_msa.qkv.bias')]:
        joined = parameters.pop(name)
        stem = name.removesuffix('qkv.bias')
        chunks = [None] if joined.tensor is None else torch.atleast_1d(joined.tensor).chunk(3)
        parameters[f'{stem}q_bias'] = replace(joined, tensor=chunks[0])
        parameters[f'{stem}v_bias'] = replace(joined, tensor=chunks[-1])

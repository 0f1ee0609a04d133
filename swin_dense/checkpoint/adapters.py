"""Adapters in checkpoints: which parameters of a backbone they are, and the base that they belong to.

The file of an adapter has all parameters but those of the base, and beside them ``base_sha256``, the hash of the base.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from swin_dense.checkpoint.families import MMDET

BASE_KEY = 'base_sha256'  # 32 bytes, with the prefix of the backbone's parameters
_NORMS = ('patch_norm', 'norm1', 'norm2', 'merge_norm', 'out_norm', 'final_norm')
_PAIR = '.lora_A', '.lora_B'
# A parameter of each type of adapter that has its size as the first side, and the option of that size.
_SIZES = (
    ('lora', 'rank', re.compile(r'stages\.(\d{1,3})\..*\.lora_A')),
    ('mona', 'dim', re.compile(r'stages\.(\d{1,3})\..*\.mona1\.down\.weight')),
)
_STAGE = re.compile(r'stages\.(\d{1,3})\.blocks\.')


def part_of(name: str) -> str:
    """Return what a parameter of a backbone belongs to, by our name of it: 'base', 'norm' or 'adapter'."""
    read = MMDET.read(name)
    if read is None:
        return 'adapter'
    return 'norm' if read.role in _NORMS else 'base'


def base_digest(parameters: Mapping[str, Tensor]) -> Tensor:
    """Return the SHA-256 of the base of a backbone, given its parameters by our names, as 32 bytes.

    Norms do not count, because they train with an adapter. Values count in float32.
    """
    digest = hashlib.sha256()
    for name in sorted(parameters):
        if part_of(name) == 'base':
            values = parameters[name].detach().to('cpu', torch.float32).contiguous()
            digest.update(f'{name} {tuple(values.shape)}\n'.encode())
            digest.update(values.numpy().data)
    return torch.tensor(list(digest.digest()), dtype=torch.uint8)


def is_same_base(digest: Tensor, other: Tensor) -> bool:
    """Return whether two hashes of :func:`base_digest` are equal, also if one was moved or reshaped with its model."""
    return torch.equal(digest.flatten().cpu(), other.flatten().cpu())


def shown_digest(digest: Tensor) -> str:
    """Return the first digits of a hash."""
    return bytes(digest.flatten().tolist())[:6].hex()


def adapter_options(shapes: Mapping[str, Sequence[int] | None]) -> dict[str, Any] | None:
    """Infer the option ``adapter`` of a backbone from the shapes of its parameters; return None if it has none."""
    for kind, option, pattern in _SIZES:
        found = {name: match for name in shapes if (match := pattern.fullmatch(name))}
        if found:
            stages = {int(match[1]) for match in found.values()}
            built = {int(match[1]) for match in map(_STAGE.match, shapes) if match}
            size = (shapes[min(found)] or (None,))[0]
            return {'type': kind, option: size, **({} if stages == built else {'stages': sorted(stages)})}
    return None


def merge_pairs(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return parameters in which the pairs of LoRA are added to the weights beside them, and are no longer there."""
    merged = {name: tensor for name, tensor in parameters.items() if not name.endswith(_PAIR)}
    for name, first in parameters.items():
        if name.endswith(_PAIR[0]):
            layer = name.removesuffix(_PAIR[0])
            product = parameters[layer + _PAIR[1]].float() @ first.float()
            weight = parameters[f'{layer}.weight']
            merged[f'{layer}.weight'] = (weight.float() + product).to(weight.dtype)
    return merged

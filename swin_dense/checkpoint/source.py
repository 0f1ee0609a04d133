"""Find the backbone in whatever a checkpoint holds, and bring it into our names and layouts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from swin_dense.checkpoint.families import FAMILIES, Family, Name, find_backbones
from swin_dense.checkpoint.report import CheckpointError, listed

# Components that wrappers insert into names, at any depth.
_WRAPPERS = re.compile(r'(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.')
# Components of names that mark a running average of the weights.
_AVERAGES = {'ema', 'ema_state_dict', 'model_ema', 'state_dict_ema', 'ema_model', 'module_ema'}
# The second, slowly moving encoder of contrastive pretraining; nobody wants it for dense prediction.
_MOMENTUM_BRANCHES = {'encoder_k'}
# Entries under the backbone's prefix that are not its parameters, with the reason to leave them out.
_LEFT_OUT = {
    re.compile(r'.*(relative_position_index|relative_coords_table|attn_mask)'): 'buffers that are computed here',
    re.compile(r'(head|classifier|fc)\..*'): 'the classifier',
    re.compile(r'(.*\.)?mask_token'): 'mask token of the pretraining',
}


@dataclass
class Source:
    """The backbone in a checkpoint.

    Attributes:
        family: whose names it has.
        label: what reports call the family.
        prefix: what stands before its names.
        parameters: our name to the tensor in our layout.
        keys: our name to the keys of the checkpoint that the tensor came from.
        left_out: keys left out on purpose, with the reason.
        unexpected: other keys under the prefix.
        buffers: position index buffers by our name of the table they belong to.
    """

    family: Family
    label: str
    prefix: str
    parameters: dict[str, Tensor] = field(default_factory=dict)
    keys: dict[str, list[str]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    unexpected: list[str] = field(default_factory=list)


def flatten(checkpoint: Mapping[Any, Any]) -> dict[str, Tensor]:
    """Return all tensors in nested dicts by dotted name, so that containers look like prefixes."""
    tensors: dict[str, Tensor] = {}
    for key, value in checkpoint.items():
        if isinstance(value, nn.Module):
            value = value.state_dict()
        if isinstance(value, Tensor):
            tensors[str(key)] = value
        elif isinstance(value, Mapping) and isinstance(key, str) and key != 'optimizer':
            tensors.update({f'{key}.{name}': tensor for name, tensor in flatten(value).items()})
    return tensors


def plain_name(key: str) -> str:
    """Return ``key`` without what wrappers of modules insert."""
    return _WRAPPERS.sub('', key)


def read_source(
    tensors: Mapping[str, Tensor], grid: tuple[int, int] | None, prefix: str | None = None, ema: bool = False
) -> Source:
    """Find the backbone among the tensors of a checkpoint.

    Args:
        tensors: dotted name to tensor.
        grid: (H, W) of the absolute position embedding of the model, where it has one.
        prefix: what stands before the backbone's names; None finds out.
        ema: take the running average of the weights instead of the weights.

    Raises:
        CheckpointError: there is no Swin backbone, or there are several.
    """
    family, prefix = _choose(list(tensors), prefix, ema)
    source = Source(family, family.name, prefix)
    parts: dict[Name, dict[int, tuple[str, Tensor]]] = {}
    for key, tensor in tensors.items():
        plain = plain_name(key)
        if not plain.startswith(prefix):
            source.left_out[key] = 'other parts of the model' if prefix else 'not the backbone'
            continue
        plain = plain.removeprefix(prefix)
        reason = next((reason for pattern, reason in _LEFT_OUT.items() if pattern.fullmatch(plain)), None)
        name = family.read(plain)
        if reason is not None:
            source.left_out[key] = reason
        elif name is None:
            source.unexpected.append(key)
        else:
            whole = Name(name.role, name.stage, name.block, name.leaf)
            parts.setdefault(whole, {})[name.part] = (key, tensor)
    for name, found in parts.items():
        source.keys[name.ours] = [key for key, _ in found.values()]
        if len(found) == len(family.write(name)):
            source.parameters[name.ours] = family.decode(name, [found[part][1] for part in sorted(found)], grid)
    return source


def _choose(keys: list[str], prefix: str | None, ema: bool) -> tuple[Family, str]:
    found = find_backbones(plain_name(key) for key in keys)
    if not found:
        known = ', '.join(family.name for family in FAMILIES)
        raise CheckpointError(
            f'no parameters of a Swin Transformer were found; the checkpoint holds {listed(keys) or "no tensors"}. '
            f'Families that are understood: {known}'
        )
    if prefix is None:
        chosen = {
            choice: count
            for choice, count in found.items()
            if _is_average(choice[1]) == ema and not _MOMENTUM_BRANCHES & set(choice[1].split('.'))
        }
        if not chosen:
            raise CheckpointError(
                'the checkpoint holds no running average of the weights; leave out ema=True'
                if ema
                else f'the checkpoint holds only a running average of the weights, under {_prefixes(found)}; '
                'pass ema=True to load it'
            )
    else:
        chosen = {choice: count for choice, count in found.items() if choice[1].rstrip('.') == prefix.rstrip('.')}
        if not chosen:
            raise CheckpointError(f'no backbone under prefix={prefix!r}; there are backbones under {_prefixes(found)}')
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

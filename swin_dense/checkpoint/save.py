"""Export the weights of a backbone with the parameter names and layouts of another library, and write them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from swin_dense.checkpoint.compare import Target
from swin_dense.checkpoint.families import ALL, COORDINATES, MMDET
from swin_dense.checkpoint.resize import offsets
from swin_dense.ops.windows import relative_position_bias
from swin_dense.utils import checks, packages
from swin_dense.utils.atomic import atomic_path, check_destination, write_tensors
from swin_dense.utils.choices import FAMILIES

# For each family, the key of the state dict in its checkpoint files and the prefix of the backbone's parameter names.
_LOCATIONS = {
    'official': ('model', ''),
    'mmdet': ('state_dict', 'backbone.'),
    'mmseg': ('state_dict', 'backbone.'),
    'mmpretrain': ('state_dict', 'backbone.'),
}


def export_state_dict(backbone: nn.Module, family: str = 'mmdet') -> dict[str, Tensor]:
    """Return a copy of the weights of a backbone with the names and layouts of another library.

    Loading the result with :func:`load_checkpoint` gives bitwise identical weights.

    Args:
        backbone: a SwinBackbone.
        family: 'official' (detection and segmentation), 'mmdet', 'mmseg', 'mmpretrain', 'timm', 'torchvision' or
            'transformers' (``SwinBackbone`` of 5.x). timm, torchvision and ``Swinv2Backbone`` of transformers have no
            output norms: ``norm0`` to ``norm3`` keep their names, so load with ``strict=False`` there. mmdet and
            mmseg have no Swin V2.

    Raises:
        ValueError: the family is unknown, or has no Swin V2.
        TypeError: ``backbone`` is not a SwinBackbone.

    Examples:
        >>> from swin_dense import SwinBackbone
        >>> weights = export_state_dict(SwinBackbone('t'), 'timm')
        >>> weights['layers.0.blocks.0.attn.qkv.weight'].shape
        torch.Size([288, 96])
    """
    target = Target.of(backbone)
    own = backbone.state_dict()
    parameters = {name: own[key].detach() for name, key in target.names.items()}
    checks.one_of('family', family, FAMILIES)
    of_network = [layout for layout in ALL if layout.network == target.spec.network]
    layouts = {layout.name: layout for layout in of_network if layout.name in FAMILIES}
    if family not in layouts:
        raise ValueError(f'{family} has no Swin V2; family must be one of {list(layouts)}')
    layout = layouts[family]
    if layout.joined_bias:
        _join_biases(parameters)
    exported = {}
    for our_name, parameter in parameters.items():
        name = MMDET.read(our_name)
        if name is None:
            raise ValueError(
                f'{our_name!r} is not a parameter of a Swin Transformer and cannot be exported to another library'
            )
        inner = '' if name.role == 'out_norm' else layout.inner
        tensors = layout.encode(name, parameter, target.spec.grid)
        for written, tensor in zip(layout.write(name), tensors, strict=True):
            key = inner + written
            module = key.rpartition('.')[0]  # its buffers lie beside its parameters
            exported[key] = tensor.clone(memory_format=torch.contiguous_format)
            if name.role == 'logit_scale' and layout.coordinates:
                exported[f'{module}.{COORDINATES}'] = own[target.names[our_name].replace('logit_scale', COORDINATES)]
            if name.role in ('table', 'logit_scale') and layout.index is not None:
                # The row in the table of each pair of tokens, (T, T): what expands the table expands its row numbers.
                window = target.spec.windows[name.stage]
                rows = torch.arange(math.prod(offsets(window)))
                index = relative_position_bias(rows[:, None], window)[0]
                exported[f'{module}.relative_position_index'] = index.flatten() if layout.index == 'flat' else index
    return exported


def as_checkpoint(state_dict: Mapping[str, Tensor], family: str, flat: bool) -> dict[str, Any]:
    """Return a state dict of a family with the prefix and, unless ``flat``, the nesting that its loader expects."""
    key, prefix = _LOCATIONS.get(family, (None, ''))
    prefixed = {prefix + name: tensor for name, tensor in state_dict.items()}
    return prefixed if flat or key is None else {key: prefixed}


def write_file(path: Path, checkpoint: Mapping[str, Any], force: bool = False) -> Path:
    """Write a checkpoint atomically, for the suffix .safetensors a flat dict of tensors, and return its path.

    Raises:
        OSError: the file cannot be written, because the disk is full, say.
        ValueError: the file exists, and ``force`` is False.
    """
    check_destination(path, force)
    if path.suffix == '.safetensors':
        packages.require('a .safetensors file', 'safetensors')
        write_tensors(path, checkpoint)
        return path
    # Given a path, torch would store the temporary name in the file.
    with atomic_path(path) as unfinished, unfinished.open('wb') as file:
        try:
            torch.save(checkpoint, file)
        except (OSError, RuntimeError) as error:  # torch's own writer raises the latter on a full disk
            raise OSError(f'{path} cannot be written: {error}') from error
    return path


def _join_biases(parameters: dict[str, Tensor]) -> None:
    """Join the query and value biases of V2 into one qkv bias, with a key bias of zeros."""
    for name in [ours for ours in parameters if ours.endswith('.q_bias')]:
        q_bias = parameters.pop(name)
        stem = name.removesuffix('q_bias')
        v_bias = parameters.pop(f'{stem}v_bias')
        parameters[f'{stem}qkv.bias'] = torch.cat([q_bias, torch.zeros_like(q_bias), v_bias])

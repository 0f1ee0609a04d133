"""Write the weights of a backbone as another code base names and lays them out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from swin_dense.checkpoint import v2
from swin_dense.checkpoint.families import EXPORTED, EXPORTED_V2
from swin_dense.checkpoint.names import MMDET
from swin_dense.checkpoint.target import Target
from swin_dense.ops.windows import Pair
from swin_dense.utils import checks

# Where the files of a family keep the backbone: the key of the state dict, if any, and the prefix of its names.
_PLACES = {
    'official': ('model', ''),
    'mmdet': ('state_dict', 'backbone.'),
    'mmseg': ('state_dict', 'backbone.'),
    'mmpretrain': ('state_dict', 'backbone.'),
}


def export_state_dict(backbone: nn.Module, family: str = 'mmdet') -> dict[str, Tensor]:
    """Return a copy of the weights of a backbone, named and laid out as in another code base.

    Loading the result here gives the same weights, bit for bit.

    Args:
        backbone: a SwinBackbone.
        family: 'official' (detection and segmentation), 'mmdet', 'mmseg', 'mmpretrain', 'timm', 'torchvision' or
            'transformers' (``SwinBackbone`` of 5.x). timm and torchvision have no norms of outputs: ``norm0`` to
            ``norm3`` keep their names, for ``strict=False`` there. mmdet and mmseg have no Swin V2, and the one of
            transformers, ``Swinv2Backbone``, has no norms of outputs either.

    Raises:
        ValueError: the family is unknown, or has no Swin V2.
        TypeError: ``backbone`` is no SwinBackbone.

    Examples:
        >>> from swin_dense import SwinBackbone
        >>> weights = export_state_dict(SwinBackbone('t'), 'timm')
        >>> weights['layers.0.blocks.0.attn.qkv.weight'].shape
        torch.Size([288, 96])
    """
    target = Target.of(backbone)
    own = dict(backbone.named_parameters(remove_duplicate=False))
    parameters = {name: own[key].detach() for name, key in target.names.items()}
    return export_parameters(parameters, family, target)


def export_parameters(parameters: Mapping[str, Tensor], family: str, target: Target) -> dict[str, Tensor]:
    """Return a copy of parameters of ours, all or some, named and laid out as in another code base.

    Args:
        parameters: our name to tensor.
        family: see :func:`export_state_dict`.
        target: the backbone that the parameters fit.
    """
    checks.one_of('family', family, EXPORTED)
    layout = EXPORTED[family]
    if target.version == 2:
        if family not in EXPORTED_V2:
            raise ValueError(f'{family} has no Swin V2; family must be one of {list(EXPORTED_V2)}')
        layout = EXPORTED_V2[family]
    if layout.joined_bias:
        parameters = v2.join_biases(parameters)
    exported = {}
    for our_name, parameter in parameters.items():
        name = MMDET.read(our_name)
        if name is None:
            raise ValueError(
                f'{our_name!r} is no parameter of a Swin Transformer, so no other code base has a name for it'
            )
        inner = '' if name.role == 'out_norm' else layout.inner
        for key, tensor in zip(layout.write(name), layout.encode(name, parameter, target.grid), strict=True):
            exported[inner + key] = tensor.clone(memory_format=torch.contiguous_format)
            if name.role == 'logit_scale' and layout.coordinates:
                trained = target.trained_windows[name.stage or 0]
                exported[key.replace('logit_scale', v2.COORDINATES)] = v2.coordinates_of(target.window, trained)
            if name.role in ('table', 'logit_scale') and layout.index is not None:
                index = _position_index(target.window)
                index_key = key.rpartition('.')[0] + '.relative_position_index'
                exported[inner + index_key] = index.flatten() if layout.index == 'flat' else index
    return exported


def as_checkpoint(state_dict: Mapping[str, Tensor], family: str, flat: bool) -> dict[str, Any]:
    """Return what a file of a family holds, so that its own loader finds the weights.

    Args:
        state_dict: from :func:`export_state_dict`.
        family: the same.
        flat: leave out the key around the state dict, as files of safetensors have none.
    """
    key, prefix = _PLACES.get(family, (None, ''))
    prefixed = {prefix + name: tensor for name, tensor in state_dict.items()}
    return prefixed if flat or key is None else {key: prefixed}


def _position_index(window: Pair) -> Tensor:
    """Return the row of the bias table for each pair of tokens of a window, (T, T)."""
    height, width = window
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing='ij')
    row_offsets = rows.flatten()[:, None] - rows.flatten()[None] + height - 1
    column_offsets = columns.flatten()[:, None] - columns.flatten()[None] + width - 1
    return row_offsets * (2 * width - 1) + column_offsets

"""Write the weights of a backbone as another code base names and lays them out."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from swin_dense import checks
from swin_dense.checkpoint.families import EXPORTED, OFFICIAL, plain_name


def export_state_dict(backbone: nn.Module, family: str = 'mmdet') -> dict[str, Tensor]:
    """Return a copy of the weights of a backbone, named and laid out as in another code base.

    Loading the result here gives the same weights, bit for bit.

    Args:
        backbone: a SwinBackbone.
        family: 'official' (detection and segmentation), 'mmdet', 'mmseg', 'mmpretrain', 'timm', 'torchvision' or
            'transformers' (5.x, ``SwinBackbone``). timm and torchvision have no norms of outputs: ``norm0`` to
            ``norm3`` keep their names, for ``strict=False`` there.

    Raises:
        ValueError: the family is unknown, or a name of the backbone is none of a Swin.
    """
    checks.one_of('family', family, EXPORTED)
    layout = EXPORTED[family]
    exported = {}
    for own_name, parameter in backbone.named_parameters():
        name = OFFICIAL.read(plain_name(own_name))
        if name is None:
            raise ValueError(
                f'the parameter {own_name!r} is none of a Swin; pass the backbone, not the model around it'
            )
        inner = '' if name.role == 'out_norm' else layout.inner
        for key, tensor in zip(layout.write(name), layout.encode(name, parameter.detach()), strict=True):
            exported[inner + key] = tensor.clone(memory_format=torch.contiguous_format)
            if name.role == 'table' and layout.index is not None:
                index = _position_index(backbone.window_size)  # type: ignore[arg-type]
                index_key = key.replace('relative_position_bias_table', 'relative_position_index')
                exported[inner + index_key] = index.flatten() if layout.index == 'flat' else index
    return exported


def _position_index(window: tuple[int, int]) -> Tensor:
    """Return the row of the bias table for each pair of tokens of a window, (T, T)."""
    height, width = window
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing='ij')
    row_offsets = rows.flatten()[:, None] - rows.flatten()[None] + height - 1
    column_offsets = columns.flatten()[:, None] - columns.flatten()[None] + width - 1
    return row_offsets * (2 * width - 1) + column_offsets

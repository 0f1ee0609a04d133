"""Conversions specific to Swin V2 checkpoints: concatenated biases, and coordinate buffers that determine windows."""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping

import torch
from torch import Tensor

from swin_dense.ops.windows import Pair, log_spaced_offsets

COORDINATES = 'relative_coords_table'
_JOINED = '.attn.w_msa.qkv.bias'


def split_biases(parameters: MutableMapping[str, Tensor], keys: MutableMapping[str, list[str]]) -> None:
    """Split each qkv bias in place into a query and a value bias. The key bias has no effect and is dropped.

    Args:
        parameters: maps our parameter names to tensors.
        keys: maps our parameter names to their keys in the checkpoint.
    """
    for name in [name for name in parameters if name.endswith(_JOINED)]:
        q_bias, _, v_bias = parameters.pop(name).chunk(3)
        stem = name.removesuffix('qkv.bias')
        parameters.update({f'{stem}q_bias': q_bias, f'{stem}v_bias': v_bias})
        keys[f'{stem}q_bias'] = keys[f'{stem}v_bias'] = keys.pop(name)


def join_biases(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Undo :func:`split_biases`, with a key bias of zeros."""
    joined = {name: tensor for name, tensor in parameters.items() if not name.endswith(('.q_bias', '.v_bias'))}
    for name, q_bias in parameters.items():
        if name.endswith('.q_bias'):
            stem = name.removesuffix('q_bias')
            joined[f'{stem}qkv.bias'] = torch.cat([q_bias, torch.zeros_like(q_bias), parameters[f'{stem}v_bias']])
    return joined


def window_of(coordinates: Tensor) -> Pair:
    """Return the window of a coordinate buffer from its shape; see :func:`trained_window`."""
    return (coordinates.shape[-3] + 1) // 2, (coordinates.shape[-2] + 1) // 2


def trained_window(coordinates: Tensor) -> Pair | None:
    """Return the pretraining window to which a coordinate buffer is scaled, or None if its values do not determine it.

    Args:
        coordinates: the buffer ``relative_coords_table``, (1, 2 * window height - 1, 2 * window width - 1, 2).
    """
    sides = []
    for axis, side in enumerate(window_of(coordinates)):
        outermost = coordinates[..., axis].abs().max().item()
        if not 0 < outermost < math.inf:
            return None
        sides.append(1 + round(8 * (side - 1) / (8**outermost - 1)))
    return sides[0], sides[1]


def coordinates_of(window: Pair, trained: Pair) -> Tensor:
    """Return the coordinate buffer of a window, scaled to the pretraining window; see :func:`trained_window`."""
    return log_spaced_offsets(window, trained).view(1, 2 * window[0] - 1, 2 * window[1] - 1, 2)

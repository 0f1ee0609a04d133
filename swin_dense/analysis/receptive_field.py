"""Exact receptive fields of the tokens after every block, whose growth determines the overlap of tiles.

A block mixes the tokens of a window and, with a shift, of a region; convolutions of an adapter add neighbours. All are
rectangles, so the receptive field of a token is also a rectangle, and rows and columns can be computed separately.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from swin_dense.ops.plain import partition
from swin_dense.ops.windows import Pair, region_ids, window_grid


@dataclass(frozen=True)
class ReceptiveField:
    """The receptive fields of the tokens of one map."""

    rows: Tensor  # (H, 2), for each row of tokens the half-open range of pixel rows that can influence it
    columns: Tensor  # (W, 2), likewise


def token_receptive_fields(backbone: Any, image_size: Pair) -> list[list[ReceptiveField]]:
    """Return the receptive fields of the tokens after every block of every stage, for an image of (height, width)."""
    pixels = [torch.arange(side)[:, None] + torch.tensor([0, 1]) for side in image_size]
    rows, columns = (_joined(spans, backbone.strides[0], backbone.strides[0]) for spans in pixels)
    stages = []
    for stage in backbone.stages:
        blocks = []
        for block in stage.blocks:
            window, shift = block.attn.windows_on(len(rows), len(columns))
            rows = _shared(rows, _groups(len(rows), window[0], shift[0]))
            columns = _shared(columns, _groups(len(columns), window[1], shift[1]))
            rows, columns = (_widened(spans, block.conv_reach) for spans in (rows, columns))
            blocks.append(ReceptiveField(rows, columns))
        stages.append(blocks)
        if stage.downsample is not None:
            rows, columns = (_joined(spans, 2, stage.downsample.stride) for spans in (rows, columns))
    return stages


def _joined(spans: Tensor, count: int, stride: int) -> Tensor:
    """Return the union of the spans of ``count`` neighbours at every ``stride``, clipped at the end."""
    first = torch.arange(window_grid(len(spans), 1, (stride, 1))[0]) * stride
    last = (first + count - 1).clamp(max=len(spans) - 1)
    return torch.stack([spans[first, 0], spans[last, 1]], 1)


def _widened(spans: Tensor, by: int) -> Tensor:
    """Return for every token the union of the spans of its neighbours up to ``by`` tokens away."""
    tokens = torch.arange(len(spans))
    first, last = (tokens - by).clamp(min=0), (tokens + by).clamp(max=len(spans) - 1)
    return torch.stack([spans[first, 0], spans[last, 1]], 1)


def _groups(length: int, window: int, shift: int) -> Tensor:
    """Return a group number per token along one axis, (length,), equal for tokens of one window and region."""
    tokens = partition(torch.arange(1, length + 1)[None, :, None, None], (window, 1), (shift, 0))[0, :, :, 0]
    regions = region_ids(length, 1, (window, 1), (shift, 0))
    numbers = torch.arange(len(tokens))[:, None] * (int(regions.max()) + 1) + regions
    groups = torch.empty(length + 1, dtype=torch.long)
    groups[tokens.flatten()] = numbers.flatten()  # index 0 is padding, which has no receptive field
    return groups[1:]


def _shared(spans: Tensor, groups: Tensor) -> Tensor:
    """Return for every token the union of the spans of its group."""
    index = groups[:, None]
    low = torch.zeros(int(groups.max()) + 1, dtype=spans.dtype)
    first = low.scatter_reduce(0, groups, spans[:, 0], 'amin', include_self=False)
    last = low.scatter_reduce(0, groups, spans[:, 1], 'amax', include_self=False)
    return torch.cat([first[index], last[index]], 1)

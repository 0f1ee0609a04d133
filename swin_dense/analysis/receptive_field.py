"""Which pixels can have influenced a token, after every block: the growth that decides how far tiles overlap.

A block joins what shares a window and, under the shift, a region. Windows and regions are rectangles, so what a token
depends on is one as well, and rows and columns can be followed apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from swin_dense.ops.windows import Pair, partition, region_ids, window_grid


@dataclass(frozen=True)
class ReceptiveField:
    """What the tokens of one map depend on.

    Attributes:
        rows: (H, 2), for each row of tokens the first row of pixels that can have influenced it and the one behind the
            last.
        columns: (W, 2), likewise.
    """

    rows: Tensor
    columns: Tensor


def token_receptive_fields(backbone: Any, image_size: Pair) -> list[list[ReceptiveField]]:
    """Return what the tokens depend on after every block of every stage.

    Args:
        backbone: a :class:`swin_dense.SwinBackbone`.
        image_size: (height, width) in pixels.
    """
    pixels = [torch.arange(side)[:, None] + torch.tensor([0, 1]) for side in image_size]
    rows, columns = (_joined(spans, backbone.strides[0], backbone.strides[0]) for spans in pixels)
    stages = []
    for stage in backbone.stages:
        blocks = []
        for block in stage.blocks:
            window, shift = block.attn.windows_on(len(rows), len(columns))
            rows = _shared(rows, _groups(len(rows), window[0], shift[0]))
            columns = _shared(columns, _groups(len(columns), window[1], shift[1]))
            blocks.append(ReceptiveField(rows, columns))
        stages.append(blocks)
        if stage.downsample is not None:
            rows, columns = (_joined(spans, 2, stage.downsample.stride) for spans in (rows, columns))
    return stages


def _joined(spans: Tensor, count: int, stride: int) -> Tensor:
    """Return the spans of ``count`` neighbours every ``stride``, as far as there are so many."""
    first = torch.arange(window_grid(len(spans), 1, (stride, 1))[0]) * stride
    last = (first + count - 1).clamp(max=len(spans) - 1)
    return torch.stack([spans[first, 0], spans[last, 1]], 1)


def _groups(length: int, window: int, shift: int) -> Tensor:
    """Number, along one axis, the tokens so that those of one window and region have the same number: (length,)."""
    tokens = partition(torch.arange(1, length + 1)[None, :, None, None], (window, 1), (shift, 0))[0, :, :, 0]
    regions = region_ids(length, 1, (window, 1), (shift, 0))
    numbers = torch.arange(len(tokens))[:, None] * (int(regions.max()) + 1) + regions
    groups = torch.empty(length + 1, dtype=torch.long)
    groups[tokens.flatten()] = numbers.flatten()  # 0 stands for padding, which knows of no pixel
    return groups[1:]


def _shared(spans: Tensor, groups: Tensor) -> Tensor:
    """Return for every token the span of all of its group."""
    index = groups[:, None]
    low = torch.zeros(int(groups.max()) + 1, dtype=spans.dtype)
    first = low.scatter_reduce(0, groups, spans[:, 0], 'amin', include_self=False)
    last = low.scatter_reduce(0, groups, spans[:, 1], 'amax', include_self=False)
    return torch.cat([first[index], last[index]], 1)

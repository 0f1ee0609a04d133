"""Exact receptive fields of the tokens after every block, whose growth determines the overlap of tiles.

A block mixes the tokens of a window and, with a shift, of a region. All are
rectangles, so the receptive field of a token is also a rectangle, and rows and columns can be computed separately.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from swin_dense.models.swin import SwinBackbone
from swin_dense.ops.windows import Size


@dataclass(frozen=True)
class ReceptiveField:
    """The receptive fields of the tokens of one map."""

    rows: Tensor  # (H, 2), for each row of tokens the half-open range of pixel rows that can influence it
    columns: Tensor  # (W, 2), likewise


def token_receptive_fields(backbone: SwinBackbone, image_size: Size) -> list[list[ReceptiveField]]:
    """Return the receptive fields of the tokens after every block of every stage, for an image of (height, width)."""
    pixels = [torch.arange(side)[:, None] + torch.tensor([0, 1]) for side in image_size]
    rows, columns = (_joined(spans, backbone.strides[0], backbone.strides[0]) for spans in pixels)
    built: Any = backbone.stages  # of SwinStage; a ModuleList has no type of its entries
    stages = []
    for stage in built:
        blocks = []
        for block in stage.blocks:
            window, shift = block.attn.windows_on(len(rows), len(columns))
            rows, columns = _shared(rows, window[0], shift[0]), _shared(columns, window[1], shift[1])
            blocks.append(ReceptiveField(rows, columns))
        stages.append(blocks)
        if stage.downsample is not None:
            rows, columns = (_joined(spans, 2, stage.downsample.stride) for spans in (rows, columns))
    return stages


def _union(spans: Tensor, first: Tensor, last: Tensor) -> Tensor:
    """Return the unions of the spans from ``first`` to ``last``; a later token never has an earlier span."""
    last = last.clamp(max=len(spans) - 1)
    return torch.stack([spans[first, 0], spans[last, 1]], 1)


def _joined(spans: Tensor, count: int, stride: int) -> Tensor:
    """Return the union of the spans of ``count`` neighbours at every ``stride``."""
    first = torch.arange(0, len(spans), stride)
    return _union(spans, first, first + count - 1)


def _shared(spans: Tensor, window: int, shift: int) -> Tensor:
    """Return for every token the union of the spans of its window; the first ``shift`` tokens form a region."""
    tokens = torch.arange(len(spans))
    is_first = tokens < shift
    first = torch.where(is_first, 0, shift + (tokens - shift) // window * window)
    last = torch.where(is_first, shift, first + window) - 1
    return _union(spans, first, last)

"""Which tiles give the features of a large image.

Tiles start and end at window borders of every stage, so the windows of a tile are windows of the image. Near the sides
of a tile, shifted windows lack the pixels beyond it. The error spreads by a known number of cells per block, so an
overlap of :func:`exact_overlap` gives the features of the whole image, and a smaller overlap approximates them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from swin_dense.models.swin import SwinBackbone
from swin_dense.ops.windows import Size
from swin_dense.utils import checks


class Tiling(NamedTuple):
    """Tile size and overlap in pixels, checked by :func:`check_tiling`."""

    tile: Size  # (height, width)
    overlap: Size  # (vertical, horizontal), read beyond each side of a tile


def tile_alignment(backbone: SwinBackbone) -> Size:
    """Return the (vertical, horizontal) period in pixels at which the windows of all stages are aligned."""
    strides = _stage_strides(backbone)
    stages = zip(strides, backbone.windows, strict=False)  # those above the last output are not built
    periods = [(stride * height, stride * width) for stride, (height, width) in stages]
    vertical, horizontal = zip(*periods, strict=True)
    return math.lcm(*vertical), math.lcm(*horizontal)


def exact_overlap(backbone: SwinBackbone, levels: Sequence[int]) -> Size:
    """Return the smallest aligned overlap, (vertical, horizontal) in pixels, that gives the whole image's features."""
    alignment = tile_alignment(backbone)
    reach = [_reach(backbone, levels, axis) for axis in range(2)]
    vertical, horizontal = (-(-side // period) * period for side, period in zip(reach, alignment, strict=True))
    return vertical, horizontal


def check_tiling(backbone: SwinBackbone, tile: Any, overlap: Any, levels: Sequence[int]) -> Tiling:
    """Validate the arguments ``tile`` and ``overlap`` of :func:`swin_dense.extract_pyramid`."""
    if backbone.absolute_pos_embed is not None:
        raise ValueError('tile= cannot be used with use_abs_pos_embed=True, which is resized to the whole image')
    if backbone.clamp_window:
        raise ValueError(
            'tile= cannot be used with clamp_window=True, whose windows depend on the size of the whole image; build '
            'the backbone with clamp_window=False, which gives the same where every map is larger than its window'
        )
    alignment = tile_alignment(backbone)
    sides = checks.pair('tile', tile)
    margins = exact_overlap(backbone, levels) if overlap is None else checks.pair('overlap', overlap, minimum=0)
    for name, given in (('tile', sides), ('overlap', margins)):
        for value, period in zip(given, alignment, strict=True):
            if value % period:
                below = value // period * period
                near = f'{below} or {below + period}' if below else period
                raise ValueError(
                    f'{name} must be a multiple of {period} pixels, so that the windows of all stages '
                    f'are aligned, got {value}; use {near}'
                )
    return Tiling(sides, margins)


def _stage_strides(backbone: SwinBackbone) -> list[int]:
    return [math.prod(backbone.strides[: stage + 1]) for stage in range(len(backbone.stages))]


def _reach(backbone: SwinBackbone, levels: Sequence[int], axis: int) -> int:
    """Return the distance in pixels from a tile's side up to which the maps differ from those of the whole image.

    The loop tracks, block by block and for each side, the number of cells inside the tile whose values differ.
    Attention spreads a difference over the whole window. Of a shifted window that crosses a border, ``shift`` cells lie
    inside a tile that begins there, and ``window - shift`` inside a tile that ends there.
    """
    stages: Any = backbone.stages  # of SwinStage; a ModuleList has no type of its entries
    reach = 0
    for is_end in (False, True):
        cells = 0
        for stage, stride, sides in zip(stages, _stage_strides(backbone), backbone.windows, strict=False):
            if stride > max(levels):
                break
            window = sides[axis]
            for block in stage.blocks:
                shift = block.attn.shift[axis]
                inside = window - shift if shift and is_end else shift
                cells = inside + -(-max(cells - inside, 0) // window) * window
            if stride in levels:
                reach = max(reach, cells * stride)
            if stage.downsample is not None:
                # A merged cell covers two cells from a multiple of the stride on, and at stride 1 crosses the end.
                merging = stage.downsample.stride
                cells = (cells + 1) // merging if is_end else -(-cells // merging)
    return reach

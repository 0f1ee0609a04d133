"""The pyramid of an image that is too large for memory, tile by tile.

Tiles start and end where windows of every stage do, so the windows of a tile are windows of the image. What is
missing at the side of a tile is what shifted windows would have brought in from beyond it. That travels a known
number of cells per block, so with an overlap of :func:`exact_overlap` nothing is missing; less is an approximation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from swin_dense.features.decode import Box
from swin_dense.features.images import to_tensor
from swin_dense.features.inference import Inference, Tiling, run_batch
from swin_dense.features.regions import LargeImage
from swin_dense.ops.windows import Pair
from swin_dense.utils import checks

# Per stride, the rows and columns of the level that a tile fills, and their values (C, rows, columns).
Blocks = dict[int, tuple[slice, slice, Tensor]]


@dataclass(frozen=True)
class Tile:
    """A part of an image, as boxes (top, left, bottom, right) in pixels.

    Attributes:
        kept: the pixels that the tile answers for; together the tiles cover the image once.
        read: ``kept`` and the overlap around it, within the image.
    """

    kept: Box
    read: Box


def tile_alignment(backbone: Any) -> Pair:
    """Return, in (vertical, horizontal) pixels, the period at which windows of all stages start together."""
    strides = _stage_strides(backbone)
    vertical, horizontal = (math.lcm(*(stride * side for stride in strides)) for side in backbone.window_size)
    return vertical, horizontal


def exact_overlap(backbone: Any, levels: Sequence[int]) -> Pair:
    """Return the smallest overlap, in (vertical, horizontal) pixels, with which tiles give what the image gives."""
    alignment = tile_alignment(backbone)
    vertical, horizontal = (
        -(-_reach(backbone, levels, axis) // alignment[axis]) * alignment[axis] for axis in range(2)
    )
    return vertical, horizontal


def check_tiling(backbone: Any, tile: Any, overlap: Any, levels: Sequence[int]) -> Tiling:
    """Return tile and overlap as (height, width) in pixels, or say why they will not do.

    Args:
        backbone: what will run on the tiles.
        tile: one integer or (height, width).
        overlap: one integer, (vertical, horizontal), or None for :func:`exact_overlap`.
        levels: strides of the maps to compute.

    Raises:
        ValueError: they are no multiples of :func:`tile_alignment`, or the backbone cannot be tiled.
    """
    if backbone.absolute_pos_embed is not None:
        raise ValueError('tile= cannot be used with use_abs_pos_embed=True, which stretches over the whole image')
    alignment = tile_alignment(backbone)
    sides = checks.pair('tile', tile)
    margins = exact_overlap(backbone, levels) if overlap is None else checks.pair('overlap', overlap, minimum=0)
    for name, given in (('tile', sides), ('overlap', margins)):
        for value, period in zip(given, alignment, strict=True):
            if value % period:
                below = value // period * period
                near = f'{below} or {below + period}' if below else period
                raise ValueError(
                    f'{name} must be a multiple of {period} pixels, where windows of all stages start together, '
                    f'got {value}; use {near}'
                )
    return Tiling(sides, margins)


def plan_tiles(image_size: Pair, tile: Pair, overlap: Pair) -> list[Tile]:
    """Cut an image of (height, width) pixels into tiles, in row-major order."""
    height, width = image_size
    tiles = []
    for top in range(0, height, tile[0]):
        for left in range(0, width, tile[1]):
            bottom, right = min(top + tile[0], height), min(left + tile[1], width)
            read = (
                max(top - overlap[0], 0),
                max(left - overlap[1], 0),
                min(bottom + overlap[0], height),
                min(right + overlap[1], width),
            )
            tiles.append(Tile((top, left, bottom, right), read))
    return tiles


def level_size(image_size: Pair, stride: int) -> Pair:
    """Return (height, width) in cells of a level of an image."""
    return -(-image_size[0] // stride), -(-image_size[1] // stride)


def run_tiles(backbone: Any, image: LargeImage, inference: Inference) -> Iterator[Blocks]:
    """Compute the pyramid of an image tile by tile, in row-major order; without tiling, in one tile."""
    tile, overlap = inference.tiling or Tiling(image.size, (0, 0))
    for part in plan_tiles(image.size, tile, overlap):
        pixels = to_tensor(image.read(*part.read), backbone.in_channels, image.name, inference.check_range)
        maps = run_batch(backbone, inference.normalize(pixels)[None], inference)[0]
        blocks: Blocks = {}
        for stride, level in maps.items():
            top, left = part.kept[0] // stride, part.kept[1] // stride
            bottom, right = -(-part.kept[2] // stride), -(-part.kept[3] // stride)
            above, before = part.read[0] // stride, part.read[1] // stride
            values = level[:, top - above : bottom - above, left - before : right - before]
            blocks[stride] = (slice(top, bottom), slice(left, right), values)
        yield blocks


def whole_image(maps: Mapping[int, Tensor]) -> Blocks:
    """Return the maps of an image, {stride: (C, rows, columns)}, as the blocks of a single tile."""
    return {stride: (slice(None), slice(None), level) for stride, level in maps.items()}


def _stage_strides(backbone: Any) -> list[int]:
    return [math.prod(backbone.strides[: stage + 1]) for stage in range(len(backbone.stages))]


def _reach(backbone: Any, levels: Sequence[int], axis: int) -> int:
    """Return how many pixels from a cut the maps of the given levels feel it.

    Followed from block to block is the number of cells before the cut whose values differ from the whole image's. A
    window with one such cell has only such cells. Behind the cut they are never more: of the window that it goes
    through, as many cells lie before it as the window has beyond its shift, and behind it only the shift.
    """
    cells = reach = 0
    window = backbone.window_size[axis]
    for stage, stride in zip(backbone.stages, _stage_strides(backbone), strict=True):
        if stride > max(levels):
            break
        for block in stage.blocks:
            shift = block.attn.shift[axis]
            inside = window - shift if shift else 0
            cells = inside + -(-max(cells - inside, 0) // window) * window
        if stride in levels:
            reach = max(reach, cells * stride)
        if stage.downsample is not None:
            # A merged cell starts at a multiple of the stride and always joins two cells.
            cells = (cells + 1) // stage.downsample.stride
    return reach

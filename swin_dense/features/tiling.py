"""Compute the pyramid of an image that is too large for memory, tile by tile.

Tiles start and end at window borders of every stage, so the windows of a tile are windows of the image. Near the sides
of a tile, shifted windows lack the pixels beyond it. The error spreads by a known number of cells per block, so an
overlap of :func:`exact_overlap` gives the features of the whole image, and a smaller one approximates them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from swin_dense.features.inference import Blocks, run_batch
from swin_dense.images.normalization import Inference, Tiling
from swin_dense.images.pixels import ImageError, LargeImage, name_of, naming
from swin_dense.images.regions import open_large_image
from swin_dense.images.tiles import plan_tiles
from swin_dense.ops.windows import Pair
from swin_dense.utils import checks
from swin_dense.utils.errors import is_out_of_memory


def tile_alignment(backbone: Any) -> Pair:
    """Return the (vertical, horizontal) period in pixels at which the windows of all stages are aligned."""
    strides = _stage_strides(backbone)
    vertical, horizontal = (math.lcm(*(stride * side for stride in strides)) for side in backbone.window_size)
    return vertical, horizontal


def exact_overlap(backbone: Any, levels: Sequence[int]) -> Pair:
    """Return the smallest aligned overlap, (vertical, horizontal) in pixels, that gives the whole image's features."""
    alignment = tile_alignment(backbone)
    reach = [_reach(backbone, levels, axis) for axis in range(2)]
    vertical, horizontal = (-(-one // period) * period for one, period in zip(reach, alignment, strict=True))
    return vertical, horizontal


def check_tiling(backbone: Any, tile: Any, overlap: Any, levels: Sequence[int]) -> Tiling:
    """Validate the arguments ``tile`` and ``overlap`` of :func:`swin_dense.extract_pyramid`."""
    if backbone.absolute_pos_embed is not None:
        raise ValueError(
            f'{checks.argument("tile", ...)} cannot be used with use_abs_pos_embed=True, which is resized to the whole '
            'image'
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
                    f'{checks.argument(name)} must be a multiple of {period} pixels, so that the windows of all stages '
                    f'are aligned, got {value}; use {near}'
                )
    return Tiling(sides, margins)


def run_tiles(backbone: Any, image: LargeImage, inference: Inference) -> Iterator[Blocks]:
    """Compute the pyramid of an image tile by tile, in row-major order; without tiling, as one tile."""
    tile, overlap = inference.tiling or Tiling(image.size, (0, 0))
    for part in plan_tiles(image.size, tile, overlap):
        pixels = image.pixels(part.read)
        with naming(image.source):
            stored = inference.stored(pixels, backbone.in_channels)
        (maps,) = run_batch(backbone, stored[None], inference)
        blocks: Blocks = {}
        for stride, level in maps.items():
            top, left = part.kept[0] // stride, part.kept[1] // stride
            bottom, right = -(-part.kept[2] // stride), -(-part.kept[3] // stride)
            above, before = part.read[0] // stride, part.read[1] // stride
            values = level[:, top - above : bottom - above, left - before : right - before]
            blocks[stride] = (slice(top, bottom), slice(left, right), values)
        yield blocks


def in_tiles(backbone: Any, source: Any, inference: Inference, make_sink: Callable[[Pair], Any]) -> tuple[Pair, Any]:
    """Return the size of an image and what a sink has collected of its tiles, or (0, 0) and an error."""
    try:
        with open_large_image(source, page=inference.page) as image:
            sink = make_sink(image.size)
            for blocks in run_tiles(backbone, image, inference):
                sink.write(blocks)
            return image.size, sink.levels()
    except (ImageError, FileNotFoundError) as error:
        return (0, 0), str(error)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return (0, 0), f'{name_of(source)}: too little memory for one tile; use smaller tiles: {error}'


def _stage_strides(backbone: Any) -> list[int]:
    return [math.prod(backbone.strides[: stage + 1]) for stage in range(len(backbone.stages))]


def _reach(backbone: Any, levels: Sequence[int], axis: int) -> int:
    """Return the distance in pixels from a tile's side up to which the maps differ from those of the whole image.

    The loop tracks, block by block and for each side, the number of cells inside the tile whose values differ.
    Attention spreads a difference over the whole window. Of a shifted window that crosses a border, ``shift`` cells lie
    inside a tile that begins there, and ``window - shift`` inside a tile that ends there.
    """
    reach = 0
    window = backbone.window_size[axis]
    for is_end in (False, True):
        cells = 0
        for stage, stride in zip(backbone.stages, _stage_strides(backbone), strict=True):
            if stride > max(levels):
                break
            for block in stage.blocks:
                shift = block.attn.shift[axis]
                inside = window - shift if shift and is_end else shift
                cells = inside + -(-max(cells - inside, 0) // window) * window
            if stride in levels:
                reach = max(reach, cells * stride)
            if stage.downsample is not None:
                # A merged cell starts at a multiple of the stride and always covers two cells.
                cells = (cells + 1) // stage.downsample.stride
    return reach

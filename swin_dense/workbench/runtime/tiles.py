"""Predict an image too large for memory, or with objects too small for a resized one, tile by tile.

A detection belongs to the tile that contains its centre. An object no larger than the overlap is whole in that tile,
and what other tiles see of it at their border has its centre outside of them: it is found once, as in the whole image.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from swin_dense.utils import checks
from swin_dense.utils.tiles import Tile, plan_tiles
from swin_dense.workbench.runtime import masks
from swin_dense.workbench.runtime.masks import Instances, overlaps

# Two tiles may place a centre on either side of their border: detections count up to this share of their size beyond.
_BEYOND = 0.25
# Boxes of a class with this IoU are one object, and what covers this share of the smaller box may be.
_IOU, _COVERED = 0.5, 0.8


def plan(size: tuple[int, int], tile: int, overlap: int | None, is_detector: bool) -> list[Tile]:
    """Return the tiles of an image; their ``read`` boxes have the same size, as far as the image is as large.

    A model whose pipeline resizes its input then sees all tiles at one scale. The ``read`` boxes of a segmentor begin
    at multiples of what divides tile and overlap: if that is a multiple of the windows of all stages, 224 for most
    Swins, a tile has the windows of the image.

    Args:
        size: (height, width) of the image in pixels.
        tile: side of the tiles in pixels.
        overlap: pixels read beyond each side of a tile; None for a quarter of the tile.
        is_detector: whether the model predicts instances.

    Raises:
        ValueError: a number is too small.
    """
    tile = checks.integer('tile', tile)
    overlap = tile // 4 if overlap is None else checks.integer('overlap', overlap, minimum=0)
    step, seen = 1 if is_detector else math.gcd(tile, overlap), tile + 2 * overlap
    tiles = []
    for part in plan_tiles(size, (tile, tile), (overlap, overlap)):
        top, left, bottom, right = part.read
        top = max(min(top, (size[0] - seen) // step * step), 0)
        left = max(min(left, (size[1] - seen) // step * step), 0)
        bottom = max(bottom, min(top + seen, size[0]))
        right = max(right, min(left + seen, size[1]))
        tiles.append(Tile(part.kept, (top, left, bottom, right)))
    return tiles


class _Detections(NamedTuple):
    """Detections of tiles in pixels of the image.

    Attributes:
        boxes: (N, 4).
        scores: (N,).
        labels: (N,).
        tiles: index of the tile of each, (N,).
        depths: how far their centres lie inside the tile without overlap, in sides of the boxes, (N,).
        masks: (top, left) of the pixels (h, w) of each that counts; None for others.
    """

    boxes: np.ndarray
    scores: np.ndarray
    labels: np.ndarray
    tiles: np.ndarray
    depths: np.ndarray
    masks: list[Any]


def instances(
    tiles: Sequence[Tile], size: tuple[int, int], predict: Callable[[Tile], Instances]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]:
    """Return boxes, scores and labels of the instances of an image by descending score, and their masks in COCO's RLE.

    Args:
        tiles: the tiles of the image.
        size: (height, width) of the image in pixels.
        predict: returns the instances of a tile, in pixels of ``tile.read``.
    """
    of_tiles = [_of_tile(index, tile, predict(tile)) for index, tile in enumerate(tiles)]
    *arrays, cropped = zip(*of_tiles, strict=True)
    found = _Detections._make([*map(np.concatenate, arrays), [mask for part in cropped for mask in part]])
    kept = _without_doubles(found, tiles)
    full = [masks.run_lengths(found.masks[i][2], found.masks[i][:2], size) for i in kept if found.masks]
    return found.boxes[kept], found.scores[kept], found.labels[kept], full


def labels(tiles: Sequence[Tile], predict: Callable[[Tile], np.ndarray], out: Any) -> np.ndarray:
    """Write the class of every pixel into ``out``, an array (H, W) or what is assigned to as one; count the classes.

    Args:
        tiles: the tiles of the image.
        predict: returns the classes of a tile, those of ``tile.read``.
        out: receives the classes of every tile without its overlap.

    Returns:
        The number of pixels of every class up to the largest.
    """
    counts = np.zeros(0, np.int64)
    for tile in tiles:
        top, left, bottom, right = tile.kept
        above, before = top - tile.read[0], left - tile.read[1]
        part = predict(tile)[above : above + bottom - top, before : before + right - left]
        out[top:bottom, left:right] = part
        more = np.bincount(part.ravel(), minlength=len(counts))
        more[: len(counts)] += counts
        counts = more
    return counts


def _of_tile(index: int, tile: Tile, found: Instances) -> _Detections:
    """Return the detections of a tile, with the masks of those that count."""
    boxes, scores, numbers, full = found
    boxes = boxes.reshape(-1, 4) + np.array([tile.read[1], tile.read[0]] * 2, np.float32)
    centres, sides = (boxes[:, :2] + boxes[:, 2:]) / 2, np.maximum(boxes[:, 2:] - boxes[:, :2], 1e-6)
    top, left, bottom, right = tile.kept
    depths = (np.minimum(centres - (left, top), (right, bottom) - centres) / sides).min(1)
    cropped = [_cropped(mask, tile) if depth > -_BEYOND else None for mask, depth in zip(full, depths, strict=False)]
    return _Detections(boxes, scores, numbers, np.full(len(boxes), index), depths, cropped)


def _cropped(mask: np.ndarray, tile: Tile) -> tuple[int, int, np.ndarray]:
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    if not len(rows):
        return tile.read[0], tile.read[1], mask[:0, :0]
    part = mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].copy()
    return tile.read[0] + int(rows[0]), tile.read[1] + int(columns[0]), part


def _without_doubles(found: _Detections, tiles: Sequence[Tile]) -> np.ndarray:
    """Return the indices of the detections to keep, by descending score.

    Only boxes that reach over, or almost to, a border of their tile can have been found by another one too. Those of
    one tile are never compared: the model has already decided on them. A box that covers another may be the same object
    with another extent, or behind it. The tile of the better one decides: it sees both, and found both or only one.
    """
    order = np.argsort(-found.scores, kind='stable')
    at_border = found.depths < 0.5 + _BEYOND
    is_kept = found.depths > -_BEYOND
    for index in order:
        if not (is_kept[index] and at_border[index]):
            continue
        others = is_kept & at_border & (found.tiles != found.tiles[index]) & (found.labels == found.labels[index])
        rivals = np.flatnonzero(others & (found.scores <= found.scores[index]))
        iou, covered = overlaps(found.boxes[index], found.boxes[rivals])
        is_kept[rivals[iou >= _IOU]] = False
        for rival in rivals[(iou < _IOU) & (covered >= _COVERED)]:
            is_kept[rival] = _is_found_beside(index, rival, found, tiles)
    return order[is_kept[order]]


def _is_found_beside(index: int, rival: int, found: _Detections, tiles: Sequence[Tile]) -> bool:
    """Return whether the tile of a detection also found that of another tile, ``rival``, or the part that it sees."""
    top, left, bottom, right = tiles[found.tiles[index]].read
    visible = found.boxes[rival].clip([left, top] * 2, [right, bottom] * 2)
    beside = (found.tiles == found.tiles[index]) & (found.labels == found.labels[index])
    beside[index] = False
    return bool((overlaps(visible, found.boxes[beside])[0] >= _IOU).any())

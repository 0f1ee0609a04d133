"""Predict an image too large for memory, or with objects too small for a resized one, tile by tile.

A detection belongs to the tile that contains its centre. An object no larger than the overlap is whole in that tile,
and what other tiles see of it at their border has its centre outside of them: it is found once, as in the whole image.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from swin_dense.runtime import masks
from swin_dense.runtime.queries import Found
from swin_dense.utils import checks
from swin_dense.utils.tiles import Tile, plan_windows

# Two tiles may place a centre on either side of their border. Detections count up to this share of their size beyond
# it, and of two tiles' detections of a class that overlap by this IoU, the one with the higher score is kept.
_BEYOND, _IOU = 0.25, 0.5


@dataclass(frozen=True)
class Tiling:
    """Side of square tiles and their overlap, in pixels; the overlap is a quarter of the tile if None is given.

    Raises:
        ValueError: a number is too small.
    """

    tile: int
    overlap: int | None = None

    def __post_init__(self) -> None:
        checks.integer('tile', self.tile)
        if self.overlap is None:
            object.__setattr__(self, 'overlap', self.tile // 4)
        checks.integer('overlap', self.overlap, minimum=0)

    def windows(self, size: tuple[int, int], is_detector: bool) -> list[Tile]:
        """Return the tiles of an image of (height, width) pixels.

        Those of a segmentor begin at multiples of what divides tile and overlap: if that is a multiple of the windows
        of all stages, 224 for most Swins, a tile has the windows of the image.
        """
        overlap: Any = self.overlap
        return plan_windows(size, self.tile, overlap, 1 if is_detector else math.gcd(self.tile, overlap))


@dataclass(frozen=True)
class _Detections:
    """Detections of tiles in pixels of the image; each mask is (top, left) of its pixels (h, w)."""

    boxes: np.ndarray
    scores: np.ndarray
    labels: np.ndarray
    tiles: np.ndarray
    masks: list[tuple[int, int, np.ndarray]]


def instances(
    tiles: Sequence[Tile], size: tuple[int, int], predict: Callable[[Tile], Found]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]:
    """Return boxes, scores and labels of the instances of an image by descending score, and their masks in COCO's RLE.

    Args:
        tiles: the tiles of the image.
        size: (height, width) of the image in pixels.
        predict: returns the instances of a tile, in pixels of ``tile.read``.
    """
    found = _joined([_of_tile(index, tile, predict(tile)) for index, tile in enumerate(tiles)])
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


def _of_tile(index: int, tile: Tile, found: Found) -> _Detections:
    """Return the detections that belong to a tile, in pixels of the image."""
    boxes, scores, numbers, full = found
    boxes = boxes.reshape(-1, 4) + np.array([tile.read[1], tile.read[0]] * 2, np.float32)
    own = np.flatnonzero((_depth(boxes, tile) > -_BEYOND).all(1))
    cropped = [_cropped(full[i], tile) for i in own if len(full)]
    return _Detections(boxes[own], scores[own], numbers[own], np.full(len(own), index), cropped)


def _depth(boxes: np.ndarray, tile: Tile) -> np.ndarray:
    """Return how far the centres of boxes lie inside a tile without overlap, (N, 2), in sides of the boxes."""
    centres, sides = (boxes[:, :2] + boxes[:, 2:]) / 2, np.maximum(boxes[:, 2:] - boxes[:, :2], 1e-6)
    top, left, bottom, right = tile.kept
    return np.minimum(centres - (left, top), (right, bottom) - centres) / sides


def _cropped(mask: np.ndarray, tile: Tile) -> tuple[int, int, np.ndarray]:
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    if not len(rows):
        return tile.read[0], tile.read[1], mask[:0, :0]
    part = mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].copy()
    return tile.read[0] + int(rows[0]), tile.read[1] + int(columns[0]), part


def _joined(parts: list[_Detections]) -> _Detections:
    boxes, scores, labels, tiles = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ('boxes', 'scores', 'labels', 'tiles')
    )
    return _Detections(boxes, scores, labels, tiles, [mask for part in parts for mask in part.masks])


def _without_doubles(found: _Detections, tiles: Sequence[Tile]) -> np.ndarray:
    """Return the indices of the detections to keep, by descending score.

    Only detections near a border of their tile can have been found by another one too. Those of one tile are never
    compared: the model has already decided on them.
    """
    order = np.argsort(-found.scores, kind='stable')
    depths = np.array([_depth(found.boxes[i : i + 1], tiles[found.tiles[i]]).min() for i in range(len(order))])
    at_border = depths < 2 * _BEYOND
    is_kept = np.ones(len(order), bool)
    for index in order:
        if not (is_kept[index] and at_border[index]):
            continue
        others = is_kept & at_border & (found.tiles != found.tiles[index]) & (found.labels == found.labels[index])
        others &= found.scores <= found.scores[index]
        rivals = np.flatnonzero(others)
        is_kept[rivals[_iou(found.boxes[index], found.boxes[rivals]) >= _IOU]] = False
    return order[is_kept[order]]


def _iou(box: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    common = np.minimum(box[2:], boxes[:, 2:]) - np.maximum(box[:2], boxes[:, :2])
    overlap = common.clip(0).prod(1)
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(1)
    return overlap / np.maximum((box[2:] - box[:2]).prod() + areas - overlap, 1e-9)

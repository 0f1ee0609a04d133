"""Masks of objects in COCO's format: their run lengths, decoded before pycocotools reads them, and their place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from pycocotools import mask as mask_tools

from swin_dense.workbench.configs.hints import is_no_polygon

if TYPE_CHECKING:
    from swin_dense.workbench.configs.stated import StatedObject

_TOLERANCE = 2.0  # pixels between a mask and its box
_MOST_CHARACTERS = 12  # of a number of 60 bits

_NO_MASK = (
    'this recipe needs masks, as lists of polygons or RLE of the size of the image; use one without masks: `swin-dense '
    'zoo detection`'
)
_ELSEWHERE = 'the mask covers nothing, or lies elsewhere than bbox; write pixels, not shares of the image'
_BY_ROWS = "the run lengths of RLE fit bbox only if they run along rows, but COCO's run down columns (order='F')"
Bounds = tuple[float, float, float, float]  # left, top, right and bottom in pixels


class Mask(NamedTuple):
    """How a mask lies in its box.

    Attributes:
        fault: what to do about it, or ''.
        beyond: the pixels that it reaches beyond its box.
        filled: the share of its box that its bounds fill.
    """

    fault: str = ''
    beyond: float = 0.0
    filled: float = 1.0


def check_mask(one: StatedObject) -> Mask:
    """Compare the mask of an object with its box; :func:`check_numbers` must have checked its numbers."""
    mask = one.entry.get('segmentation')
    are_lists = isinstance(mask, list) and all(isinstance(part, list) for part in mask)
    if not mask or not (are_lists or isinstance(mask, dict)):
        return Mask(_NO_MASK)
    place, box = bounds_of(mask), one.box
    beyond = _beyond(place, box)
    if isinstance(mask, dict) and beyond > _TOLERANCE:
        left, top, right, bottom = bounds_of({**mask, 'size': mask['size'][::-1]})
        if left < right and _beyond((top, left, bottom, right), box) <= _TOLERANCE:
            return Mask(_BY_ROWS)
    between = max(place[0] - box[2], place[1] - box[3], box[0] - place[2], box[1] - place[3])
    sides = (place[2] - place[0], place[3] - place[1])
    if min(sides) <= 0 or between >= _TOLERANCE:
        return Mask(_ELSEWHERE)
    if beyond > _TOLERANCE:
        return Mask(beyond=beyond)
    box_sides = (box[2] - box[0], box[3] - box[1])
    is_small = min(box_sides) <= 2 * _TOLERANCE
    return Mask() if is_small else Mask(filled=sides[0] * sides[1] / (box_sides[0] * box_sides[1]))


def bounds_of(mask: Any) -> Bounds:
    """Return the bounds of a mask, polygons or RLE; zeros if it covers nothing."""
    if isinstance(mask, dict):
        lengths = mask if isinstance(mask['counts'], str) else mask_tools.frPyObjects(mask, *mask['size'])
        left, top, width, height = mask_tools.toBbox(lengths).tolist()
        return left, top, left + width, top + height
    polygons = [points for points in mask if not is_no_polygon(points)]
    columns = [number for points in polygons for number in points[0::2]] or [0]
    rows = [number for points in polygons for number in points[1::2]] or [0]
    return min(columns), min(rows), max(columns), max(rows)


def _beyond(place: Bounds, box: Bounds) -> float:
    """Return how far a place reaches beyond a box."""
    return max(box[0] - place[0], box[1] - place[1], place[2] - box[2], place[3] - box[3])


def decode_rle(counts: list[Any] | str) -> np.ndarray:
    """Return the lengths of the runs of RLE, a list or the text that pycocotools writes; none if it is neither."""
    none = np.array([], np.int64)
    if isinstance(counts, list):
        are_lengths = all(type(count) is int and abs(count) < 2**60 for count in counts)
        return np.array(counts, np.int64) if are_lengths else none
    # Each number consists of characters of six bits: five of its digits, the lowest first, and whether more follow.
    characters = np.frombuffer(counts.encode(), np.uint8)
    codes = characters.astype(np.int64) - 48
    is_last = codes & 32 == 0
    if not len(codes) or not is_last[-1]:
        return none
    if codes.min() < 0 or codes.max() > 63:
        return none
    ends = np.flatnonzero(is_last) + 1
    sizes = np.diff(ends, prepend=0)
    if sizes.max() > _MOST_CHARACTERS:
        return none
    starts = ends - sizes
    places = np.arange(len(codes)) - np.repeat(starts, sizes)
    digits = (codes & 31) << 5 * places
    numbers = np.add.reduceat(digits, starts)
    is_negative = codes[ends - 1] & 16 > 0
    numbers -= is_negative * (1 << 5 * sizes)
    # From the fourth on, a number is the difference to that before the last.
    numbers[1::2] = numbers[1::2].cumsum()
    numbers[2::2] = numbers[2::2].cumsum()
    return numbers

"""Look at the masks of annotations in COCO's format, of which pycocotools believes every number.

It reads beyond its buffers for run lengths of another sum than the pixels of the image, and does not return for NaN.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

_LEAST_POINTS = 3  # mmdet leaves out polygons of fewer
_TOLERANCE = 2.0  # pixels between a mask and its box
_MOST_CHARACTERS = 12  # of a number of 60 bits

_NO_MASK = (
    'this recipe needs masks, as lists of polygons or RLE of the size of the image; use one without masks: `swin-dense '
    'zoo detection`'
)
_UNREADABLE = 'write polygons as finite numbers, RLE as lengths that sum to height times width'
_FEW_POINTS = (
    "remove polygons of fewer than three points, or with an odd number of coordinates: COCO's evaluation takes two "
    'points for a box and raises an error for others'
)
_ELSEWHERE = 'the mask covers nothing, or lies elsewhere than bbox; write pixels, not shares of the image'
_BY_ROWS = "the run lengths of RLE fit bbox only if they run along rows, but COCO's run down columns (order='F')"


class Place(NamedTuple):
    """The bounds of a box or mask in pixels; right and bottom are behind its last pixel."""

    left: float
    top: float
    right: float
    bottom: float


EMPTY = Place(0, 0, 0, 0)


class Mask(NamedTuple):
    """What is wrong with a mask, and how it lies in its box.

    Attributes:
        fault: what to do about it, or None.
        left_out: the number of its polygons that mmdet leaves out.
        beyond: the pixels that it reaches beyond its box.
        filled: the share of its box that its bounds fill.
    """

    fault: str | None
    left_out: int = 0
    beyond: float = 0.0
    filled: float = 1.0


def check_mask(annotation: Any, image: Any, is_evaluated: bool) -> Mask:
    """Check the mask of an annotation with a box; ``image`` has the height and the width."""
    mask = annotation.get('segmentation')
    height, width = image['height'], image['width']
    left_out = 0
    by_rows = None
    if isinstance(mask, dict):
        has_runs = isinstance(mask.get('counts'), (list, str))
        if mask.get('size') != [height, width] or not has_runs:
            return Mask(_NO_MASK)
        pixels = height * width
        lengths = decode_rle(mask['counts'])
        is_within = lengths.min(initial=0) >= 0 and lengths.max(initial=0) <= pixels
        if not is_within or lengths.sum() != pixels:
            return Mask(_UNREADABLE)
        place = place_of_runs(lengths, height)
        top, left, bottom, right = place_of_runs(lengths, width)
        by_rows = Place(left, top, right, bottom)
    else:
        are_lists = isinstance(mask, list) and all(isinstance(polygon, list) for polygon in mask)
        if not mask or not are_lists:
            return Mask(_NO_MASK)
        if not all(_are_finite(polygon) for polygon in mask):
            return Mask(_UNREADABLE)
        polygons = []
        for polygon in mask:
            if len(polygon) % 2 == 0 and len(polygon) >= 2 * _LEAST_POINTS:
                polygons.append(polygon)
        left_out = len(mask) - len(polygons)
        if left_out and is_evaluated:
            return Mask(_FEW_POINTS)
        place = EMPTY
        if polygons:
            columns = [number for polygon in polygons for number in polygon[0::2]]
            rows = [number for polygon in polygons for number in polygon[1::2]]
            place = Place(min(columns), min(rows), max(columns), max(rows))
    x, y, box_width, box_height = annotation['bbox']
    box = Place(x, y, x + box_width, y + box_height)
    is_inside = x < width and y < height and box.right > 0 and box.bottom > 0
    if not is_inside or min(box_width, box_height) < 1:  # mmdet leaves out the object
        return Mask(None, left_out)
    is_large = max(box_width, box_height) > _TOLERANCE
    is_share = isinstance(mask, list) and max(place) <= 1 and is_large
    is_empty = is_apart = is_far = False
    for low, high, start, end, side in (
        (place.left, place.right, box.left, box.right, width),
        (place.top, place.bottom, box.top, box.bottom, height),
    ):
        is_empty |= low >= high
        is_apart |= high <= start - _TOLERANCE or low >= end + _TOLERANCE
        is_far |= abs(low) >= side or not 0 < high < 2 * side
    beyond = _beyond(place, box)
    if by_rows and not is_empty and beyond > _TOLERANCE >= _beyond(by_rows, box):
        return Mask(_BY_ROWS)
    if is_share or is_empty or is_apart or is_far:
        return Mask(_ELSEWHERE)
    if beyond > _TOLERANCE or min(box_width, box_height) <= 2 * _TOLERANCE:
        return Mask(None, left_out, beyond if beyond > _TOLERANCE else 0.0)
    filled = (place.right - place.left) * (place.bottom - place.top) / (box_width * box_height)
    return Mask(None, left_out, filled=filled)


def _beyond(place: Place, box: Place) -> float:
    """Return how far a place reaches beyond a box."""
    return max(
        box.left - place.left,
        box.top - place.top,
        place.right - box.right,
        place.bottom - box.bottom,
    )


def _are_finite(values: list[Any]) -> bool:
    try:
        return math.isfinite(sum(values))
    except (TypeError, OverflowError):  # text, and numbers beyond a float
        return False


def place_of_runs(lengths: np.ndarray, height: int) -> Place:
    """Return the bounds of the mask of run lengths in columns of a height; ``EMPTY`` if it covers nothing."""
    ends = lengths.cumsum()
    # Runs alternate between the background, which comes first, and the mask.
    first = (ends - lengths)[1::2]
    last = ends[1::2] - 1
    is_run = last >= first
    first = first[is_run]
    last = last[is_run]
    if not len(first):
        return EMPTY
    left = int(first.min()) // height
    right = int(last.max()) // height + 1
    if (first // height != last // height).any():  # a run into the next column reaches both edges of the image
        return Place(left, 0, right, height)
    top = int((first % height).min())
    bottom = int((last % height).max()) + 1
    return Place(left, top, right, bottom)


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

"""Look at the masks of annotations in COCO's format, of which pycocotools believes every number.

It reads beyond its buffers for run lengths of another sum than the pixels of the image, and does not return for NaN.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

_LEAST_POINTS = 3  # mmdet leaves out polygons of fewer
_TOLERANCE = 2.0  # pixels between a polygon and its box
_MOST_CHARACTERS = 12  # of a number of 60 bits


def is_mask(annotation: Any, image: Any) -> bool:
    """Return whether an annotation has a list of polygons, or RLE of the size of its image."""
    mask = annotation.get('segmentation')
    if isinstance(mask, dict):
        return mask.get('size') == [image['height'], image['width']] and isinstance(mask.get('counts'), (list, str))
    return bool(mask) and isinstance(mask, list) and all(isinstance(polygon, list) for polygon in mask)


def is_readable(annotation: Any, image: Any) -> bool:
    """Return whether polygons are finite numbers, or the run lengths of RLE sum to the pixels of the image."""
    mask = annotation['segmentation']
    if isinstance(mask, list):
        return all(_are_finite(polygon) for polygon in mask)
    lengths, pixels = _run_lengths(mask['counts']), image['height'] * image['width']
    return lengths.min(initial=0) >= 0 and lengths.max(initial=0) <= pixels and lengths.sum() == pixels


def is_in_place(annotation: Any, image: Any) -> bool:
    """Return whether a readable mask covers something, and polygons lie at their box, if mmdet keeps that box."""
    mask = annotation['segmentation']
    left, top, width, height = annotation['bbox']
    is_inside = left < image['width'] and top < image['height'] and left + width > 0 and top + height > 0
    if width < 1 or height < 1 or not is_inside:
        return True
    if isinstance(mask, dict):
        return bool(_run_lengths(mask['counts'])[1::2].any())
    polygons = [polygon for polygon in mask if len(polygon) % 2 == 0 and len(polygon) >= 2 * _LEAST_POINTS]
    if not polygons:
        return False
    is_share = max(map(max, polygons)) <= 1 and max(width, height) > _TOLERANCE  # in 0 to 1
    if is_share:
        return False
    columns = [polygon[0::2] for polygon in polygons]
    rows = [polygon[1::2] for polygon in polygons]
    return _is_near(columns, left, width, image['width']) and _is_near(rows, top, height, image['height'])


def _is_near(polygons: list[list[float]], start: float, length: float, side: float) -> bool:
    """Return whether the coordinates of polygons along an axis fit those of their box and their image, in pixels."""
    low, high = min(map(min, polygons)), max(map(max, polygons))
    is_at_box = low < start + length + _TOLERANCE and high > start - _TOLERANCE
    is_at_image = -side < low < side and 0 < high < 2 * side
    return low < high and is_at_box and is_at_image


def _are_finite(values: list[Any]) -> bool:
    try:
        return math.isfinite(sum(values))
    except (TypeError, OverflowError):  # text, and numbers beyond a float
        return False


def _run_lengths(counts: list[Any] | str) -> np.ndarray:
    """Return the lengths of the runs of RLE, a list or the text that pycocotools writes; none if it is neither."""
    none = np.array([], np.int64)
    if isinstance(counts, list):
        return np.array(counts) if all(type(count) is int for count in counts) else none
    # Each number consists of characters of six bits: five of its digits, the lowest first, and whether more follow.
    codes = np.frombuffer(counts.encode(), np.uint8).astype(np.int64) - 48
    is_last = codes & 32 == 0
    if not len(codes) or codes.min() < 0 or codes.max() > 63 or not is_last[-1]:
        return none
    ends = np.flatnonzero(is_last) + 1
    sizes = np.diff(ends, prepend=0)
    if sizes.max() > _MOST_CHARACTERS:
        return none
    places = np.arange(len(codes)) - np.repeat(ends - sizes, sizes)
    numbers = np.add.reduceat((codes & 31) << 5 * places, ends - sizes)
    is_negative = codes[ends - 1] & 16 > 0
    numbers -= is_negative * (1 << 5 * sizes)
    # From the fourth on, a number is the difference to that before the last.
    numbers[1::2] = numbers[1::2].cumsum()
    numbers[2::2] = numbers[2::2].cumsum()
    return numbers

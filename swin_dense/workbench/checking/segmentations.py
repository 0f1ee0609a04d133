"""Masks of objects in COCO's format: their run lengths, decoded before pycocotools reads them, and their place."""

from __future__ import annotations

from typing import Any

import numpy as np
from pycocotools import mask as mask_tools

from swin_dense.workbench.checking.hints import is_no_polygon

_MOST_CHARACTERS = 12  # of a number of 60 bits
Bounds = tuple[float, float, float, float]  # left, top, right and bottom in pixels


def bounds_of(mask: Any, rows_first: bool = False) -> Bounds:
    """Return the bounds of a mask, polygons or RLE; zeros if it covers nothing.

    With ``rows_first``, polygons are read as y, x, and run lengths along rows, although COCO's run down columns.
    """
    if isinstance(mask, dict):
        mask = {**mask, 'size': mask['size'][::-1]} if rows_first else mask
        lengths = mask_tools.frPyObjects(mask, *mask['size']) if isinstance(mask['counts'], list) else mask
        left, top, width, height = mask_tools.toBbox(lengths).tolist()
        right, bottom = left + width, top + height
    else:
        polygons = [points for points in mask if not is_no_polygon(points)]
        columns = [number for points in polygons for number in points[0::2]] or [0]
        rows = [number for points in polygons for number in points[1::2]] or [0]
        left, top, right, bottom = min(columns), min(rows), max(columns), max(rows)
    return (top, left, bottom, right) if rows_first else (left, top, right, bottom)


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

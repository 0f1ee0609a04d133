"""Which reading of boxes and masks fits their images, and each other: tools write them in several ways.

The question is asked of a file as a whole: where many boxes do not fit, but nearly all would as another reading of the
same numbers, the file has these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from swin_dense.workbench.checking import hints
from swin_dense.workbench.checking.segmentations import bounds_of
from swin_dense.workbench.checking.stated import Source, StatedObject, fault_of_mask
from swin_dense.workbench.configs.coco import shown

TOLERANCE = 2.0  # pixels that a box may reach beyond its image, and a mask beyond its box
_SLACK = 0.1  # of the sides of a box, by which its mask may end elsewhere
_TIMES = 10  # fewer objects that do not fit: in another reading, which is then the right one

# The numbers of a box as left, top, right and bottom.
_READINGS: dict[str, Callable[..., tuple[np.ndarray, ...]]] = {
    'x, y, width, height': lambda a, b, c, d: (a, b, a + c, b + d),
    'x1, y1, x2, y2': lambda a, b, c, d: (a, b, c, d),
    'centre x, centre y, width, height': lambda a, b, c, d: (a - c / 2, b - d / 2, a + c / 2, b + d / 2),
    'y, x, height, width': lambda a, b, c, d: (b, a, b + d, a + c),
    'y1, x1, y2, x2': lambda a, b, c, d: (b, a, d, c),
}


@dataclass
class Places:
    """Where objects are, in pixels, for N objects.

    Attributes:
        objects: what the annotations state.
        boxes: (N, 4): left, top, right and bottom.
        sizes: (N, 2): the width and height of their images; endless if they are not stated.
        masks: (N, 4): the bounds of their masks, zeros if they cover nothing; NaN without a mask.
    """

    objects: Sequence[StatedObject]
    boxes: np.ndarray
    sizes: np.ndarray
    masks: np.ndarray

    @property
    def beyond(self) -> np.ndarray:
        """How far each box reaches beyond its image; negative within."""
        return _beyond(self.boxes, self.sizes)


def places_of(source: Source, objects: Sequence[StatedObject]) -> Places:
    """Return where objects of a data set are."""
    images = [source.stated.files[obj.file].images[0] for obj in objects]
    sizes = [(image.get('width', np.inf), image.get('height', np.inf)) for image in images]
    masks = [_bounds(obj) for obj in objects]
    return Places(objects, _rows([obj.box for obj in objects], 4), _rows(sizes, 2), _rows(masks, 4))


def check_places(source: Source, places: Places) -> None:
    """Raise ValueError if many boxes do not fit their images or masks, and say as which numbers they would.

    Boxes of COCO's files are x, y, width and height; others are corners. All are in pixels.
    """
    is_wrong = _misfits(places.boxes, places.masks, places.sizes)
    if hints.is_systematic(is_wrong.sum(), len(is_wrong)):
        right = _better_reading(places, bool(source.stated.categories), int(is_wrong.sum()) // _TIMES)
        if right:
            _raise(source, places, is_wrong, f'do not fit their images or masks, but {right}')
    is_outside = np.any((places.boxes[:, :2] >= places.sizes) | (places.boxes[:, 2:] <= 0), 1)
    if hints.is_systematic(is_outside.sum(), len(is_outside)):
        _raise(source, places, is_outside, 'lie outside of their image; write those of this image, of its size')


def _raise(source: Source, places: Places, is_wrong: np.ndarray, problem: str) -> NoReturn:
    count, example = f'{is_wrong.sum()} of {len(is_wrong)} boxes', places.objects[int(is_wrong.argmax())].entry
    raise ValueError(f'{source.stated.name}: {count}, such as {shown(example)}, {problem}')


def _better_reading(places: Places, are_sides: bool, most: int) -> str:
    """Return as what numbers all boxes, or all but ``most``, fit their images and masks, and what to write; or ''."""
    expected = 'x, y, width, height' if are_sides else 'x1, y1, x2, y2'
    numbers = places.boxes.copy()
    numbers[:, 2:] -= numbers[:, :2] * are_sides
    sizes = np.where(np.isfinite(places.sizes), places.sizes, 1)
    shares = np.hstack([sizes, sizes])
    rows_first = _rows([_bounds(obj, rows_first=True) for obj in places.objects], 4)
    found = [
        ('masks are read as y, x, or RLE along rows; write x, y, and RLE down columns', places.boxes, rows_first),
        ('masks are read as shares of the image; write pixels', places.boxes, places.masks * shares),
    ]
    for name, read in _READINGS.items():
        boxes = np.stack(read(*numbers.T), 1)
        found.append((f'boxes are read as {name}; write {expected}', boxes, places.masks))
        said = f'boxes are read as {name} in shares of the image; write {expected} in pixels'
        found.append((said, boxes * shares, places.masks))
    counts = [int(_misfits(boxes, masks, places.sizes).sum()) for _, boxes, masks in found]
    fewest = min(counts)
    fit = f'all but {fewest} do' if fewest else 'all do'
    return f'{fit} if {found[counts.index(fewest)][0]}' if fewest <= most else ''


def _bounds(obj: StatedObject, rows_first: bool = False) -> Sequence[float]:
    """Return the bounds of a mask; NaN if it cannot be read, as a recipe for boxes does not check its numbers."""
    mask = obj.mask
    are_lists = isinstance(mask, list) and all(isinstance(part, list) for part in mask)
    is_read = (are_lists or isinstance(mask, dict)) and not fault_of_mask(obj.entry, None)
    return bounds_of(mask, rows_first) if is_read else (np.nan,) * 4


def _rows(values: Iterable[Sequence[float]], count: int) -> np.ndarray:
    return np.array([*values], float).reshape(-1, count)


def _beyond(places: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    return np.maximum(-places[:, :2], places[:, 2:] - sizes).max(1)


def _misfits(boxes: np.ndarray, masks: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return which boxes are narrower than a pixel, reach beyond their image, or lie elsewhere than their mask."""
    sides = boxes[:, 2:] - boxes[:, :2]
    slack = np.maximum(TOLERANCE, _SLACK * np.hstack([sides, sides]))
    is_elsewhere = (np.abs(masks - boxes) > slack).any(1) | (_beyond(masks, sizes) > TOLERANCE)  # not for NaN
    return (sides < 1).any(1) | (_beyond(boxes, sizes) > TOLERANCE) | is_elsewhere

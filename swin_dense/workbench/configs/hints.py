"""What to do about an exception of a framework that reads data: the only place that knows their words."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from swin_dense.workbench.configs.stated import StatedObject

UNKNOWN = 'for a reason that is not known'
_COPY = 'as the copy that `swin-dense config` writes'
# The start of an exception of mmdet, mmseg or pycocotools, and what to do.
HINTS_ON_READING = {
    "KeyError: 'area'": 'write the area; width times height is enough',
    "KeyError: 'bbox'": 'bbox must be x, y, width and height',
    "KeyError: 'height'": 'write height and width in pixels',
    "KeyError: 'width'": 'write height and width in pixels',
    "KeyError: 'iscrowd'": 'write iscrowd, 0 for a single object',
    'AssertionError: Annotation ids': 'annotation ids must be unique; renumber them from 1',
    'JSONDecodeError: Unexpected UTF-8 BOM': f'save it as UTF-8 without a byte order mark, {_COPY}',
    'UnicodeDecodeError': f'save it as UTF-8, {_COPY}',
    "TypeError: 'NoneType' object is not iterable": f'write annotations as a list, {_COPY}',
    "AttributeError: 'NoneType' object has no attribute": (
        'a file of Pascal VOC needs size with width and height, and for each object name and bndbox with xmin, ymin, '
        'xmax, ymax'
    ),
}


def hint_on_reading(error: Exception, hints: dict[str, str] | None = None) -> str:
    """Return what to do about an exception that a framework raised for data, after a colon; '' if it is not known."""
    said = f'{type(error).__name__}: {error}'
    table = HINTS_ON_READING if hints is None else hints
    return next((f': {hint}' for start, hint in table.items() if said.startswith(start)), '')


def described(error: Exception) -> str:
    """Return the class and the beginning of the message of an exception."""
    text: Any = str(error).strip()
    return f'{type(error).__name__}: {text[:200]}' if text else type(error).__name__


# Words for what the round trip finds. The first reason that holds, for an object and the entry of its image.
LEFT_OUT: dict[str, Callable[[StatedObject, Any], bool]] = {
    "marked 'ignore'": lambda one, _: bool(one.entry.get('ignore')),
    'outside of their image': lambda one, image: _is_outside(one.box, image),
    'with an area of 0 or less': lambda one, _: one.entry.get('area', 1) <= 0,
    'narrower than a pixel': lambda one, _: min(one.box[2] - one.box[0], one.box[3] - one.box[1]) < 1,
}
IGNORED = {"marked 'iscrowd'": 'iscrowd', "marked 'difficult'": 'difficult'}


class Filter(NamedTuple):
    """Words for the images that an entry of ``filter_cfg`` leaves out, and its value that keeps them."""

    text: str
    cure: str


FILTERS = {
    'filter_empty_gt': Filter('without an annotation of the classes', 'False'),
    'min_size': Filter('with a side below {value} pixels', '1'),
}
_TURNS = ('rotation', 'rotation_angle', 'angle')  # keys in degrees, of CVAT and other tools
_MIXES_BOXES = ('Mosaic', 'MixUp')


def why_left_out(one: StatedObject, image: Any) -> str:
    """Return why a framework leaves out an object of a class."""
    return next((reason for reason, holds in LEFT_OUT.items() if holds(one, image)), UNKNOWN)


def why_ignored(one: StatedObject) -> str:
    """Return why a framework yields an object but does not train on it."""
    return next((reason for reason, key in IGNORED.items() if one.entry.get(key)), UNKNOWN)


def _is_outside(box: tuple[float, ...], image: Any) -> bool:
    width, height = image.get('width', float('inf')), image.get('height', float('inf'))
    return box[0] >= width or box[1] >= height or box[2] <= 0 or box[3] <= 0


def turn_of(entry: Any) -> float:
    """Return the angle, in degrees, by which a tool turned the rectangle of an annotation; 0 without."""
    attributes = entry.get('attributes')
    for part in (attributes if isinstance(attributes, dict) else {}, entry):
        for key in _TURNS:
            if isinstance(part.get(key), (int, float)) and math.isfinite(part[key]):
                return float(part[key])
    return 0.0


def is_turned(one: StatedObject) -> bool:
    """Return whether a box is that of a rectangle before a turn, of which no mask shows that it is not."""
    angle = turn_of(one.entry) % 180
    return min(angle, 180 - angle) > 1 and not one.mask


def hint_on_loading(step: Any, error: Exception) -> str:
    """Return what to do about a step of a pipeline that fails, after a semicolon; '' if it is not known."""
    if isinstance(error, KeyError) and 'seg_map_path' in str(error):
        return '; images without masks can be predicted, not evaluated'
    return ''


def hint_on_mixing(steps: Any) -> str:
    """Return what to do about transforms that mix images and fail, after a semicolon; '' if it is not known."""
    mixing = [step['type'] for step in steps if step['type'] in _MIXES_BOXES]
    if not mixing:
        return ''
    return f"; mmdet's {' and '.join(mixing)} mix boxes without masks: take Cached{mixing[0]}, or a recipe for boxes"

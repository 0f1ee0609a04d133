"""Find parts of a config, at any depth."""

from __future__ import annotations

import colorsys
from collections.abc import Iterator
from typing import Any

_GOLDEN_RATIO = 0.618034


def dicts(value: Any) -> Iterator[Any]:
    """Yield every dict in a config, outer dicts first."""
    for part in _containers(value):
        if isinstance(part, dict):
            yield part


def pipelines(value: Any) -> Iterator[list]:
    """Yield every list of transforms that starts with ``LoadImageFromFile``."""
    for part in _containers(value):
        if isinstance(part, list) and part and isinstance(part[0], dict) and part[0].get('type') == 'LoadImageFromFile':
            yield part


def _containers(value: Any) -> Iterator[Any]:
    if isinstance(value, (dict, list, tuple)):
        yield value
        items = value.values() if isinstance(value, dict) else value
        for item in list(items):
            yield from _containers(item)


def make_palette(count: int) -> list[tuple[int, ...]]:
    """Return well-separated RGB colours."""
    hues = [index * _GOLDEN_RATIO % 1 for index in range(count)]
    return [tuple(round(255 * part) for part in colorsys.hsv_to_rgb(hue, 0.75, 0.9)) for hue in hues]


def is_panoptic(part: Any) -> bool:
    """Return whether a part of a model counts things and stuff separately, as mmdet's Mask2Former does."""
    return {'num_things_classes', 'num_stuff_classes'} <= set(part)

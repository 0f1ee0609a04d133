"""Sizes of images, from their headers, as a data set's first transform would load them, and which it cannot decode."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from mmengine.dist import get_rank, get_world_size
from mmengine.registry import TRANSFORMS
from PIL import Image

_ORIENTATION_TAG = 274
_TRANSPOSED = (5, 6, 7, 8)  # EXIF orientations that exchange width and height
_NAMED = 5  # files that an error names


def size_of(path: str, load: Any) -> tuple[int, int] | None:
    """Return (width, height) from the header, None if PIL cannot read it; ``load`` is a config of LoadImageFromFile."""
    color_type = load.get('color_type', 'color')
    with contextlib.suppress(OSError, ValueError, Image.DecompressionBombError), warnings.catch_warnings():
        warnings.simplefilter('ignore')
        with Image.open(path) as image:
            # PIL decodes a PNG without EXIF to look for it.
            is_turned = 'exif' in image.info and image.getexif().get(_ORIENTATION_TAG) in _TRANSPOSED
            is_upright = color_type != 'unchanged' and not color_type.endswith('ignore_orientation')
            return image.size[::-1] if is_turned and is_upright else image.size
    return None


def chosen(items: Sequence[Any], count: int, every_image: bool) -> list[Any]:
    """Return the items to look at: up to ``count`` evenly spaced ones, or all, of which each process takes a share."""
    if every_image:
        return list(items[get_rank() :: get_world_size()])
    indices = np.linspace(0, len(items) - 1, min(count, len(items)))
    return [items[round(index)] for index in indices]


def check_decodable(paths: Sequence[str], load: Any) -> None:
    """Raise ValueError if the transform of the config ``load`` cannot decode some images."""
    import mmcv.transforms  # noqa: F401  registers LoadImageFromFile

    decode = TRANSFORMS.build(dict(load))

    def reason(path: str) -> str:
        try:
            return '' if decode({'img_path': path}) is not None else 'it cannot be decoded'
        except Exception as error:  # of any decoder
            return str(error) or type(error).__name__

    with ThreadPoolExecutor() as pool:
        damaged = [f'{path} ({why})' for path, why in zip(paths, pool.map(reason, paths), strict=True) if why]
    if damaged:
        raise ValueError(f'{len(damaged)} of {len(paths)} images cannot be decoded: {some(damaged)}; replace them')


def some(names: Iterable[Any]) -> str:
    """Return the first names of many, for a message."""
    names = list(map(str, names))
    return ', '.join(names[:_NAMED]) + (', ...' if len(names) > _NAMED else '')


def absent_files(paths: Sequence[str]) -> Iterator[str]:
    """Yield the files that do not exist or are empty, with the reason."""
    for path in paths:
        try:
            if os.stat(path).st_size == 0:
                yield f'{path} (empty)'
        except OSError as error:
            yield f'{path} ({error.strerror})'

"""Sizes of images as a data set's first transform loads them: from their headers, or, on request, by decoding them."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import numpy as np
from mmengine.dist import get_rank, get_world_size
from mmengine.registry import TRANSFORMS
from PIL import Image

SAMPLED = 1000  # headers that are read for each data set, evenly spaced
_ORIENTATION_TAG = 274
_TRANSPOSED = (5, 6, 7, 8)  # EXIF orientations that exchange width and height
_NAMED = 5  # files that an error names

Size = tuple[int, int]  # (width, height)


class Images:
    """The images of a data set, which a transform loads; ``load`` is its config, usually of ``LoadImageFromFile``.

    With ``every_image``, all are decoded, instead of reading the headers of a sample.
    """

    def __init__(self, load: Any, every_image: bool = False) -> None:
        self.load, self.every_image = load, every_image
        color_type = load.get('color_type', 'color')
        self._is_upright = color_type != 'unchanged' and not color_type.endswith('ignore_orientation')

    def sample(self, items: Sequence[Any]) -> list[Any]:
        """Return the items to look at: evenly spaced ones, or all of them, of which each process takes a share."""
        if not self.every_image:
            return evenly(items, SAMPLED)
        return list(items[get_rank() :: get_world_size()])

    def sizes(self, paths: Sequence[str]) -> dict[str, Size]:
        """Return the size of every image; raise ValueError if some cannot be read."""
        threads = os.cpu_count() if self.every_image else 1
        with ThreadPoolExecutor(threads) as pool:
            found = list(zip(paths, pool.map(self._size_or_error, paths), strict=True))
        damaged = [f'{path} ({size})' for path, size in found if isinstance(size, str)]
        if damaged:
            raise ValueError(
                f'{len(damaged)} of {len(paths)} images looked at cannot be read: {some(damaged)}; replace them, or '
                'remove them from the data set'
            )
        return {path: size for path, size in found if not isinstance(size, str)}

    def _size_or_error(self, path: str) -> Size | str:
        try:
            return self._decoded(path) if self.every_image else self._of_header(path) or self._decoded(path)
        except Exception as error:  # of any decoder
            return str(error) or type(error).__name__

    def _of_header(self, path: str) -> Size | None:
        """Return the size from the header; None if PIL cannot read it."""
        with contextlib.suppress(OSError, ValueError, Image.DecompressionBombError), warnings.catch_warnings():
            warnings.simplefilter('ignore')
            with Image.open(path) as image:
                # PIL decodes a PNG without EXIF to look for it.
                is_turned = 'exif' in image.info and image.getexif().get(_ORIENTATION_TAG) in _TRANSPOSED
                return image.size[::-1] if is_turned and self._is_upright else image.size
        return None

    @cached_property
    def _transform(self) -> Any:
        import mmcv.transforms  # noqa: F401  registers LoadImageFromFile

        return TRANSFORMS.build(dict(self.load))

    def _decoded(self, path: str) -> Size:
        loaded = self._transform({'img_path': path})
        if loaded is None:
            raise ValueError('it cannot be decoded')
        height, width = loaded['ori_shape']
        return width, height


def evenly(items: Sequence[Any], count: int) -> list[Any]:
    """Return up to ``count`` evenly spaced items, with the first and the last."""
    indices = np.linspace(0, len(items) - 1, min(count, len(items)))
    return [items[round(index)] for index in indices]


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

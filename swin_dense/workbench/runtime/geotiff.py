"""Write maps of classes as TIFF with the georeference of their image."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from swin_dense.utils.atomic import reserve, written_whole

# ModelPixelScale, ModelTiepoint, ModelTransformation, GeoKeyDirectory, GeoDoubleParams, GeoAsciiParams.
# Source: OGC GeoTIFF Standard 1.1.
_GEOREFERENCE = (33550, 33922, 34264, 34735, 34736, 34737)


def georeference(path: str | PathLike[str]) -> list[tuple[int, Any, int, Any, bool]]:
    """Return the tags that place an image on the earth, for ``extratags`` of tifffile; empty if there are none."""
    import tifffile

    try:
        with tifffile.TiffFile(path) as file:
            page: Any = file.pages[0]
            tags = page.tags
            found = [tags[code] for code in _GEOREFERENCE if code in tags]
            return [(tag.code, tag.dtype, tag.count, tag.value, True) for tag in found]
    except tifffile.TiffFileError:
        return []


class LabelFile:
    """A map of classes (H, W) in a TIFF, written by regions and not kept in memory.

    Args:
        path: the file to write.
        size: (height, width) in pixels.
        dtype: an unsigned type.
        image: the file of the image, whose georeference is copied.
    """

    def __init__(self, path: Path, size: tuple[int, int], dtype: Any, image: str | PathLike[str]) -> None:
        import tifffile

        self._memmap: Any = tifffile.memmap
        self._path = path
        # Of an image with GeoTIFF's tags, the file is one too.
        self._memmap(
            path, shape=size, dtype=dtype, photometric='minisblack', metadata=None, extratags=georeference(image)
        ).flush()
        reserve(path, path.stat().st_size)

    def __setitem__(self, box: tuple[slice, slice], values: np.ndarray) -> None:
        # Reopened for every region, because pages stay in memory as long as a file is mapped.
        pixels = self._memmap(self._path, mode='r+')
        pixels[box] = values
        pixels.flush()


@contextlib.contextmanager
def label_file(path: Path, image: str | PathLike[str]) -> Iterator[Any]:
    """Return a function from (height, width) and dtype to a :class:`LabelFile`, which gets its name if it succeeds."""
    with contextlib.ExitStack() as stack:

        def make(size: tuple[int, int], dtype: Any) -> LabelFile:
            unfinished = stack.enter_context(written_whole(path))
            return LabelFile(unfinished.path, size, dtype, image)

        yield make

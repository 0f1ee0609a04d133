"""Write maps of classes as TIFF with the georeference of their image, and find the pixels without data."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from swin_dense.utils.atomic import reserve, written_whole
from swin_dense.utils.tiles import Box

# ModelPixelScale, ModelTiepoint, ModelTransformation, GeoKeyDirectory, GeoDoubleParams, GeoAsciiParams, and the
# coefficients of rational polynomials (RPC). Source: OGC GeoTIFF Standard 1.1, and GDAL's RPCs in GeoTIFF.
_GEOREFERENCE = (33550, 33922, 34264, 34735, 34736, 34737, 50844)
_NO_DATA = 42113  # GDAL_NODATA: a number as text
NoData = Callable[[Box], np.ndarray]


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


@contextlib.contextmanager
def no_data(image: Any) -> Iterator[NoData | None]:
    """Return a function from a box of pixels to a mask (h, w) of those without data, all of whose bands have a value.

    It is None if the image is no TIFF, declares no such value, or if tifffile is not installed.
    """
    with contextlib.ExitStack() as stack:
        yield _mask_of(image, stack)


def _mask_of(image: Any, stack: contextlib.ExitStack) -> NoData | None:
    if not isinstance(image, (str, PathLike)) or not find_spec('tifffile'):
        return None
    import tifffile

    try:
        page: Any = stack.enter_context(tifffile.TiffFile(image)).pages[0]
        value = page.dtype.type(float(page.tags[_NO_DATA].value.strip('\0 ')))
    except Exception:  # no TIFF, no such value, or none of the type of the pixels, as of the damaged files among them
        return None
    if find_spec('zarr'):
        import zarr

        stored = zarr.open_array(stack.enter_context(page.aszarr()), mode='r')
    else:
        stored = page.asarray()

    def mask(box: Box) -> np.ndarray:
        top, left, bottom, right = box
        region: Any = np.s_[top:bottom, left:right]
        if page.axes == 'SYX':
            region = (..., *region)
        found = np.isin(stored[region], value)
        return found if found.ndim == 2 else found.all(page.axes.index('S'))

    return mask


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
        tags = georeference(image)
        with no_data(image) as mask:
            if mask is not None:
                tags.append((_NO_DATA, 2, 0, str(np.iinfo(dtype).max), True))
        self._memmap(path, shape=size, dtype=dtype, photometric='minisblack', metadata=None, extratags=tags).flush()
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

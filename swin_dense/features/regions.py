"""Read large images by regions."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from swin_dense.features.images import pixels_of
from swin_dense.features.ome_zarr import Plane
from swin_dense.utils import tiff
from swin_dense.utils.addresses import is_address
from swin_dense.utils.pixels import ImageError, LargeImage, Pixels, decoding, naming

_FILES_OF_FOLDER = 'for a folder of images, pass its files one by one or as a list'


@contextlib.contextmanager
def open_large_image(source: Any, bgr: bool = False, page: int | None = None) -> Iterator[LargeImage]:
    """Open an image for reading by regions, and close it at the end of the block.

    Regions are read lazily from arrays (also memory-mapped and zarr arrays), from zarr folders, which contain an array
    or an OME-Zarr image (read at its highest resolution), and from TIFF files, which need the packages tifffile and
    zarr, and imagecodecs if compressed. Rotated TIFFs, TIFFs of 32-bit integers and other files are decoded as a whole
    and kept in memory at full bit depth. A warning is logged if a missing imagecodecs is the cause.

    The source, the arguments and the errors are those of :func:`swin_dense.features.images.read_image`; the source may
    also be a zarr array or the path of a zarr folder, of which ``page`` is a plane over the depth, then over time.
    """
    with contextlib.ExitStack() as stack:
        with naming(source):
            pixels = _open(source, page, stack)
            if len(pixels.values.shape) not in (2, 3) or 0 in pixels.values.shape:
                raise ImageError('an array must have the shape (H, W) or (H, W, C) and at least one pixel')
        yield LargeImage(source, pixels, bgr and hasattr(source, 'shape'))


def _open(source: Any, page: int | None, stack: contextlib.ExitStack) -> Pixels:
    """Return pixels whose values are read when they are sliced, if the source allows it."""
    if isinstance(source, (str, os.PathLike)) and not is_address(source):
        path = Path(source)
        if path.is_dir():
            return _open_zarr(path, page)
        with path.open('rb') as file:
            is_tiff = file.read(4) in tiff.MAGIC
        with decoding():
            pixels = tiff.open_tiff(path, page, stack, by_regions=True) if is_tiff else None
        return pixels or pixels_of(path, page=page)
    if hasattr(source, 'shape') and not isinstance(source, (np.ndarray, Tensor)):  # a zarr array
        return Pixels(source)
    return pixels_of(source, page=page)


def _open_zarr(path: Path, page: int | None) -> Pixels:
    try:
        import zarr
    except ImportError:
        raise ImageError(f'it is a folder; {_FILES_OF_FOLDER}; to read it as a zarr array, install zarr') from None
    with decoding():
        try:
            found = zarr.open(path, mode='r')
        except (FileNotFoundError, ValueError, KeyError) as error:
            raise ImageError(f'it is a folder without a zarr array; {_FILES_OF_FOLDER}') from error
        if not isinstance(found, zarr.Array):
            return Pixels(Plane(found, page))
        if page:
            raise ImageError(f'there is no page {page}; an array has 1, counted from 0')
        return Pixels(found)

"""Read large images by regions."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from swin_dense.images import tiff
from swin_dense.images.pixels import ImageError, Pixels, decoding, naming, reverse_colours
from swin_dense.images.reading import pixels_of
from swin_dense.images.tiles import Box


class LargeImage:
    """An image of ``size``, (height, width), whose regions are read on demand, by slicing the values of its pixels."""

    def __init__(self, source: Any, pixels: Pixels, is_bgr: bool = False) -> None:
        self.source = source
        self.size: tuple[int, int] = (pixels.values.shape[0], pixels.values.shape[1])
        self._pixels = pixels
        self._is_bgr = is_bgr

    def read(self, top: int, left: int, bottom: int, right: int) -> np.ndarray:
        """Return the values in a box, half open, (h, w) or (h, w, C); an ImageError says which image is damaged."""
        with naming(self.source), decoding():
            region = np.asarray(self._pixels.values[top:bottom, left:right])
        return reverse_colours(region) if self._is_bgr else region

    def pixels(self, box: Box) -> Pixels:
        """Return the pixels in a box, (top, left, bottom, right)."""
        return self._pixels._replace(values=self.read(*box))


@contextlib.contextmanager
def open_large_image(source: Any, bgr: bool = False, page: int | None = None) -> Iterator[LargeImage]:
    """Open an image for reading by regions, and close it at the end of the block.

    Regions are read lazily from arrays (also memory-mapped and zarr arrays), and from TIFF files, which need the
    packages tifffile and zarr, and imagecodecs if compressed. Other files, rotated TIFFs and those of 32-bit integers
    are decoded as a whole. The source, the arguments and the errors are those of ``read_image``.
    """
    with contextlib.ExitStack() as stack:
        with naming(source):
            pixels = _open(source, page, stack)
            if len(pixels.values.shape) not in (2, 3) or 0 in pixels.values.shape:
                raise ImageError('an array must have the shape (H, W) or (H, W, C) and at least one pixel')
        yield LargeImage(source, pixels, bgr and hasattr(source, 'shape'))


def _open(source: Any, page: int | None, stack: contextlib.ExitStack) -> Pixels:
    """Return pixels whose values are read when they are sliced, if the source allows it."""
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        with path.open('rb') as file:
            is_tiff = file.read(4) in tiff.MAGIC
        with decoding():
            pixels = tiff.open_tiff(path, page, stack, by_regions=True) if is_tiff else None
        return pixels or pixels_of(path, page=page)
    if hasattr(source, 'shape') and not isinstance(source, (np.ndarray, Tensor)):  # a zarr array
        return Pixels(source)
    return pixels_of(source, page=page)

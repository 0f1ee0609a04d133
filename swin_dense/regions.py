"""Large images, read region by region instead of as a whole."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps
from torch import Tensor

from swin_dense.images import (
    TIFF_MAGIC,
    ImageError,
    array_pixels,
    decoding,
    describe,
    orientation_of,
    pil_pixels,
    read_image,
    reverse_colours,
)


@dataclass(frozen=True)
class LargeImage:
    """An image of which regions can be read.

    Attributes:
        name: for messages.
        size: (height, width) in pixels.
        read: (top, left, bottom, right), half open, to pixels (h, w) or (h, w, C).
    """

    name: str
    size: tuple[int, int]
    read: Callable[[int, int, int, int], np.ndarray]


@contextlib.contextmanager
def open_large_image(source: Any, bgr: bool = False) -> Iterator[LargeImage]:
    """Open an image for reading by regions, and close it at the end of the block.

    Truly lazy are arrays (also memory-mapped and zarr arrays), zarr folders, and TIFF files where tifffile and zarr
    are installed. Other files are decoded as a whole by PIL and kept at their own depth: 3 or 4 bytes a pixel.

    Args:
        source: what :func:`swin_dense.images.read_image` takes, a zarr array, or the path of a zarr folder.
        bgr: arrays hold blue first.

    Raises:
        FileNotFoundError: the path does not exist.
        ImageError: the content is no image.
        TypeError: the source is none of the above.
    """
    name = describe(source)
    if isinstance(source, (str, os.PathLike)):
        with _open_file(Path(source), name) as image:
            yield image
    elif isinstance(source, Image.Image):
        yield _pil_image(source, name)
    elif isinstance(source, (np.ndarray, Tensor)):
        yield _array_image(array_pixels(source, name), name, bgr)
    elif hasattr(source, 'shape') and hasattr(source, '__getitem__'):
        yield _array_image(source, name, bgr)
    else:
        pixels = (read_image(source).permute(1, 2, 0)).numpy()
        yield _array_image(pixels, name, bgr=False)


@contextlib.contextmanager
def _open_file(path: Path, name: str) -> Iterator[LargeImage]:
    if not path.exists():
        raise FileNotFoundError(f'{name} does not exist')
    if path.is_dir():
        yield _array_image(_open_zarr(path, name), name, bgr=False)
        return
    with contextlib.ExitStack() as stack:
        image = _open_tiff(path, name, stack) if _is_tiff(path) else None
        if image is None:
            with decoding(name):
                image = _pil_image(stack.enter_context(Image.open(path)), name)
        yield image


def _is_tiff(path: Path) -> bool:
    with path.open('rb') as file:
        return file.read(4) in TIFF_MAGIC


def _open_zarr(path: Path, name: str) -> Any:
    try:
        import zarr
    except ImportError:
        raise ImageError(f'{name} is a folder; to read it as a zarr array install zarr') from None
    try:
        return zarr.open_array(path, mode='r')
    except (FileNotFoundError, ValueError, KeyError) as error:
        raise ImageError(f'{name} is a folder without a zarr array in it') from error


def _open_tiff(path: Path, name: str, stack: contextlib.ExitStack) -> LargeImage | None:
    """Open the first page of a TIFF lazily, or return None where PIL has to read it."""
    try:
        import tifffile
        import zarr
    except ImportError:
        return None
    try:
        page: Any = stack.enter_context(tifffile.TiffFile(path)).pages[0]
    except (tifffile.TiffFileError, IndexError, struct.error):
        return None
    orientation = page.tags.get('Orientation')
    is_upright = orientation is None or orientation.value == 1
    if not is_upright or page.axes not in ('YX', 'YXS', 'SYX') or page.photometric.name not in ('MINISBLACK', 'RGB'):
        return None
    try:
        tifffile.TIFF.DECOMPRESSORS[page.compression]
    except KeyError:  # it needs the package imagecodecs; PIL decodes some of these
        return None
    array: Any = zarr.open_array(stack.enter_context(page.aszarr()), mode='r')
    is_planar = page.axes == 'SYX'

    def read(top: int, left: int, bottom: int, right: int) -> np.ndarray:
        with decoding(name):
            if is_planar:
                return np.moveaxis(np.asarray(array[:, top:bottom, left:right]), 0, 2)
            return np.asarray(array[top:bottom, left:right])

    height, width = array.shape[1:] if is_planar else array.shape[:2]
    return LargeImage(name, (height, width), read)


def _pil_image(image: Image.Image, name: str) -> LargeImage:
    with decoding(name):
        image.load()
        upright = image if orientation_of(image) == 1 else ImageOps.exif_transpose(image)

    def read(top: int, left: int, bottom: int, right: int) -> np.ndarray:
        return pil_pixels(upright.crop((left, top, right, bottom)), name)

    return LargeImage(name, (upright.height, upright.width), read)


def _array_image(array: Any, name: str, bgr: bool) -> LargeImage:
    if len(array.shape) not in (2, 3) or 0 in array.shape:
        raise ImageError(f'{name}: an array must have the shape (H, W) or (H, W, C) and at least one pixel')

    def read(top: int, left: int, bottom: int, right: int) -> np.ndarray:
        pixels = np.asarray(array[top:bottom, left:right])
        return reverse_colours(pixels) if bgr else pixels

    return LargeImage(name, (array.shape[0], array.shape[1]), read)

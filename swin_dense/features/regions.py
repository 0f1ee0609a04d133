"""Read large images by regions."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from swin_dense.features.decode import (
    HEADER_LENGTH,
    TIFF_MAGIC,
    ImageError,
    as_stored,
    decode_file,
    decoded_bytes,
    decoding,
    is_deep_colour,
    name_of,
    orientation_of,
    pil_pixels,
    reading,
    reverse_colours,
    tiff_page,
    turn_to,
    upright,
    upright_size,
)
from swin_dense.features.images import array_pixels, pixels_of
from swin_dense.features.ome_zarr import open_plane
from swin_dense.utils.addresses import is_address

_logger = logging.getLogger(__package__)
_FILES_OF_FOLDER = 'for a folder of images, pass its files one by one or as a list'
_LAZY_PACKAGES = (
    'to read it by regions, install tifffile, zarr and imagecodecs, and convert it to TIFF if it is another format'
)


@dataclass(frozen=True)
class LargeImage:
    """An image that can be read by regions.

    Attributes:
        name: name of the image for messages.
        size: (height, width) in pixels.
        read: function from (top, left, bottom, right), half open, to pixels (h, w) or (h, w, C).
    """

    name: str
    size: tuple[int, int]
    read: Callable[[int, int, int, int], np.ndarray]


@contextlib.contextmanager
def open_large_image(source: Any, bgr: bool = False, page: int = 0) -> Iterator[LargeImage]:
    """Open an image for reading by regions, and close it at the end of the block.

    Regions are read lazily from arrays (also memory-mapped and zarr arrays), from zarr folders, which contain an array
    or an OME-Zarr image (read at its highest resolution), and from TIFF files, which need the packages tifffile and
    zarr, and imagecodecs if compressed. Other files are decoded as a whole and kept in memory at full bit depth: 3 or
    4 bytes per pixel, or twice that for 16-bit colour. A warning is logged if a missing imagecodecs is the cause.

    Args:
        source: any source of :func:`swin_dense.features.images.read_image`, a zarr array, or the path of a zarr folder.
        bgr: arrays are in BGR order.
        page: page of a multi-page file, or plane of an OME-Zarr image (over the depth, then over time), counted from 0.

    Raises:
        FileNotFoundError: the path does not exist.
        ImageError: the content is not an image.
        TypeError: the source is none of the above.
    """
    name = name_of(source)
    if isinstance(source, (str, os.PathLike)) and not is_address(source):
        with _open_file(Path(source), name, page) as image:
            yield image
    elif isinstance(source, Image.Image):
        yield _pil_image(source, name)
    elif isinstance(source, (np.ndarray, Tensor)):
        yield _array_image(array_pixels(source, name), name, bgr)
    elif hasattr(source, 'shape') and hasattr(source, '__getitem__'):
        yield _array_image(source, name, bgr)
    else:
        yield _array_image(pixels_of(source, page=page), name, bgr=False)


@contextlib.contextmanager
def _open_file(path: Path, name: str, page: int) -> Iterator[LargeImage]:
    with reading(path):
        is_folder = path.is_dir()
        header = b'' if is_folder else _read_header(path)
    if is_folder:
        yield _open_zarr(path, name, page)
        return
    with contextlib.ExitStack() as stack:
        image = _open_tiff(path, name, page, stack) if header.startswith(TIFF_MAGIC) else None
        yield image or _open_whole(path, name, page, header, stack)


def _read_header(path: Path) -> bytes:
    with path.open('rb') as file:
        return file.read(HEADER_LENGTH)


def _open_whole(path: Path, name: str, page: int, header: bytes, stack: contextlib.ExitStack) -> LargeImage:
    """Open a file that cannot be read lazily, with PIL unless it reduces the bit depth: PIL needs the least memory."""
    with decoding(name, if_too_large=_LAZY_PACKAGES):
        try:
            image = stack.enter_context(Image.open(path))
        except UnidentifiedImageError:
            image = None
        if image is not None:
            turn_to(image, page, name)
        if image is None or is_deep_colour(image, header):
            return _array_image(decode_file(path, page), name, bgr=False)
        return _pil_image(image, name)


def _open_zarr(path: Path, name: str, page: int) -> LargeImage:
    try:
        import zarr
    except ImportError:
        raise ImageError(f'{name} is a folder; {_FILES_OF_FOLDER}; to read it as a zarr array, install zarr') from None
    with decoding(name):
        try:
            found = zarr.open(path, mode='r')
        except (FileNotFoundError, ValueError, KeyError) as error:
            raise ImageError(f'{name} is a folder without a zarr array; {_FILES_OF_FOLDER}') from error
        if isinstance(found, zarr.Array):
            return _array_image(found, name, bgr=False)
        size, read = open_plane(found, page, name)

    def read_region(top: int, left: int, bottom: int, right: int) -> np.ndarray:
        with decoding(name):
            return read(top, left, bottom, right)

    return LargeImage(name, size, read_region)


def _open_tiff(path: Path, name: str, number: int, stack: contextlib.ExitStack) -> LargeImage | None:
    """Open a page of a TIFF lazily, or return None if it must be decoded as a whole."""
    try:
        import tifffile
        import zarr
    except ImportError:
        return None
    with decoding(name):
        try:
            file = stack.enter_context(tifffile.TiffFile(path))
            page: Any = tiff_page(file, number, name)
        except ImageError:
            raise
        except Exception:  # PIL may support the file; if not, it raises
            return None
        if not _holds_plain_pixels(page):
            return None
        try:
            tifffile.TIFF.DECOMPRESSORS[page.compression]
        except KeyError:  # PIL decodes some of these
            _logger.warning(
                '%s is compressed as %s, which can be read by regions only with the package imagecodecs (pip install '
                'imagecodecs); it is decoded as a whole, which takes %d MiB',
                name,
                getattr(page.compression, 'name', page.compression),
                decoded_bytes(path) >> 20,
            )
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


def _holds_plain_pixels(page: Any) -> bool:
    """Return whether tifffile's values are the displayed pixels: upright, at full scale, grey or RGB."""
    orientation = page.tags.get('Orientation')
    photometric = getattr(page.photometric, 'name', '')  # tifffile returns an int for a non-standard value
    # JPEG is the only compression whose decoder converts YCbCr to RGB.
    is_rgb = photometric == 'RGB' or (photometric == 'YCBCR' and getattr(page.compression, 'name', '') == 'JPEG')
    return (
        (orientation is None or orientation.value == 1)
        and (is_rgb or photometric == 'MINISBLACK')
        and page.dtype is not None
        and (page.dtype.kind == 'f' or (page.dtype.kind == 'u' and page.bitspersample in (8, 16)))
    )


def _pil_image(image: Image.Image, name: str) -> LargeImage:
    with decoding(name):
        image.load()
        orientation = orientation_of(image)
    size = upright_size((image.height, image.width), orientation)

    def read(top: int, left: int, bottom: int, right: int) -> np.ndarray:
        top, left, bottom, right = as_stored((top, left, bottom, right), size, orientation)
        return upright(pil_pixels(image.crop((left, top, right, bottom)), name), orientation)

    return LargeImage(name, size, read)


def _array_image(array: Any, name: str, bgr: bool) -> LargeImage:
    if len(array.shape) not in (2, 3) or 0 in array.shape:
        raise ImageError(f'{name}: an array must have the shape (H, W) or (H, W, C) and at least one pixel')

    def read(top: int, left: int, bottom: int, right: int) -> np.ndarray:
        with decoding(name):  # reading from a zarr array or a memory-mapped file can fail
            pixels = np.asarray(array[top:bottom, left:right])
        return reverse_colours(pixels) if bgr else pixels

    return LargeImage(name, (array.shape[0], array.shape[1]), read)

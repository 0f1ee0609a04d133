"""Large images, read region by region instead of as a whole."""

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
_FILES_OF_FOLDER = 'of a folder of images give the files, one by one or as a list'
_LAZY_PACKAGES = (
    'to read a TIFF by parts install tifffile, zarr and imagecodecs, or for other files convert them to TIFF'
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
def open_large_image(source: Any, bgr: bool = False, page: int = 0) -> Iterator[LargeImage]:
    """Open an image for reading by regions, and close it at the end of the block.

    Truly lazy are arrays (also memory-mapped and zarr arrays), zarr folders, which hold an array or an image of
    OME-Zarr, read at its highest resolution, and TIFF files: these need the packages tifffile and zarr, and where they
    are compressed imagecodecs. Other files are decoded as a whole and kept at their own depth: 3 or 4 bytes a pixel,
    or twice that for 16-bit colour. If that is for want of imagecodecs, a warning is logged.

    Args:
        source: what :func:`swin_dense.features.images.read_image` takes, a zarr array, or the path of a zarr folder.
        bgr: arrays hold blue first.
        page: of a file with several pages, or of the planes of OME-Zarr, depth within time, counted from 0.

    Raises:
        FileNotFoundError: the path does not exist.
        ImageError: the content is no image.
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
    """Open a file that has to be decoded as a whole, by PIL wherever it keeps the depth: that takes least memory."""
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
        raise ImageError(
            f'{name} is a folder; {_FILES_OF_FOLDER}, or to read it as a zarr array install zarr'
        ) from None
    with decoding(name):
        try:
            found = zarr.open(path, mode='r')
        except (FileNotFoundError, ValueError, KeyError) as error:
            raise ImageError(f'{name} is a folder without a zarr array in it; {_FILES_OF_FOLDER}') from error
        if isinstance(found, zarr.Array):
            return _array_image(found, name, bgr=False)
        size, read = open_plane(found, page, name)

    def read_region(top: int, left: int, bottom: int, right: int) -> np.ndarray:
        with decoding(name):
            return read(top, left, bottom, right)

    return LargeImage(name, size, read_region)


def _open_tiff(path: Path, name: str, number: int, stack: contextlib.ExitStack) -> LargeImage | None:
    """Open a page of a TIFF lazily, or return None where it has to be decoded as a whole."""
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
        except Exception:  # PIL may know better, and says what is wrong if not
            return None
        if not _holds_plain_pixels(page):
            return None
        try:
            tifffile.TIFF.DECOMPRESSORS[page.compression]
        except KeyError:  # PIL decodes some of these
            _logger.warning(
                '%s is compressed as %s, which needs the package imagecodecs to be read by parts (pip install '
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
    """Return whether the values that tifffile gives are the pixels as they are shown, upright and at full scale."""
    orientation = page.tags.get('Orientation')
    photometric = getattr(page.photometric, 'name', '')  # a number where the standard has no name for it
    # Of the compressions, only JPEG turns brightness and colour differences into RGB itself.
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
        with decoding(name):  # of a zarr array, or a mapped file
            pixels = np.asarray(array[top:bottom, left:right])
        return reverse_colours(pixels) if bgr else pixels

    return LargeImage(name, (array.shape[0], array.shape[1]), read)

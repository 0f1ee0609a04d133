"""Where the bytes of a file become pixels, at their full depth; what goes wrong is an error that names the image."""

from __future__ import annotations

import contextlib
import io
import os
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from swin_dense.features.sources import read_bytes
from swin_dense.utils.addresses import is_address

Box = tuple[int, int, int, int]
TIFF_MAGIC = (b'II*\0', b'MM\0*', b'II+\0', b'MM\0+')
HEADER_LENGTH = 25  # of a PNG, up to its bit depth; more than TIFF needs
_ORIENTATION_TAG, _BITS_PER_SAMPLE_TAG = 274, 258
# What undoes each EXIF orientation, in this order: rows become columns, the rows turn round, the columns turn round.
_TRANSPOSED, _UPSIDE_DOWN, _MIRRORED = (5, 6, 7, 8), (3, 4, 7, 8), (2, 3, 6, 7)
_DEPTH_TAG = 32997  # pages of one volume
_ROWS_AT_ONCE = 256
_BYTES_OF_ADDRESS = 1 << 26  # what an image of 9 megapixels takes; its header cannot be seen before all is fetched


class ImageError(ValueError):
    """An image cannot be read, or is not an image that the backbone can take."""


def name_of(source: Any) -> str:
    """Return a short name of an image for messages."""
    if isinstance(source, (str, os.PathLike)):
        return f'image {os.fspath(source)!r}'
    if isinstance(source, (bytes, bytearray, memoryview)):
        return f'image of {len(source)} bytes'
    if isinstance(source, Image.Image):
        return f'PIL image of mode {source.mode} and size {source.size}'
    if hasattr(source, 'read') and isinstance(getattr(source, 'name', None), str):
        return f'image {source.name!r}'
    if isinstance(source, (np.ndarray, Tensor)):
        return f'image of shape {tuple(source.shape)} and type {source.dtype}'
    return f'image of type {type(source).__name__}'


def decode_file(path: str | os.PathLike[str], page: int = 0) -> np.ndarray:
    """Decode one page of a file, upright and at its full depth, to (H, W) or (H, W, C)."""
    with reading(path):
        content = read_bytes(path)
    return decode_bytes(content, name_of(path), page)


def decoded_bytes(source: Any) -> int:
    """Return about how much memory it takes to decode a file, from its header alone; 0 for what needs no decoding."""
    if is_address(source):
        return _BYTES_OF_ADDRESS
    if isinstance(source, bytes):
        source = io.BytesIO(source)
    if not isinstance(source, (str, os.PathLike, io.BytesIO)):
        return 0
    try:
        size = source.getbuffer().nbytes if isinstance(source, io.BytesIO) else os.path.getsize(source)
    except OSError:  # reading it says why
        return 0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            image = Image.open(source)
        # The file; what PIL unpacks it to, 4 bytes a pixel for RGB; the pixels as they are handed on.
        pixels = image.width * image.height * {'L': 2, 'RGB': 7}.get(image.mode, 12)
        if isinstance(source, io.BytesIO):
            source.seek(0)
        else:
            image.close()
    except Exception:  # decoding says what is wrong
        return 4 * size
    return size + pixels


@contextlib.contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn what the file system raises into an error that names the image; a missing file stays FileNotFoundError."""
    name = name_of(path)
    try:
        yield
    except FileNotFoundError:
        raise FileNotFoundError(f'{name} does not exist') from None
    except IsADirectoryError:
        raise ImageError(
            f"{name} is a folder: give the list of its files, sorted(Path(FOLDER).glob('*.jpg')), or let `swin-dense "
            'features FOLDER --out DIR` go through it; a folder of zarr is read by tiles: give tile= (--tile)'
        ) from None
    except OSError as error:
        raise ImageError(f'{name} cannot be read: {error.strerror or error}') from error


def decode_bytes(content: bytes, name: str, page: int = 0) -> np.ndarray:
    """Decode the bytes of a file as :func:`decode_file` does."""
    if not content:
        raise ImageError(f'{name}: the file is empty')
    with decoding(name):
        try:
            image = Image.open(io.BytesIO(content))
        except UnidentifiedImageError:
            pixels = _tiff_pixels(content, name, page)  # PIL knows no TIFF of more than four channels
            if pixels is None:
                raise
            return pixels
        turn_to(image, page, name)
        if is_deep_colour(image, content):
            return upright(_decode_deep_colour(image, content, name, page), orientation_of(image))
        return decode_pil(image, name)


def turn_to(image: Image.Image, page: int, name: str) -> None:
    """Make a page of a file, counted from 0, or a frame of an animation, the image that PIL gives."""
    if page:  # pages are counted only where it matters, as the whole file may have to be read for it
        pages = getattr(image, 'n_frames', 1)
        if not 0 <= page < pages:
            raise ImageError(f'{name}: there is no page {page}; it has {pages}, counted from 0')
        image.seek(page)
    if image.format == 'TIFF' and image.tag_v2.get(_DEPTH_TAG, 1) > 1:  # type: ignore[attr-defined]
        raise ImageError(f'{name}: a volume is no image; take slices of it and pass them as arrays')


def decode_pil(image: Image.Image, name: str) -> np.ndarray:
    """Return the pixels of a PIL image, upright, as :func:`decode_file` does."""
    with decoding(name):
        return upright(pil_pixels(image, name), orientation_of(image))


@contextlib.contextmanager
def decoding(name: str, if_too_large: str = 'use tile= for a large image') -> Iterator[None]:
    """Turn whatever decoders raise into an ImageError that names the image.

    Args:
        name: of the image.
        if_too_large: what to do about an image beyond PIL's limit.
    """
    try:
        yield
    except ImageError:
        raise
    except UnidentifiedImageError:
        raise ImageError(f'{name}: the content is not an image of a known format') from None
    except Image.DecompressionBombError as error:
        raise ImageError(
            f'{name}: {error}; {if_too_large}, and set PIL.Image.MAX_IMAGE_PIXELS if you trust it'
        ) from error
    except Exception as error:  # damaged content makes decoders raise nearly anything, MemoryError too
        reason = str(error) or type(error).__name__
        raise ImageError(f'{name}: it cannot be decoded, so it may be damaged or cut off: {reason}') from error


def pil_pixels(image: Image.Image, name: str) -> np.ndarray:
    """Return the pixels as stored, (H, W) or (H, W, C); palettes, CMYK and the like become RGB."""
    if image.mode == '1':
        image = image.convert('L')
    elif image.mode == 'P':
        image = image.convert('RGB')
    elif image.mode == 'PA':
        image = image.convert('RGBA')
    elif image.mode not in ('L', 'LA', 'RGB', 'RGBA', 'F', 'I') and not image.mode.startswith('I;16'):
        image = image.convert('RGB')
    pixels = _to_array(image)
    if image.mode == 'I' or pixels.dtype.byteorder == '>':  # some 16-bit files come as 32-bit or big-endian
        if pixels.min() < 0 or pixels.max() > 65535:
            raise ImageError(f'{name}: its pixels exceed 16 bits; scale them and pass an array')
        pixels = pixels.astype(np.uint16)
    return pixels


def _to_array(image: Image.Image) -> np.ndarray:
    """Do what ``np.asarray`` does, without the two copies of a large image that it makes on the way."""
    if image.height <= _ROWS_AT_ONCE:
        return np.asarray(image)
    tops = range(0, image.height, _ROWS_AT_ONCE)
    first = np.asarray(image.crop((0, 0, image.width, _ROWS_AT_ONCE)))
    pixels = np.empty((image.height, *first.shape[1:]), first.dtype)
    for top in tops:
        bottom = min(top + _ROWS_AT_ONCE, image.height)
        pixels[top:bottom] = np.asarray(image.crop((0, top, image.width, bottom)))
    return pixels


def orientation_of(image: Image.Image) -> int:
    """Return how the camera was held, as the EXIF orientation 1 (upright) to 8."""
    return image.getexif().get(_ORIENTATION_TAG, 1)


def is_deep_colour(image: Image.Image, header: bytes) -> bool:
    """Return whether PIL would cut an image, opened and not yet decoded, to 8 bits: 16-bit colour.

    Args:
        image: that PIL opened.
        header: the first bytes of its file, at least ``HEADER_LENGTH``.
    """
    if image.mode not in ('RGB', 'RGBA'):
        return False
    if image.format == 'TIFF':
        return image.tag_v2.get(_BITS_PER_SAMPLE_TAG)[0] == 16  # type: ignore[attr-defined]
    return image.format == 'PNG' and header[HEADER_LENGTH - 1] == 16  # its bit depth


def _decode_deep_colour(image: Image.Image, content: bytes, name: str, page: int) -> np.ndarray:
    if image.format == 'TIFF':
        pixels = _tiff_pixels(content, name, page)
        package = 'tifffile'
    else:
        pixels = _png_pixels(content)
        package = 'imagecodecs'
    if pixels is None:
        raise ImageError(f'{name}: to read 16-bit colours at their full depth, install {package}')
    return pixels


def _png_pixels(content: bytes) -> np.ndarray | None:
    """Decode a PNG by imagecodecs, or return None where it is not installed."""
    try:
        import imagecodecs
    except ImportError:
        return None
    return imagecodecs.png_decode(content)


def _tiff_pixels(content: bytes, name: str, number: int) -> np.ndarray | None:
    """Decode a page of a TIFF by tifffile, or return None where it is none or tifffile is not installed."""
    if not content.startswith(TIFF_MAGIC):
        return None
    try:
        import tifffile
    except ImportError:
        return None
    with tifffile.TiffFile(io.BytesIO(content)) as file:
        page = tiff_page(file, number, name)
        _check_size(page)
        pixels = page.asarray()
        return np.moveaxis(pixels, 0, 2) if page.axes == 'SYX' else pixels


def tiff_page(file: Any, number: int, name: str) -> Any:
    """Return a page of an open ``tifffile.TiffFile`` if it is an image."""
    if number and not 0 <= number < len(file.pages):
        raise ImageError(f'{name}: there is no page {number}; it has {len(file.pages)}, counted from 0')
    page = file.pages[number]
    if page.axes not in ('YX', 'YXS', 'SYX'):
        raise ImageError(
            f'{name}: its axes are {page.axes} and its shape {page.shape}, so it is a volume and no image; take slices '
            'of it and pass them as arrays'
        )
    return page


def _check_size(page: Any) -> None:
    """Refuse what PIL would refuse for its size, with four channels counting as one pixel."""
    limit = Image.MAX_IMAGE_PIXELS
    pixels = page.imagewidth * page.imagelength * max(1, page.samplesperpixel / 4)
    if limit is not None and pixels > 2 * limit:
        raise Image.DecompressionBombError(
            f'Image size ({page.imagewidth} x {page.imagelength} pixels of {page.samplesperpixel} channels) exceeds '
            f'limit of {2 * limit} pixels'
        )


def upright(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Undo the camera's rotation, given as the EXIF orientation 1 to 8."""
    if orientation in _TRANSPOSED:
        pixels = pixels.swapaxes(0, 1)
    if orientation in _UPSIDE_DOWN:
        pixels = pixels[::-1]
    if orientation in _MIRRORED:
        pixels = pixels[:, ::-1]
    return pixels


def upright_size(size: tuple[int, int], orientation: int) -> tuple[int, int]:
    """Return (height, width) of what :func:`upright` makes of pixels of a size."""
    return (size[1], size[0]) if orientation in _TRANSPOSED else size


def as_stored(box: Box, size: tuple[int, int], orientation: int) -> Box:
    """Return where a box of an upright image lies in the image as it is stored: the inverse of :func:`upright`.

    Args:
        box: (top, left, bottom, right) in the upright image, half open.
        size: (height, width) of the upright image.
        orientation: EXIF, 1 to 8.
    """
    top, left, bottom, right = box
    height, width = size
    if orientation in _MIRRORED:
        left, right = width - right, width - left
    if orientation in _UPSIDE_DOWN:
        top, bottom = height - bottom, height - top
    return (left, top, right, bottom) if orientation in _TRANSPOSED else (top, left, bottom, right)


def reverse_colours(pixels: np.ndarray) -> np.ndarray:
    """Turn blue, green, red into red, green, blue; an alpha channel stays last and grey stays grey."""
    if pixels.ndim == 3 and pixels.shape[2] in (3, 4):
        return np.concatenate([pixels[:, :, 2::-1], pixels[:, :, 3:]], 2)
    return pixels

"""Decode image files to pixels at full bit depth; every error message contains the image's name."""

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
HEADER_LENGTH = 25  # bytes of a PNG up to its bit depth; TIFF needs fewer
_ORIENTATION_TAG, _BITS_PER_SAMPLE_TAG = 274, 258
# EXIF orientations that need each step, applied in this order: transpose, flip vertically, flip horizontally.
_TRANSPOSED, _UPSIDE_DOWN, _MIRRORED = (5, 6, 7, 8), (3, 4, 7, 8), (2, 3, 6, 7)
_DEPTH_TAG = 32997  # ImageDepth: number of slices of a volume
_ROWS_AT_ONCE = 256
_BYTES_OF_ADDRESS = 1 << 26  # estimate for 9 megapixels, because the header of a remote image is not read in advance


class ImageError(ValueError):
    """An image cannot be read, or does not fit the backbone."""


def name_of(source: Any) -> str:
    """Return a short description of an image source for messages."""
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
    """Estimate from its header the bytes needed to decode an image; 0 for sources that are already decoded."""
    if is_address(source):
        return _BYTES_OF_ADDRESS
    if isinstance(source, bytes):
        source = io.BytesIO(source)
    if not isinstance(source, (str, os.PathLike, io.BytesIO)):
        return 0
    try:
        size = source.getbuffer().nbytes if isinstance(source, io.BytesIO) else os.path.getsize(source)
    except OSError:  # reading the file raises it again
        return 0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            image = Image.open(source)
        # Bytes per pixel in PIL (4 for RGB) plus those of the resulting array; the file itself is added below.
        pixels = image.width * image.height * {'L': 2, 'RGB': 7}.get(image.mode, 12)
        if isinstance(source, io.BytesIO):
            source.seek(0)
        else:
            image.close()
    except Exception:  # decoding raises it again
        return 4 * size
    return size + pixels


@contextlib.contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[None]:
    """Convert OSError to an ImageError that contains the image's name; a missing file stays a FileNotFoundError."""
    name = name_of(path)
    try:
        yield
    except FileNotFoundError:
        raise FileNotFoundError(f'{name} does not exist') from None
    except IsADirectoryError:
        raise ImageError(
            f"{name} is a folder: pass a list of its files, sorted(Path(FOLDER).glob('*.jpg')), or run `swin-dense "
            'features FOLDER --out DIR`; to read a zarr folder, give tile= (--tile)'
        ) from None
    except OSError as error:
        raise ImageError(f'{name} cannot be read: {error.strerror or error}') from error


def decode_bytes(content: bytes, name: str, page: int = 0) -> np.ndarray:
    """Decode the content of a file as :func:`decode_file` does."""
    if not content:
        raise ImageError(f'{name}: the file is empty')
    with decoding(name):
        try:
            image = Image.open(io.BytesIO(content))
        except UnidentifiedImageError:
            pixels = _tiff_pixels(content, name, page)  # PIL does not support TIFFs of more than four channels
            if pixels is None:
                raise
            return pixels
        turn_to(image, page, name)
        if is_deep_colour(image, content):
            return upright(_decode_deep_colour(image, content, name, page), orientation_of(image))
        return decode_pil(image, name)


def turn_to(image: Image.Image, page: int, name: str) -> None:
    """Seek a PIL image to a page, or to a frame of an animation, counted from 0."""
    if page:  # page 0 always exists, and `n_frames` may read the whole file
        pages = getattr(image, 'n_frames', 1)
        if not 0 <= page < pages:
            raise ImageError(f'{name}: there is no page {page}; it has {pages}, counted from 0')
        image.seek(page)
    if image.format == 'TIFF' and image.tag_v2.get(_DEPTH_TAG, 1) > 1:  # type: ignore[attr-defined]
        raise ImageError(f'{name}: it is a volume, not an image; pass its slices as arrays')


def decode_pil(image: Image.Image, name: str) -> np.ndarray:
    """Return the pixels of a PIL image, upright, as :func:`decode_file` does."""
    with decoding(name):
        return upright(pil_pixels(image, name), orientation_of(image))


@contextlib.contextmanager
def decoding(name: str, if_too_large: str = 'use tile= for a large image') -> Iterator[None]:
    """Convert any exception of a decoder to an ImageError that contains the image's name.

    Args:
        name: name of the image.
        if_too_large: advice for an image that exceeds PIL's pixel limit.
    """
    try:
        yield
    except ImageError:
        raise
    except UnidentifiedImageError:
        raise ImageError(f'{name}: the content is not an image of a supported format') from None
    except Image.DecompressionBombError as error:
        raise ImageError(
            f'{name}: {error}; {if_too_large}, and raise PIL.Image.MAX_IMAGE_PIXELS if you trust the image'
        ) from error
    except Exception as error:  # decoders can raise any exception for damaged content, even MemoryError
        reason = str(error) or type(error).__name__
        raise ImageError(f'{name}: it cannot be decoded and may be damaged or truncated: {reason}') from error


def pil_pixels(image: Image.Image, name: str) -> np.ndarray:
    """Return the stored pixels, (H, W) or (H, W, C); palettes, CMYK and similar modes are converted to RGB."""
    if image.mode == '1':
        image = image.convert('L')
    elif image.mode == 'P':
        image = image.convert('RGB')
    elif image.mode == 'PA':
        image = image.convert('RGBA')
    elif image.mode not in ('L', 'LA', 'RGB', 'RGBA', 'F', 'I') and not image.mode.startswith('I;16'):
        image = image.convert('RGB')
    pixels = _to_array(image)
    if image.mode == 'I' or pixels.dtype.byteorder == '>':  # PIL opens some 16-bit files as 32-bit or big-endian
        if pixels.min() < 0 or pixels.max() > 65535:
            raise ImageError(f'{name}: its pixels exceed 16 bits; scale them and pass an array')
        pixels = pixels.astype(np.uint16)
    return pixels


def _to_array(image: Image.Image) -> np.ndarray:
    """Convert like ``np.asarray``, but in strips: ``np.asarray`` makes two temporary copies of the image."""
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
    """Return the EXIF orientation, 1 (upright) to 8."""
    return image.getexif().get(_ORIENTATION_TAG, 1)


def is_deep_colour(image: Image.Image, header: bytes) -> bool:
    """Return whether an image has 16-bit colour channels, which PIL would reduce to 8 bits.

    Args:
        image: an image opened by PIL, not yet decoded.
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
        raise ImageError(f'{name}: install {package} to read 16-bit colour at full depth')
    return pixels


def _png_pixels(content: bytes) -> np.ndarray | None:
    """Decode a PNG with imagecodecs, or return None if it is not installed."""
    try:
        import imagecodecs
    except ImportError:
        return None
    return imagecodecs.png_decode(content)


def _tiff_pixels(content: bytes, name: str, number: int) -> np.ndarray | None:
    """Decode a page of a TIFF with tifffile; return None if it is not a TIFF or tifffile is not installed."""
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
    """Return a page of an open ``tifffile.TiffFile``; raise ImageError if it does not exist or is not an image."""
    if number and not 0 <= number < len(file.pages):
        raise ImageError(f'{name}: there is no page {number}; it has {len(file.pages)}, counted from 0')
    page = file.pages[number]
    if page.axes not in ('YX', 'YXS', 'SYX'):
        raise ImageError(
            f'{name}: it is a volume with axes {page.axes} and shape {page.shape}, not an image; pass its slices as '
            'arrays'
        )
    return page


def _check_size(page: Any) -> None:
    """Apply PIL's limit on the size of an image; four channels count as one pixel."""
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
    """Return (height, width) after :func:`upright`, given the stored (height, width)."""
    return (size[1], size[0]) if orientation in _TRANSPOSED else size


def as_stored(box: Box, size: tuple[int, int], orientation: int) -> Box:
    """Convert a box in the upright image to a box in the stored image.

    Args:
        box: (top, left, bottom, right) in the upright image, half open.
        size: (height, width) of the upright image.
        orientation: EXIF orientation, 1 to 8.
    """
    top, left, bottom, right = box
    height, width = size
    if orientation in _MIRRORED:
        left, right = width - right, width - left
    if orientation in _UPSIDE_DOWN:
        top, bottom = height - bottom, height - top
    return (left, top, right, bottom) if orientation in _TRANSPOSED else (top, left, bottom, right)


def reverse_colours(pixels: np.ndarray) -> np.ndarray:
    """Convert BGR to RGB and BGRA to RGBA; images with other numbers of channels are unchanged."""
    if pixels.ndim == 3 and pixels.shape[2] in (3, 4):
        return np.concatenate([pixels[:, :, 2::-1], pixels[:, :, 3:]], 2)
    return pixels

"""Where the bytes of a file become pixels, at their full depth; what goes wrong is an error that names the image."""

from __future__ import annotations

import contextlib
import io
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError
from torch import Tensor

Box = tuple[int, int, int, int]
TIFF_MAGIC = (b'II*\0', b'MM\0*', b'II+\0', b'MM\0+')
HEADER_LENGTH = 25  # of a PNG, up to its bit depth; more than TIFF needs
_ORIENTATION_TAG, _BITS_PER_SAMPLE_TAG = 274, 258
# What undoes each EXIF orientation, in this order: rows become columns, the rows turn round, the columns turn round.
_TRANSPOSED, _UPSIDE_DOWN, _MIRRORED = (5, 6, 7, 8), (3, 4, 7, 8), (2, 3, 6, 7)

# What PIL, tifffile and their codecs raise for damaged content.
_DECODER_ERRORS = (OSError, SyntaxError, ValueError, EOFError, IndexError, RuntimeError, struct.error, zlib.error)


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
    if isinstance(source, (np.ndarray, Tensor)):
        return f'image of shape {tuple(source.shape)} and type {source.dtype}'
    return f'image of type {type(source).__name__}'


def decode_file(path: Path) -> np.ndarray:
    """Decode a whole file, upright and at its full depth, to (H, W) or (H, W, C)."""
    with reading(path):
        content = path.read_bytes()
    return decode_bytes(content, name_of(path))


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what the file system raises into an error that names the image; a missing file stays FileNotFoundError."""
    name = name_of(path)
    try:
        yield
    except FileNotFoundError:
        raise FileNotFoundError(f'{name} does not exist') from None
    except IsADirectoryError:
        raise ImageError(f'{name} is a folder; a zarr folder is read by tiles: give tile= (--tile)') from None
    except OSError as error:
        raise ImageError(f'{name} cannot be read: {error.strerror or error}') from error


def decode_bytes(content: bytes, name: str) -> np.ndarray:
    """Decode the bytes of a file as :func:`decode_file` does."""
    if not content:
        raise ImageError(f'{name}: the file is empty')
    with decoding(name):
        try:
            image = Image.open(io.BytesIO(content))
        except UnidentifiedImageError:
            pixels = _tiff_pixels(content)  # PIL knows no TIFF of more than four channels
            if pixels is None:
                raise
            return pixels
        if is_deep_colour(image, content):
            return upright(_decode_deep_colour(image, content, name), orientation_of(image))
        return decode_pil(image, name)


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
    except _DECODER_ERRORS as error:
        raise ImageError(f'{name}: it cannot be decoded, so it may be damaged or cut off: {error}') from error


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
    pixels = np.asarray(image)
    if image.mode == 'I' or pixels.dtype.byteorder == '>':  # some 16-bit files come as 32-bit or big-endian
        if pixels.min() < 0 or pixels.max() > 65535:
            raise ImageError(f'{name}: its pixels exceed 16 bits; scale them and pass an array')
        pixels = pixels.astype(np.uint16)
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


def _decode_deep_colour(image: Image.Image, content: bytes, name: str) -> np.ndarray:
    if image.format == 'TIFF':
        pixels = _tiff_pixels(content)
        package = 'tifffile'
    else:
        pixels = _png_pixels(content)
        package = 'opencv-python'
    if pixels is None:
        raise ImageError(f'{name}: to read 16-bit colours at their full depth, install {package}')
    return pixels


def _png_pixels(content: bytes) -> np.ndarray | None:
    """Decode a PNG by OpenCV, or return None where it is not installed."""
    try:
        import cv2
    except ImportError:
        return None
    pixels = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_UNCHANGED)
    if pixels is None:
        raise ValueError('OpenCV does not decode it')
    return reverse_colours(pixels)


def _tiff_pixels(content: bytes) -> np.ndarray | None:
    """Decode the first page of a TIFF by tifffile, or return None where it is none or tifffile is not installed."""
    if not content.startswith(TIFF_MAGIC):
        return None
    try:
        import tifffile
    except ImportError:
        return None
    with tifffile.TiffFile(io.BytesIO(content)) as file:
        page: Any = file.pages[0]
        pixels = page.asarray()
        return np.moveaxis(pixels, 0, 2) if page.axes == 'SYX' else pixels


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

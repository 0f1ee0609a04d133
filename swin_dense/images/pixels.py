"""The type of decoded pixels, and the errors of reading them."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from swin_dense.utils.errors import is_out_of_memory

ORIENTATION = 274  # tag of EXIF
# EXIF orientations that need each step, applied in this order: transpose, flip vertically, flip horizontally.
_TRANSPOSED, _UPSIDE_DOWN, _MIRRORED = (5, 6, 7, 8), (3, 4, 7, 8), (2, 3, 6, 7)


class ImageError(ValueError):
    """An image cannot be read, or does not fit the model."""


class Pixels(NamedTuple):
    """Decoded pixels, (H, W) or (H, W, C) in their original dtype."""

    values: Any  # an array, or an object that reads regions when it is sliced
    has_alpha: bool = False  # the last channel is opacity, which a backbone without that channel does not need


def reverse_colours(values: np.ndarray) -> np.ndarray:
    """Convert BGR to RGB and BGRA to RGBA; images with other numbers of channels are unchanged."""
    if values.ndim == 3 and values.shape[2] in (3, 4):
        return np.concatenate([values[:, :, 2::-1], values[:, :, 3:]], 2)
    return values


def upright(values: np.ndarray, orientation: int) -> np.ndarray:
    """Undo the camera's rotation of an array (H, W) or (H, W, C), given as the EXIF orientation 1 to 8."""
    if orientation in _TRANSPOSED:
        values = values.swapaxes(0, 1)
    if orientation in _UPSIDE_DOWN:
        values = values[::-1]
    if orientation in _MIRRORED:
        values = values[:, ::-1]
    return values


def within_16_bits(values: np.ndarray) -> np.ndarray:
    """Convert integers of 32 bits to uint16: some 16-bit files are stored or opened with 32 bits.

    If none exceeds 255, return the values as they are, which need ``scale=``: they are of 8 bits, or dark ones of 16.
    """
    if 0 < values.max() <= 255 and values.min() >= 0:
        return values
    if values.min() < 0 or values.max() > 65535:
        raise ImageError('its pixels exceed 16 bits; scale them and pass an array')
    return values.astype(np.uint16)


def name_of(source: Any) -> str:
    """Return a short description of an image source for messages."""
    if isinstance(source, (str, os.PathLike)):
        return f'image {os.fspath(source)!r}'
    if isinstance(source, (bytes, bytearray, memoryview)):
        return f'image of {len(source)} bytes'
    if hasattr(source, 'getexif'):
        return f'PIL image of mode {source.mode} and size {source.size}'
    if hasattr(source, 'read') and isinstance(getattr(source, 'name', None), str):
        return f'image {source.name!r}'
    if hasattr(source, 'shape'):  # an array or a tensor
        return f'image of shape {tuple(source.shape)} and type {source.dtype}'
    return f'image of type {type(source).__name__}'


@contextlib.contextmanager
def naming(source: Any) -> Iterator[None]:
    """Name the image in errors; OSErrors and lack of memory become ImageErrors, a missing file a FileNotFoundError."""
    try:
        yield
    except ImageError as error:
        raise ImageError(f'{name_of(source)}: {error}') from error.__cause__
    except (OSError, MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not is_out_of_memory(error):
            raise
        raise _named(name_of(source), error) from error


def _named(name: str, error: Exception) -> Exception:
    if isinstance(error, FileNotFoundError):
        advice = '; an image is a file: open the address first, as with fsspec.open(ADDRESS).open()'
        return FileNotFoundError(f'{name} does not exist' + (advice if '://' in name else ''))
    if isinstance(error, IsADirectoryError):
        return ImageError(
            f"{name} is a folder: pass a list of its files, sorted(Path(FOLDER).glob('*.jpg')), or run `swin-dense "
            'features FOLDER --out DIR`'
        )
    if isinstance(error, OSError):
        return ImageError(f'{name} cannot be read: {error.strerror or error}')
    return ImageError(
        f'{name}: there is too little memory to read it; use tile= for features, or smaller tiles, or '
        'examples/predict_large.py to predict'
    )


@contextlib.contextmanager
def quiet_decoders() -> Iterator[None]:
    """Keep what PIL and tifffile log about damaged files off the screen; handlers of the program still get it.

    Python prints what a logger without a handler reports. Each reading adds a handler of its own, because other threads
    may end theirs at any time.
    """
    handler = logging.NullHandler()
    loggers = [logging.getLogger(library) for library in ('PIL', 'tifffile')]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


@contextlib.contextmanager
def decoding() -> Iterator[None]:
    """Convert any exception of a decoder to an ImageError, except for lack of memory, and print nothing about it."""
    try:
        with quiet_decoders():
            yield
    except (ImageError, MemoryError):
        raise
    except Exception as error:
        raise ImageError(_reason(error)) from error


def _reason(error: Exception) -> str:
    from PIL import Image, UnidentifiedImageError  # not needed for arrays

    if isinstance(error, UnidentifiedImageError):
        return 'the content is not an image of a supported format'
    if isinstance(error, Image.DecompressionBombError):
        return (
            f'{error}; raise PIL.Image.MAX_IMAGE_PIXELS if you trust the image, or read it in tiles: convert it to '
            'TIFF or zarr and use tile= for features, or examples/predict_large.py to predict'
        )
    return f'it cannot be decoded and may be damaged or truncated: {str(error) or type(error).__name__}'

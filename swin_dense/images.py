"""Images in any form that people hold them, out as float tensors (C, H, W) in [0, 1]."""

from __future__ import annotations

import contextlib
import io
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

# Of ImageNet in RGB, on the scale 0 to 1: what every published Swin was trained with.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

# Resampling a float image overshoots its range a little; a 0-255 image is far outside.
_OVERSHOOT = 0.5
TIFF_MAGIC = (b'II*\0', b'MM\0*', b'II+\0', b'MM\0+')
HEADER_LENGTH = 25  # of a PNG, up to its bit depth; more than TIFF needs
_ORIENTATION_TAG, _BITS_PER_SAMPLE_TAG = 274, 258
_FULL_SCALE = {np.dtype(np.uint8): 255.0, np.dtype(np.uint16): 65535.0}

# What PIL, tifffile and their codecs raise for damaged content.
_DECODER_ERRORS = (OSError, SyntaxError, ValueError, EOFError, IndexError, RuntimeError, struct.error, zlib.error)


class ImageError(ValueError):
    """An image cannot be read, or is not an image that the backbone can take."""


def read_image(source: Any, channels: int = 3, bgr: bool = False, check_range: bool = True) -> Tensor:
    """Read one image, upright and at its full depth.

    Integers are divided by the largest value of their type (255 or 65535); floats are taken to lie in [0, 1]. An
    alpha channel is dropped, a grey image is repeated over three channels, a palette is looked up.

    Args:
        source: a path, the bytes of an image file, a PIL image, a numpy array (H, W) or (H, W, C), or a tensor
            (C, H, W); arrays and tensors are uint8, uint16 or floating.
        channels: how many the backbone takes.
        bgr: arrays and tensors hold blue first, as ``cv2.imread`` returns them. Files and PIL images know their own
            order, so this does not touch them.
        check_range: refuse floats outside [0, 1]; off for images that are normalised already.

    Returns:
        (channels, H, W) float32.

    Raises:
        FileNotFoundError: the path does not exist.
        ImageError: the content is no image, is cut off, or has channels or values that do not fit.
        TypeError: the source is none of the above.
    """
    name = describe(source)
    if isinstance(source, (str, os.PathLike)):
        pixels = read_file(Path(source))
    elif isinstance(source, (bytes, bytearray, memoryview)):
        pixels = _decode(bytes(source), name)
    elif isinstance(source, Image.Image):
        with decoding(name):
            pixels = _upright(pil_pixels(source, name), orientation_of(source))
    elif isinstance(source, (np.ndarray, Tensor)):
        pixels = array_pixels(source, name)
        pixels = reverse_colours(pixels) if bgr else pixels
    else:
        raise TypeError(
            f'an image must be a path, bytes, a PIL image, a numpy array or a torch tensor, got {type(source).__name__}'
        )
    return to_tensor(pixels, channels, name, check_range)


def normalize(image: Tensor, mean: Sequence[float] | None, std: Sequence[float] | None) -> Tensor:
    """Return ``(image - mean) / std`` per channel, or the image itself where both are None.

    Args:
        image: (C, H, W) or (B, C, H, W).
        mean: C values on the image's scale.
        std: C values, each above 0.
    """
    if mean is None and std is None:
        return image
    channels = image.shape[-3]
    if mean is None or std is None or len(mean) != channels or len(std) != channels:
        raise ValueError(
            f'mean and std must be one value per channel, that is {channels}, got mean={mean!r} and std={std!r}; '
            'give both, or None for both to leave the image as it is'
        )
    if max(mean) > 1 or min(std) <= 0 or max(std) > 1:
        raise ValueError(
            f'mean and std must be on the scale 0 to 1, and std above 0, got mean={tuple(mean)} and std={tuple(std)}; '
            'divide values on the scale 0 to 255 by 255'
        )
    shape = (channels, 1, 1)
    return (image - image.new_tensor(mean).view(shape)) / image.new_tensor(std).view(shape)


def describe(source: Any) -> str:
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


def to_tensor(pixels: np.ndarray, channels: int, name: str, check_range: bool = True) -> Tensor:
    """Turn decoded pixels, (H, W) or (H, W, C), into a (channels, H, W) float32 tensor in [0, 1]."""
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]
    if pixels.ndim != 3 or 0 in pixels.shape:
        raise ImageError(f'{name}: an array must have the shape (H, W) or (H, W, C) and at least one pixel')
    pixels = _fit_channels(pixels, channels, name)
    scale = _FULL_SCALE.get(pixels.dtype.newbyteorder('='))
    if scale is not None:
        values = pixels.astype(np.float32) / np.float32(scale)
    elif pixels.dtype.kind == 'f':
        values = pixels.astype(np.float32)
        _check_floats(values, name, check_range)
    else:
        raise ImageError(f'{name}: pixels must be uint8, uint16 or floating, got {pixels.dtype}; convert them first')
    # Strides of a flipped or transposed view may be negative, which torch does not take.
    return torch.from_numpy(np.ascontiguousarray(values.transpose(2, 0, 1)))


def array_pixels(source: np.ndarray | Tensor, name: str) -> np.ndarray:
    """Return an array (H, W) or (H, W, C) as it is, and a view (H, W, C) of a tensor (C, H, W)."""
    if isinstance(source, np.ndarray):
        return source
    if source.ndim != 3:
        raise ImageError(f'{name}: a tensor must have the shape (C, H, W), or (B, C, H, W) for B images')
    if source.dtype == torch.bfloat16:  # numpy has none
        source = source.float()
    return source.detach().cpu().permute(1, 2, 0).numpy()


def _fit_channels(pixels: np.ndarray, channels: int, name: str) -> np.ndarray:
    given = pixels.shape[2]
    if given == channels:
        return pixels
    if given in (2, 4) and channels in (1, 3):  # the last one is alpha
        pixels = pixels[:, :, :-1]
    if pixels.shape[2] == 1 and channels == 3:
        pixels = pixels.repeat(3, 2)
    if pixels.shape[2] != channels:
        hint = '; arrays are (H, W, C), tensors (C, H, W)' if channels in pixels.shape[:2] else ''
        raise ImageError(
            f'{name}: it has {given} channels and the backbone takes {channels}; select channels, or build the '
            f'backbone with in_channels={given}{hint}'
        )
    return pixels


def _check_floats(values: np.ndarray, name: str, check_range: bool) -> None:
    low, high = float(values.min()), float(values.max())  # NaN if any value is
    if not (np.isfinite(low) and np.isfinite(high)):
        bad = int((~np.isfinite(values)).sum())
        raise ImageError(f'{name}: {bad} of its values are NaN or infinite; replace them first')
    if check_range and not -_OVERSHOOT <= low <= high <= 1 + _OVERSHOOT:
        raise ImageError(
            f'{name}: floats must lie between 0 and 1, got {low:.3g} to {high:.3g}; divide by the largest value, '
            'or give mean=None and std=None if the image is normalised already'
        )


def reverse_colours(pixels: np.ndarray) -> np.ndarray:
    """Turn blue, green, red into red, green, blue; an alpha channel stays last and grey stays grey."""
    if pixels.ndim == 3 and pixels.shape[2] in (3, 4):
        return np.concatenate([pixels[:, :, 2::-1], pixels[:, :, 3:]], 2)
    return pixels


def read_file(path: Path) -> np.ndarray:
    """Decode a whole file, upright and at its full depth, to (H, W) or (H, W, C)."""
    with reading(path):
        content = path.read_bytes()
    return _decode(content, describe(path))


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what the file system raises into an error that names the image; a missing file stays FileNotFoundError."""
    name = describe(path)
    try:
        yield
    except FileNotFoundError:
        raise FileNotFoundError(f'{name} does not exist') from None
    except IsADirectoryError:
        raise ImageError(f'{name} is a folder; a zarr folder is read by tiles: give tile= (--tile)') from None
    except OSError as error:
        raise ImageError(f'{name} cannot be read: {error.strerror or error}') from error


def _decode(content: bytes, name: str) -> np.ndarray:
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
            pixels = _decode_deep_colour(image, content, name)
        else:
            pixels = pil_pixels(image, name)
        return _upright(pixels, orientation_of(image))


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


def _upright(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Undo the camera's rotation, given as the EXIF orientation 1 to 8."""
    if orientation in (5, 6, 7, 8):
        pixels = pixels.swapaxes(0, 1)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return pixels

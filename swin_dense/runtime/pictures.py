"""Read and resize images as mmdet and mmseg do with OpenCV, but in numpy."""

from __future__ import annotations

from os import PathLike
from typing import Any

import numpy as np

# OpenCV uses fixed-point weights with this denominator.
_ONE = 2048


def read(picture: str | PathLike[str] | np.ndarray) -> np.ndarray:
    """Return an image as (H, W, 3) uint8, RGB, with the EXIF orientation applied to files.

    Args:
        picture: file, or array, which is returned unchanged.

    Raises:
        ValueError: an array has another shape.
        TypeError: an array has another dtype.
    """
    if isinstance(picture, np.ndarray):
        if picture.ndim != 3 or picture.shape[2] != 3 or not picture.size:
            raise ValueError(f'a picture must have the shape (H, W, 3), got {picture.shape}')
        if picture.dtype != np.uint8:
            raise TypeError(f'a picture must have the type uint8, got {picture.dtype}')
        return picture
    from PIL import Image, ImageOps  # not needed for arrays

    with Image.open(picture) as image:
        return np.asarray(ImageOps.exif_transpose(image).convert('RGB'))


def size_in_model(height: int, width: int, resize: dict[str, Any] | None) -> tuple[int, int]:
    """Return the (height, width) of an image after the ``Resize`` of a test pipeline.

    Args:
        height: height of the image in pixels.
        width: width of the image in pixels.
        resize: ``scale`` as (width, height), or ``scale_factor`` as (x, y), and ``keep_ratio``; None keeps the size.
    """
    if resize is None:
        return height, width
    scale = resize['scale'] or _scaled(height, width, *resize['scale_factor'])[::-1]
    if not resize['keep_ratio']:
        return scale[1], scale[0]
    factor = min(max(scale) / max(height, width), min(scale) / min(height, width))
    return _scaled(height, width, factor, factor)


def _scaled(height: int, width: int, x_factor: float, y_factor: float) -> tuple[int, int]:
    return max(int(height * y_factor + 0.5), 1), max(int(width * x_factor + 0.5), 1)


def resized(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resize pixels, (H, W, 3) uint8, bilinearly, with the fixed-point arithmetic of OpenCV."""
    if pixels.shape[:2] == (height, width):
        return pixels
    if pixels.shape[:2] == (2 * height, 2 * width):  # for half the size, OpenCV averages 2x2 pixels
        quarters = pixels.reshape(height, 2, width, 2, 3).astype(np.int32)
        return ((quarters.sum((1, 3)) + 2) >> 2).astype(np.uint8)
    left, right, x_weights = _taps(pixels.shape[1], width)
    top, bottom, y_weights = _taps(pixels.shape[0], height, clamps=False)
    rows = pixels.astype(np.int32)
    rows = rows[:, left] * x_weights[0][:, None] + rows[:, right] * x_weights[1][:, None]
    rows >>= 4
    upper = (rows[top] * y_weights[0][:, None, None]) >> 16
    lower = (rows[bottom] * y_weights[1][:, None, None]) >> 16
    return ((upper + lower + 2) >> 2).clip(0, 255).astype(np.uint8)


def _taps(inputs: int, outputs: int, clamps: bool = True) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, ...]]:
    """Return the indices of the two inputs of every output along one axis, and their weights."""
    position = ((np.arange(outputs) + 0.5) * (inputs / outputs) - 0.5).astype(np.float32)
    first = np.floor(position).astype(np.int64)
    fraction = position - first.astype(np.float32)
    if clamps:
        fraction[(first < 0) | (first >= inputs - 1)] = 0
    weights = tuple(np.rint(part * np.float32(_ONE)).astype(np.int32) for part in (1 - fraction, fraction))
    return first.clip(0, inputs - 1), (first + 1).clip(0, inputs - 1), weights

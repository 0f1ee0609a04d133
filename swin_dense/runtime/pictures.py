"""Pictures as mmdet and mmseg read and resize them, which is OpenCV's way, in numpy."""

from __future__ import annotations

from os import PathLike
from typing import Any

import numpy as np

# OpenCV's weights are whole numbers of this fraction.
_ONE = 2048


def read(picture: str | PathLike[str] | np.ndarray) -> np.ndarray:
    """Return a picture as (H, W, 3) uint8, RGB, turned as its EXIF data says.

    Args:
        picture: file, or the array itself.

    Raises:
        ValueError, TypeError: an array of another shape or type.
    """
    if isinstance(picture, np.ndarray):
        if picture.ndim != 3 or picture.shape[2] != 3 or not picture.size:
            raise ValueError(f'a picture must have the shape (H, W, 3), got {picture.shape}')
        if picture.dtype != np.uint8:
            raise TypeError(f'a picture must have the type uint8, got {picture.dtype}')
        return picture
    from PIL import Image, ImageOps  # arrays do without

    with Image.open(picture) as image:
        return np.asarray(ImageOps.exif_transpose(image).convert('RGB'))


def size_in_model(height: int, width: int, resize: dict[str, Any] | None) -> tuple[int, int]:
    """Return the (height, width) that the ``Resize`` of a test pipeline gives a picture.

    Args:
        height: of the picture in pixels.
        width: of the picture in pixels.
        resize: ``scale`` as (width, height) or ``scale_factor`` by axis, and ``keep_ratio``; None leaves it.
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
    """Return pixels, (H, W, 3) uint8, in another size: bilinear, with the whole numbers that OpenCV computes with."""
    if pixels.shape[:2] == (height, width):
        return pixels
    if pixels.shape[:2] == (2 * height, 2 * width):  # OpenCV takes means there
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
    """Return which two inputs every output is made of, and their weights."""
    position = ((np.arange(outputs) + 0.5) * (inputs / outputs) - 0.5).astype(np.float32)
    first = np.floor(position).astype(np.int64)
    fraction = position - first.astype(np.float32)
    if clamps:
        fraction[(first < 0) | (first >= inputs - 1)] = 0
    weights = tuple(np.rint(part * np.float32(_ONE)).astype(np.int32) for part in (1 - fraction, fraction))
    return first.clip(0, inputs - 1), (first + 1).clip(0, inputs - 1), weights

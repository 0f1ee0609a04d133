"""Read and resize images with OpenCV, as mmdet and mmseg do."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from swin_dense.images.pixels import ImageError, decoding, naming

if TYPE_CHECKING:
    from PIL import Image

    Picture = str | PathLike[str] | np.ndarray | Image.Image


def read(picture: Picture) -> np.ndarray:
    """Return an image as (H, W, 3) uint8, RGB, with the values that mmdet and mmseg read from the same file.

    It may be a file, a PIL image, or an array, which is returned unchanged. Raises ImageError if it is damaged or of a
    kind or shape that is not supported.
    """
    if not isinstance(picture, (str, PathLike, np.ndarray)) and hasattr(picture, 'getexif'):  # a PIL image
        picture = np.asarray(picture.convert('RGB'))
    if isinstance(picture, np.ndarray):
        if picture.ndim != 3 or picture.shape[2] != 3 or not picture.size:
            raise ImageError(f'a picture must have the shape (H, W, 3), got {picture.shape}')
        if picture.dtype != np.uint8:
            raise TypeError(f'a picture must have the type uint8, got {picture.dtype}')
        return picture
    if not isinstance(picture, (str, PathLike)):
        raise TypeError(f'a picture must be a file, a PIL image or an array, got {type(picture).__name__}')
    if not Path(picture).is_file():
        raise FileNotFoundError(f'there is no file {picture}')
    import cv2
    from PIL import Image  # not needed for arrays

    with naming(picture), decoding(), Image.open(picture) as image:
        image.load()  # OpenCV returns what it finds in a damaged file
    found = cv2.imdecode(np.fromfile(picture, np.uint8), cv2.IMREAD_COLOR)
    if found is None:
        raise ImageError(f'image {str(picture)!r} is of a format that OpenCV does not read, {image.format}')
    return np.ascontiguousarray(found[:, :, ::-1])


def size_in_model(height: int, width: int, resize: dict[str, Any] | None) -> tuple[int, int]:
    """Return the (height, width) of an image after the ``Resize`` of a test pipeline.

    ``resize`` has ``scale`` as (width, height), or ``scale_factor`` as (x, y), and ``keep_ratio``; None keeps the size.
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


def model_input(pixels: np.ndarray, facts: dict[str, Any]) -> tuple[np.ndarray, tuple[int, int]]:
    """Return the input of a model, (1, 3, H, W) float32, BGR, and its (height, width) without ``Pad``.

    The image is (H, W, 3) uint8, RGB; ``facts`` has ``resize``, ``pad`` and ``to_float32`` of the test pipeline.
    """
    size = size_in_model(pixels.shape[0], pixels.shape[1], facts['resize'])
    bgr = pixels[:, :, ::-1].astype(np.float32 if facts.get('to_float32') else np.uint8)
    bgr = resized(bgr, *size)
    if pad := facts.get('pad'):
        divisor = pad['size_divisor']
        full = pad['size'][::-1] if pad['size'] else [-(-side // divisor) * divisor for side in size]
        height, width = max(full[0], size[0]), max(full[1], size[1])
        canvas = np.full((height, width, 3), pad['value'], bgr.dtype)
        canvas[: size[0], : size[1]] = bgr
        bgr = canvas
    return bgr[None].transpose(0, 3, 1, 2).astype(np.float32), size


def resized(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resize pixels, (H, W, 3) uint8 or float32, bilinearly."""
    import cv2

    return cv2.resize(np.ascontiguousarray(pixels), (width, height), interpolation=cv2.INTER_LINEAR)

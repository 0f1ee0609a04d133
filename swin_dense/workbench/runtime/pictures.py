"""Read and resize images with OpenCV, as mmdet and mmseg do."""

from __future__ import annotations

import io
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from swin_dense.images.pixels import ORIENTATION, ImageError, decoding, naming, upright

if TYPE_CHECKING:
    from PIL import Image

    Picture = str | PathLike[str] | bytes | bytearray | memoryview | np.ndarray | Image.Image


def read(picture: Picture) -> np.ndarray:
    """Return an image as (H, W, 3) uint8, RGB, with the values that mmdet and mmseg read from the same file.

    It may be a file or its bytes, a PIL image, which is read as its file, or an array, which is returned unchanged.
    Raises ImageError if it is damaged or of a kind or shape that is not supported.
    """
    if isinstance(picture, np.ndarray):
        if picture.ndim != 3 or picture.shape[2] != 3 or not picture.size:
            raise ImageError(f'a picture must have the shape (H, W, 3), got {picture.shape}')
        if picture.dtype != np.uint8:
            raise TypeError(f'a picture must have the type uint8, got {picture.dtype}')
        return picture
    if isinstance(picture, (bytes, bytearray, memoryview)):
        content = np.frombuffer(picture, np.uint8)
    elif isinstance(picture, (str, PathLike)):
        if not Path(picture).is_file():
            raise FileNotFoundError(f'there is no file {picture}')
        content = np.fromfile(picture, np.uint8)
    elif hasattr(picture, 'getexif'):
        with naming(picture), decoding():
            return _of_pil(picture)
    else:
        raise TypeError(
            f'a picture must be a file, the bytes of one, a PIL image or an array, got {type(picture).__name__}'
        )
    with naming(picture):
        return _of_content(content)


def _of_content(content: np.ndarray) -> np.ndarray:
    """Return the pixels of the bytes of a file."""
    import cv2
    from PIL import Image  # not needed for arrays

    with decoding(), Image.open(io.BytesIO(content.tobytes())) as image:
        image.load()  # OpenCV returns what it finds in a damaged file
    found = cv2.imdecode(content, cv2.IMREAD_COLOR)
    if found is None:
        raise ImageError(f'its format is {image.format}, which OpenCV does not read')
    return np.ascontiguousarray(found[:, :, ::-1])


def _of_pil(image: Image.Image) -> np.ndarray:
    """Return the pixels of a PIL image, upright; of 16 bits, the upper 8."""
    image.load()  # PIL turns TIFFs upright itself
    # Older versions of PIL open PNG and PPM of 16 bits with 32.
    has_16_bits = image.mode.startswith('I;16') or (image.mode == 'I' and image.format in ('PNG', 'PPM'))
    if has_16_bits:
        grey = np.asarray(image) >> 8
        values = np.stack([grey] * 3, 2).astype(np.uint8)
    elif image.mode in ('I', 'F'):  # PIL would cut values off at 255
        raise ImageError('pixels of 32 bits have no known range; scale them to 0 to 255 and pass an array of uint8')
    else:
        values = np.asarray(image.convert('RGB'))
    return np.ascontiguousarray(upright(values, image.getexif().get(ORIENTATION, 1)))


def size_in_model(height: int, width: int, resize: dict[str, Any] | None) -> tuple[int, int]:
    """Return the (height, width) of an image after the ``Resize`` of a test pipeline.

    ``resize`` has ``scale`` as (width, height), or ``scale_factor`` as (x, y), and ``keep_ratio``; None keeps the size.
    """
    if resize is None:
        return height, width
    scale = resize['scale']
    if not scale:
        scaled_height, scaled_width = _scaled(height, width, *resize['scale_factor'])
        scale = (scaled_width, scaled_height)
    if not resize['keep_ratio']:
        return scale[1], scale[0]
    of_long_side = max(scale) / max(height, width)
    of_short_side = min(scale) / min(height, width)
    factor = min(of_long_side, of_short_side)
    return _scaled(height, width, factor, factor)


def _scaled(height: int, width: int, x_factor: float, y_factor: float) -> tuple[int, int]:
    height = int(height * y_factor + 0.5)
    width = int(width * x_factor + 0.5)
    return max(height, 1), max(width, 1)


def model_input(pixels: np.ndarray, facts: dict[str, Any]) -> tuple[np.ndarray, tuple[int, int]]:
    """Return the input of a model, (1, 3, H, W) float32, BGR, and its (height, width) without ``Pad``.

    The image is (H, W, 3) uint8, RGB; ``facts`` has ``resize``, ``pad`` and ``to_float32`` of the test pipeline.
    """
    size = size_in_model(pixels.shape[0], pixels.shape[1], facts['resize'])
    kind = np.float32 if facts.get('to_float32') else np.uint8
    bgr = pixels[:, :, ::-1].astype(kind)
    bgr = resized(bgr, *size)
    pad = facts.get('pad')
    if pad:
        height, width = size
        if pad['size']:
            least_width, least_height = pad['size']
            height = max(height, least_height)
            width = max(width, least_width)
        else:
            divisor = pad['size_divisor']
            height = -(-height // divisor) * divisor
            width = -(-width // divisor) * divisor
        canvas = np.full((height, width, 3), pad['value'], bgr.dtype)
        canvas[: size[0], : size[1]] = bgr
        bgr = canvas
    channels_first = bgr[None].transpose(0, 3, 1, 2)
    return channels_first.astype(np.float32), size


def resized(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resize pixels, (H, W, 3) uint8 or float32, bilinearly."""
    import cv2

    pixels = np.ascontiguousarray(pixels)
    return cv2.resize(pixels, (width, height), interpolation=cv2.INTER_LINEAR)

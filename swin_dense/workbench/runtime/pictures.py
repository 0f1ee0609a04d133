"""Read and resize images as mmdet and mmseg do with OpenCV, but in numpy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from swin_dense.utils.pixels import ImageError, LargeImage, Pixels, decoding, naming

if TYPE_CHECKING:
    from PIL import Image

    Picture = str | PathLike[str] | np.ndarray | Image.Image

# OpenCV uses fixed-point weights with this denominator.
_ONE = 2048
_MODES = ('1', 'L', 'LA', 'P', 'PA', 'RGB', 'RGBA', 'CMYK', 'YCbCr')
_BITS, _PHOTOMETRIC, _PLANES = 258, 262, 284  # tags of TIFF


def read(picture: Picture) -> np.ndarray:
    """Return an image as (H, W, 3) uint8, RGB, with the values that mmdet and mmseg read from the same file.

    Like OpenCV, it reduces 16 bits to the upper 8, drops alpha (TIFF: multiplies by it) and applies the orientation.
    Conversions from CMYK and YCbCr differ by one level.

    Args:
        picture: file, PIL image, or array, which is returned unchanged.

    Raises:
        FileNotFoundError: there is no such file.
        ImageError: an array has another shape, or the image is damaged or of a kind that is not supported.
        TypeError: an array has another dtype, or ``picture`` another type.
    """
    if isinstance(picture, np.ndarray):
        if picture.ndim != 3 or picture.shape[2] != 3 or not picture.size:
            raise ImageError(f'a picture must have the shape (H, W, 3), got {picture.shape}')
        if picture.dtype != np.uint8:
            raise TypeError(f'a picture must have the type uint8, got {picture.dtype}')
        return picture
    from PIL import Image  # not needed for arrays

    if not isinstance(picture, (str, PathLike, Image.Image)):
        raise TypeError(f'a picture must be a file, a PIL image or an array, got {type(picture).__name__}')
    path = None if isinstance(picture, Image.Image) else Path(picture)
    if path and not path.is_file():
        raise FileNotFoundError(f'there is no file {path}')
    with naming(picture), decoding(), Image.open(path) if path else contextlib.nullcontext(picture) as image:
        return _pixels(image)


@contextlib.contextmanager
def open_large(picture: Any) -> Iterator[LargeImage]:
    """Open an image of RGB in uint8 to read it by regions, (h, w, 3), and close it at the end of the block.

    Only a TIFF file of 8-bit RGB, which needs tifffile and zarr, and imagecodecs if compressed, and arrays such as
    memory-mapped and zarr ones, are read by regions; others as a whole.
    """
    is_array = hasattr(picture, 'shape') and not isinstance(picture, np.ndarray)
    if is_array and (len(picture.shape) != 3 or picture.shape[2] != 3 or picture.dtype != np.uint8):
        raise ImageError(f'a picture must be (H, W, 3) of uint8, got {picture.shape} of {picture.dtype}')
    with contextlib.ExitStack() as stack:
        found = _tiff(picture, stack) if isinstance(picture, (str, PathLike)) else None
        values = found if found is not None else picture if is_array else read(picture)
        yield LargeImage(picture, Pixels(values))


def _tiff(path: str | PathLike[str], stack: contextlib.ExitStack) -> Any:
    """Return the pixels of a TIFF of 8-bit RGB, decoded when they are sliced; None for any other file."""
    if Path(path).suffix.lower() not in ('.tif', '.tiff'):
        return None
    from swin_dense.utils import tiff  # needs PIL

    try:
        page = tiff.open_page(path, 0, stack, by_regions=True)
        return tiff.regions_of(page, stack) if page is not None and tiff.is_rgb(page) else None
    except Exception:  # PIL may support the file; if not, `read` raises
        return None


def _pixels(image: Any) -> np.ndarray:
    """Return the pixels of a PIL image, (H, W, 3) uint8, RGB."""
    from PIL import ImageOps

    if 0 in image.size:
        raise ImageError(f'its size is {image.width} x {image.height}')
    tags = image.tag_v2 if image.format == 'TIFF' else {}
    bits, is_planar = max(tags.get(_BITS, (8,))), tags.get(_PLANES, 1) != 1
    largest = _declared_largest(image)
    # OpenCV does not read the orientation of AVIF.
    upright = image if image.format == 'AVIF' else ImageOps.exif_transpose(image)
    # 16-bit PNG and PGM have the mode I in older versions of Pillow.
    is_deep = image.mode.startswith('I;16') or (image.mode == 'I' and image.format in ('PNG', 'PPM'))
    if bits not in (1, 2, 4, 8, 16) or (bits == 16 and is_planar) or not (is_deep or image.mode in _MODES):
        kind = f', in a TIFF of {bits} bits{" in planes" * is_planar}' if tags else ''
        raise ImageError(
            f'it has pixels of the mode {image.mode}{kind}; only 8 and 16 bits, grey or colour, are supported: convert '
            'it, or pass an array of uint8'
        )
    if not is_deep:
        # From TIFF, OpenCV returns colours multiplied by alpha.
        mode = 'RGBa' if tags and image.mode == 'RGBA' else 'RGB'
        pixels = np.asarray(upright.convert(mode))[:, :, :3]
        return pixels if largest is None else _as_stored(pixels, 255, largest)
    if largest is not None:
        return np.stack([_as_stored(np.asarray(upright), 65535, largest)] * 3, 2)
    grey = (np.asarray(upright) >> 8).astype(np.uint8)
    if tags.get(_PHOTOMETRIC) == 0:  # black is the largest value
        grey = 255 - grey
    return np.stack([grey] * 3, 2)


def _declared_largest(image: Any) -> int | None:
    """Return the largest value that a PGM or PPM declares if PIL scales its values for it, which OpenCV does not do."""
    if image.format != 'PPM' or not image.tile:
        return None
    options = image.tile[0][3]
    found = options[1] if isinstance(options, tuple) and len(options) > 1 else None
    return found if isinstance(found, int) and found not in (255, 65535) else None


def _as_stored(pixels: np.ndarray, scale: int, largest: int) -> np.ndarray:
    """Return the values that a PGM or PPM stores, the upper 8 of 16 bits, of those that PIL has scaled to ``scale``."""
    stored = np.rint(pixels.astype(np.float64) * (largest / scale)).astype(np.uint16)
    if largest > 255:
        stored >>= 8
    return stored.astype(np.uint8)


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


def model_input(pixels: np.ndarray, facts: dict[str, Any]) -> tuple[np.ndarray, tuple[int, int]]:
    """Return the input of a model for an image, (1, 3, H, W) float32, BGR, and its (height, width) without ``Pad``.

    Args:
        pixels: the image, (H, W, 3) uint8, RGB.
        facts: ``resize``, ``pad`` and ``to_float32`` of the test pipeline.
    """
    size = size_in_model(pixels.shape[0], pixels.shape[1], facts['resize'])
    bgr = pixels[:, :, ::-1].astype(np.float32 if facts.get('to_float32') else np.uint8)
    bgr = resized(bgr, *size)
    if pad := facts.get('pad'):
        full = (
            pad['size'][::-1]
            if pad['size']
            else [-(-side // pad['size_divisor']) * pad['size_divisor'] for side in size]
        )
        canvas = np.full((max(full[0], size[0]), max(full[1], size[1]), 3), pad['value'], bgr.dtype)
        canvas[: size[0], : size[1]] = bgr
        bgr = canvas
    return bgr[None].transpose(0, 3, 1, 2).astype(np.float32), size


def resized(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resize pixels, (H, W, 3) uint8 or float32, bilinearly, with the arithmetic of OpenCV: uint8 in fixed point."""
    if pixels.shape[:2] == (height, width):
        return pixels
    is_float = pixels.dtype == np.float32
    if pixels.shape[:2] == (2 * height, 2 * width):  # for half the size, OpenCV averages 2x2 pixels
        quarters = pixels.reshape(height, 2, width, 2, 3)
        if is_float:
            return quarters.mean((1, 3))
        return ((quarters.sum((1, 3), dtype=np.int32) + 2) >> 2).astype(np.uint8)
    # OpenCV computes positions in the precision of the result.
    precision = np.float64 if is_float else np.float32
    left, right, x_weights = _taps(pixels.shape[1], width, precision)
    top, bottom, y_weights = _taps(pixels.shape[0], height, precision, clamps=False)
    if is_float:
        rows = pixels[:, left] * (1 - x_weights[:, None]) + pixels[:, right] * x_weights[:, None]
        return rows[top] * (1 - y_weights[:, None, None]) + rows[bottom] * y_weights[:, None, None]
    rows = pixels.astype(np.int32)
    rows = rows[:, left] * _fixed(1 - x_weights)[:, None] + rows[:, right] * _fixed(x_weights)[:, None]
    rows >>= 4
    upper = (rows[top] * _fixed(1 - y_weights)[:, None, None]) >> 16
    lower = (rows[bottom] * _fixed(y_weights)[:, None, None]) >> 16
    return ((upper + lower + 2) >> 2).clip(0, 255).astype(np.uint8)


def _fixed(weights: np.ndarray) -> np.ndarray:
    return np.rint(weights * np.float32(_ONE)).astype(np.int32)


def _taps(inputs: int, outputs: int, precision: type, clamps: bool = True) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the indices of the two inputs of every output along one axis, and the weight of the second, float32."""
    position: np.ndarray = ((np.arange(outputs) + 0.5) * (inputs / outputs) - 0.5).astype(precision)
    first = np.floor(position).astype(np.int64)
    fraction = (position - first.astype(precision)).astype(np.float32)
    if clamps:
        fraction[(first < 0) | (first >= inputs - 1)] = 0
    return first.clip(0, inputs - 1), (first + 1).clip(0, inputs - 1), fraction

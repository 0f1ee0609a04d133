"""Read images from any source, upright and at full bit depth, as float tensors (C, H, W) in [0, 1]."""

from __future__ import annotations

import contextlib
import io
import math
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from swin_dense.images import tiff
from swin_dense.images.pixels import (
    ORIENTATION,
    ImageError,
    Pixels,
    decoding,
    name_of,
    naming,
    quiet_decoders,
    reverse_colours,
    upright,
    within_16_bits,
)
from swin_dense.utils import compat

# Resampling lets float images slightly exceed [0, 1]; images on the scale 0 to 255 are far outside.
_OVERSHOOT = 0.5
_LEAST_STD = 1e-6  # a fifteenth of a 16-bit step; dividing by a smaller number makes later layers overflow
_FULL_SCALE = {torch.uint8: 255.0, compat.UINT16: 65535.0}
_STORED_AS = {'u1': np.uint8, 'u2': compat.NUMPY_UINT16}  # floats become float32
_KEPT_MODES = ('L', 'LA', 'RGB', 'RGBA', 'F', 'I', 'I;16', 'I;16L', 'I;16B', 'I;16N')
_CONVERTED_MODES = {'1': 'L', 'La': 'LA', 'PA': 'RGBA', 'RGBa': 'RGBA'}  # others become RGB
_PNG_DEPTH = 24  # position of the bit depth in a PNG
_ROWS_AT_ONCE = 256
Statistic = Sequence[float] | float | None  # per channel, or one for all


def read_image(source: Any, channels: int = 3, bgr: bool = False, page: int | None = None) -> Tensor:
    """Read one image, upright and at full bit depth.

    Integers are divided by the largest value of their type (255 or 65535); floats must be in [0, 1]. An alpha channel
    is dropped, a grey image is repeated over three channels, and a palette is converted to RGB.

    Args:
        source: a path, the bytes of an image file, a file opened with 'rb' (of fsspec, say), a PIL image, a numpy array
            (H, W) or (H, W, C), or a tensor (C, H, W); arrays and tensors are uint8, uint16 or floating.
        channels: number of input channels of the backbone.
        bgr: arrays and tensors are in BGR order, as ``cv2.imread`` returns them. Files and PIL images are not affected.
        page: page of a TIFF, or frame of an animation, counted from 0; None for the only page or the first frame.

    Returns:
        (channels, H, W) float32.

    Raises:
        FileNotFoundError: the path does not exist.
        ImageError: the content is not an image, is truncated, or has unsupported channels or values; or it has several
            pages, and ``page`` is not given.
        TypeError: the source is none of the above.
    """
    with naming(source):
        return scale(to_tensor(pixels_of(source, bgr, page), channels))


def pixels_of(source: Any, bgr: bool = False, page: int | None = None) -> Pixels:
    """Return the pixels of a source of :func:`read_image`, (H, W) or (H, W, C), in their original dtype."""
    if isinstance(source, Tensor):
        source = _array_of(source)
    if isinstance(source, np.ndarray):
        return Pixels(reverse_colours(source) if bgr else source)
    if isinstance(source, Image.Image):
        with decoding():
            return _pil_pixels(source)
    if isinstance(source, (str, os.PathLike)):
        return decode(Path(source).read_bytes(), page)
    if isinstance(source, (bytes, bytearray, memoryview)):
        return decode(bytes(source), page)
    if hasattr(source, 'read'):
        content = source.read()
        if not isinstance(content, bytes):
            kind = type(content).__name__
            raise TypeError(f"{name_of(source)}: an image file must be opened with 'rb', but read() gave {kind}")
        return decode(content, page)
    raise TypeError(
        'an image must be a path, bytes, an open file, a PIL image, a numpy array or a torch tensor, got '
        f'{type(source).__name__}'
    )


def _array_of(image: Tensor) -> np.ndarray:
    """Return a tensor (C, H, W) as an array (H, W, C)."""
    if image.ndim != 3:
        raise ImageError('a tensor must have the shape (C, H, W), or (B, C, H, W) for B images')
    if image.dtype == torch.bfloat16:  # which numpy lacks
        image = image.float()
    return image.detach().cpu().permute(1, 2, 0).numpy()


def decode(content: bytes, page: int | None = None) -> Pixels:
    """Decode a page of an image file, upright and at its full depth."""
    if not content:
        raise ImageError('the file is empty')
    with decoding():
        if content.startswith(tiff.MAGIC):
            with contextlib.ExitStack() as stack:
                pixels = tiff.open_tiff(io.BytesIO(content), page, stack)
            if pixels is not None:
                return pixels
            tiff.check_kept_by_pil(Image.open(io.BytesIO(content)), page)
        image = Image.open(io.BytesIO(content))
        if page:  # page 0 always exists, and `n_frames` may read the whole file
            pages = getattr(image, 'n_frames', 1)
            if page >= pages:
                raise ImageError(f'there is no page {page}; it has {pages}, counted from 0')
            image.seek(page)
        if image.format == 'PNG' and content[_PNG_DEPTH] == 16 and image.mode in ('LA', 'RGB', 'RGBA'):
            return _deep_png_pixels(image, content)
        return _pil_pixels(image)


def _deep_png_pixels(image: Image.Image, content: bytes) -> Pixels:
    """Decode a PNG with several channels of 16 bits, which PIL would reduce to 8."""
    try:
        import imagecodecs
    except ImportError:
        raise ImageError('install imagecodecs to read 16-bit colour at full depth') from None
    values = imagecodecs.png_decode(content)
    return Pixels(upright(values, image.getexif().get(ORIENTATION, 1)), has_alpha=values.shape[2] in (2, 4))


def _pil_pixels(image: Image.Image) -> Pixels:
    """Return the pixels of a PIL image, upright; palettes, CMYK and similar modes are converted to RGB."""
    image.load()  # PIL turns TIFFs upright itself
    orientation = image.getexif().get(ORIENTATION, 1)
    if image.mode not in _KEPT_MODES:
        image = image.convert(_CONVERTED_MODES.get(image.mode, 'RGB'))
    sample = np.asarray(image.crop((0, 0, 1, 1)))
    values = np.empty((image.height, image.width, *sample.shape[2:]), sample.dtype)
    for top in range(0, image.height, _ROWS_AT_ONCE):  # in strips, because `np.asarray` makes two temporary copies
        bottom = min(top + _ROWS_AT_ONCE, image.height)
        values[top:bottom] = np.asarray(image.crop((0, top, image.width, bottom)))
    if values.dtype.byteorder == '>' or image.format in ('PNG', 'PPM'):  # PIL opens some 16-bit files with 32 bits
        values = values.astype(np.uint16) if values.dtype.kind in 'iu' and values.dtype.itemsize > 1 else values
    elif image.mode == 'I':
        values = within_16_bits(values)
    if orientation != 1:
        values = upright(values, orientation)
    return Pixels(values, has_alpha=image.mode in ('LA', 'RGBA'))


def decoded_bytes(source: Any) -> int:
    """Estimate from its header the bytes needed to decode an image; 0 for sources that are already decoded."""
    content = source.getvalue() if isinstance(source, io.BytesIO) else source
    if not isinstance(content, (str, os.PathLike, bytes)):
        return 0
    file_size = 0
    try:
        file_size = len(content) if isinstance(content, bytes) else os.path.getsize(content)
        with warnings.catch_warnings(), quiet_decoders():
            warnings.simplefilter('ignore')
            image = Image.open(io.BytesIO(content) if isinstance(content, bytes) else content)
        with image:
            # Bytes per pixel in PIL (4 for RGB) plus those of the resulting array.
            return file_size + image.width * image.height * {'L': 2, 'RGB': 7}.get(image.mode, 12)
    except Exception:  # reading or decoding raises it again
        return 4 * file_size


def to_tensor(pixels: Pixels, channels: int, check_range: bool = True) -> Tensor:
    """Convert pixels to a tensor (channels, H, W) of uint8, uint16 or float32, from which :func:`scale` follows."""
    values = pixels.values[:, :, None] if pixels.values.ndim == 2 else pixels.values
    if values.ndim != 3 or 0 in values.shape:
        raise ImageError('an array must have the shape (H, W) or (H, W, C) and at least one pixel')
    given = values.shape[2]
    if given != channels and pixels.has_alpha:
        values = values[:, :, :-1]
    if values.shape[2] == 1 and channels == 3:
        values = values.repeat(3, 2)
    if values.shape[2] != channels:
        hint = '; arrays are (H, W, C), tensors (C, H, W)' if channels in values.shape[:2] else ''
        raise ImageError(
            f'it has {given} channels but the backbone takes {channels}; select channels, or build the backbone with '
            f'in_channels={given}{hint}'
        )
    dtype = np.float32 if values.dtype.kind == 'f' else _STORED_AS.get(values.dtype.str[1:])
    if dtype is None:
        most = f' of at most {values.max()}' if values.dtype.kind in 'iu' else ''
        raise ImageError(
            f'pixels must be uint8, uint16 or floating, got {values.dtype}{most}; give scale= to divide them'
        )
    # Always copy: torch does not accept the negative strides of a flipped view, and the caller may own the memory.
    image = torch.from_numpy(np.array(values.transpose(2, 0, 1), dtype, order='C'))
    if image.is_floating_point():
        check_floats(image, check_range)
    return image


def scale(image: Tensor, by: Statistic = None) -> Tensor:
    """Convert an image of :func:`to_tensor`, or a batch of them, to float32: in [0, 1], or divided by given numbers."""
    if by is None:
        largest = _FULL_SCALE.get(image.dtype)
        return image if largest is None else image.to(torch.float32) / largest
    divisors = per_channel('scale', by, image.shape[-3])
    if not all(0 < value < math.inf for value in divisors):
        raise ValueError(f'scale must be above 0 and finite, got {by!r}')
    return image.to(torch.float32) / torch.tensor(divisors, device=image.device)[:, None, None]


def check_floats(image: Tensor, check_range: bool) -> None:
    """Raise ImageError for NaN and infinity and, with ``check_range``, for values far outside [0, 1]."""
    low, high = (float(value) for value in image.detach().aminmax())  # NaN if any value is
    if not (math.isfinite(low) and math.isfinite(high)):
        bad = int((~image.isfinite()).sum())
        raise ImageError(f'{bad} of its values are NaN or infinite; replace them first')
    if check_range and not -_OVERSHOOT <= low <= high <= 1 + _OVERSHOOT:
        raise ImageError(
            f'floats must lie between 0 and 1, got {low:.3g} to {high:.3g}; give scale= to divide '
            'them by, or scale=1 with mean=0 and std=1 if the image is already normalised'
        )


def normalize(image: Tensor, mean: Statistic, std: Statistic, any_range: bool = False) -> Tensor:
    """Return ``(image - mean) / std`` for (C, H, W) or (B, C, H, W), or the image itself if both are None.

    Each is one number or one per channel, on the scale 0 to 1 unless ``any_range``.
    """
    if mean is None and std is None:
        return image
    if mean is None or std is None:
        raise ValueError(f'got mean={mean!r} and std={std!r}; give both, or None for both to skip normalisation')
    means, stds = (per_channel(name, x, image.shape[-3]) for name, x in (('mean', mean), ('std', std)))
    most = math.inf if any_range else 1
    if not (all(value <= most for value in means) and all(_LEAST_STD <= value <= most for value in stds)):
        raise ValueError(
            f'mean and std must be on the scale 0 to 1, and std at least {_LEAST_STD}, got mean={means} and '
            f'std={stds}; divide values on the scale 0 to 255 by 255, or give scale='
        )
    return (image - image.new_tensor(means)[:, None, None]) / image.new_tensor(stds)[:, None, None]


def per_channel(name: str, values: Any, channels: int) -> tuple[float, ...]:
    """Return one number per channel, from these or from one number for all."""
    try:
        if isinstance(values, str):
            raise TypeError
        numbers = tuple(map(float, values)) if hasattr(values, '__len__') else (float(values),) * channels
    except (TypeError, ValueError):
        raise TypeError(f'{name} must be one number per channel, or one for all, got {values!r}') from None
    if len(numbers) != channels:
        raise ValueError(f'{name} must be one value per channel, that is {channels}, got {values!r}')
    return numbers

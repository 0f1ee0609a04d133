"""Convert images from any supported source to float tensors (C, H, W) in [0, 1]."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from swin_dense.features.decode import (
    ImageError,
    decode_bytes,
    decode_file,
    decode_pil,
    name_of,
    reverse_colours,
)
from swin_dense.utils import compat

# ImageNet statistics in RGB, on the scale 0 to 1. All published Swin models were trained with them.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

# Resampling lets float images slightly exceed [0, 1]; images on the scale 0 to 255 are far outside.
_OVERSHOOT = 0.5
_LEAST_STD = 1e-6  # dividing by a smaller number makes later layers overflow
_FULL_SCALE = {torch.uint8: 255.0, compat.UINT16: 65535.0}
Statistic = Sequence[float] | float | None  # per channel, or one for all


def read_image(source: Any, channels: int = 3, bgr: bool = False, check_range: bool = True, page: int = 0) -> Tensor:
    """Read one image, upright and at full bit depth.

    Integers are divided by the largest value of their type (255 or 65535); floats must be in [0, 1]. An alpha channel
    is dropped, a grey image is repeated over three channels, and a palette is converted to RGB.

    Args:
        source: a path, an address such as ``s3://bucket/image.jpg``, the bytes of an image file, a file opened with
            'rb', a PIL image, a numpy array (H, W) or (H, W, C), or a tensor (C, H, W); arrays and tensors are uint8,
            uint16 or floating.
        channels: number of input channels of the backbone.
        bgr: arrays and tensors are in BGR order, as ``cv2.imread`` returns them. Files and PIL images are not affected.
        check_range: reject floats outside [0, 1]; disable it for images that are already normalised.
        page: page of a multi-page file, or frame of an animation, counted from 0.

    Returns:
        (channels, H, W) float32.

    Raises:
        FileNotFoundError: the path does not exist.
        ImageError: the content is not an image, is truncated, or has unsupported channels or values.
        TypeError: the source is none of the above.
    """
    return scale(read_pixels(source, channels, bgr, check_range, page))


def read_pixels(source: Any, channels: int, bgr: bool = False, check_range: bool = True, page: int = 0) -> Tensor:
    """Read one image as :func:`read_image` does, but keep uint8 and uint16: (channels, H, W)."""
    return _as_stored(pixels_of(source, bgr, page), channels, name_of(source), check_range)


def pixels_of(source: Any, bgr: bool = False, page: int = 0) -> np.ndarray:
    """Return the pixels of a source of :func:`read_image`, (H, W) or (H, W, C), in their original dtype."""
    name = name_of(source)
    if isinstance(source, (np.ndarray, Tensor)):
        pixels = array_pixels(source, name)
        return reverse_colours(pixels) if bgr else pixels
    if isinstance(source, Image.Image):
        return decode_pil(source, name)
    if isinstance(source, (str, os.PathLike)):
        return decode_file(source, page)
    if hasattr(source, 'read'):
        source = source.read()
        if not isinstance(source, bytes):
            raise TypeError(f"{name}: an image file must be opened with 'rb', but read() gave {type(source).__name__}")
    if isinstance(source, (bytes, bytearray, memoryview)):
        return decode_bytes(bytes(source), name, page)
    raise TypeError(
        'an image must be a path, an address, bytes, an open file, a PIL image, a numpy array or a torch tensor, got '
        f'{type(source).__name__}'
    )


def normalize(image: Tensor, mean: Statistic, std: Statistic) -> Tensor:
    """Return ``(image - mean) / std`` per channel, or the image itself if both are None.

    Args:
        image: (C, H, W) or (B, C, H, W).
        mean: C values on the scale 0 to 1, or one for all channels.
        std: likewise, each at least 1e-6, which is a fifteenth of one 16-bit quantisation step.
    """
    if mean is None and std is None:
        return image
    channels = image.shape[-3]
    if mean is None or std is None:
        raise ValueError(f'got mean={mean!r} and std={std!r}; give both, or None for both to skip normalisation')
    means, stds = (_per_channel(name, values, channels) for name, values in (('mean', mean), ('std', std)))
    if not (all(value <= 1 for value in means) and all(_LEAST_STD <= value <= 1 for value in stds)):
        raise ValueError(
            f'mean and std must be on the scale 0 to 1, and std at least {_LEAST_STD}, got mean={means} and '
            f'std={stds}; divide values on the scale 0 to 255 by 255'
        )
    shape = (channels, 1, 1)
    return (image - image.new_tensor(means).view(shape)) / image.new_tensor(stds).view(shape)


def _per_channel(name: str, values: Any, channels: int) -> tuple[float, ...]:
    if isinstance(values, str):
        raise TypeError(f'{name} must be one number per channel, got {values!r}')
    try:
        numbers = tuple(map(float, values)) if hasattr(values, '__len__') else (float(values),) * channels
    except (TypeError, ValueError):
        raise TypeError(f'{name} must be one number per channel, or one for all, got {values!r}') from None
    if len(numbers) != channels:
        raise ValueError(f'{name} must be one value per channel, that is {channels}, got {values!r}')
    return numbers


def to_tensor(pixels: np.ndarray, channels: int, name: str, check_range: bool = True) -> Tensor:
    """Convert decoded pixels, (H, W) or (H, W, C), to a (channels, H, W) float32 tensor in [0, 1]."""
    return scale(_as_stored(pixels, channels, name, check_range))


def _as_stored(pixels: np.ndarray, channels: int, name: str, check_range: bool) -> Tensor:
    """Convert decoded pixels to a (channels, H, W) tensor of uint8, uint16 or float32."""
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]
    if pixels.ndim != 3 or 0 in pixels.shape:
        raise ImageError(f'{name}: an array must have the shape (H, W) or (H, W, C) and at least one pixel')
    pixels = _fit_channels(pixels, channels, name)
    native = pixels.dtype.newbyteorder('=')
    if pixels.dtype.kind == 'f':
        native = np.dtype(np.float32)
    elif native not in (np.uint8, np.uint16):
        raise ImageError(f'{name}: pixels must be uint8, uint16 or floating, got {pixels.dtype}; convert them first')
    # Always copy: torch does not accept the negative strides of a flipped view, and the caller may own the memory.
    image = torch.from_numpy(np.array(pixels.transpose(2, 0, 1), compat.storable(native), order='C'))
    if image.is_floating_point():
        check_floats(image, name, check_range)
    return image


def scale(image: Tensor) -> Tensor:
    """Convert an image of :func:`read_pixels`, or a batch of them, to float32 in [0, 1]."""
    largest = _FULL_SCALE.get(image.dtype)
    return image if largest is None else image.to(torch.float32) / largest


def array_pixels(source: np.ndarray | Tensor, name: str) -> np.ndarray:
    """Return an array (H, W) or (H, W, C) unchanged, and a tensor (C, H, W) as an array (H, W, C)."""
    if isinstance(source, np.ndarray):
        return source
    if source.ndim != 3:
        raise ImageError(f'{name}: a tensor must have the shape (C, H, W), or (B, C, H, W) for B images')
    if source.dtype == torch.bfloat16:  # not supported by numpy
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
            f'{name}: it has {given} channels but the backbone takes {channels}; select channels, or build the '
            f'backbone with in_channels={given}{hint}'
        )
    return pixels


def check_floats(image: Tensor, name: str, check_range: bool) -> None:
    """Raise ImageError for NaN and infinity and, with ``check_range``, for values far outside [0, 1]."""
    low, high = (float(value) for value in image.detach().aminmax())  # NaN if any value is
    if not (math.isfinite(low) and math.isfinite(high)):
        bad = int((~image.isfinite()).sum())
        raise ImageError(f'{name}: {bad} of its values are NaN or infinite; replace them first')
    if check_range and not -_OVERSHOOT <= low <= high <= 1 + _OVERSHOOT:
        raise ImageError(
            f'{name}: floats must lie between 0 and 1, got {low:.3g} to {high:.3g}; divide by the largest value, '
            'or give mean=None and std=None if the image is already normalised'
        )

"""Images in any form that people hold them, out as float tensors (C, H, W) in [0, 1]."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
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

# Of ImageNet in RGB, on the scale 0 to 1: what every published Swin was trained with.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

# Resampling a float image overshoots its range a little; a 0-255 image is far outside.
_OVERSHOOT = 0.5
_FULL_SCALE = {np.dtype(np.uint8): 255.0, np.dtype(np.uint16): 65535.0}


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
    name = name_of(source)
    if isinstance(source, (str, os.PathLike)):
        pixels = decode_file(Path(source))
    elif isinstance(source, (bytes, bytearray, memoryview)):
        pixels = decode_bytes(bytes(source), name)
    elif isinstance(source, Image.Image):
        pixels = decode_pil(source, name)
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

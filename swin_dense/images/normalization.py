"""From the values stored in an image to the input of a backbone: choose bands, scale, subtract the mean, clamp."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from swin_dense.images.pixels import ImageError, Pixels
from swin_dense.images.presets import IMAGENET_MEAN, IMAGENET_STD, PRESETS
from swin_dense.images.reading import Statistic, normalize, scale, to_tensor
from swin_dense.utils import checks

_logger = logging.getLogger(__package__)


def preset(name: str) -> dict[str, Any]:
    """Return the arguments mean, std, scale and clamp that published weights expect.

    Args:
        name: a key of ``PRESETS``.

    Raises:
        ValueError: there is no such preset.

    Examples:
        >>> preset('satlas-sentinel1')
        {'scale': 255.0, 'mean': None, 'std': None, 'clamp': True}
    """
    checks.one_of('normalization', name, PRESETS)
    return dict(PRESETS[name])


@dataclass(frozen=True)
class Normalization:
    """How the stored values of an image become the input of a backbone: ``(values[bands] / scale - mean) / std``.

    Attributes:
        mean: one number or one per channel, after division by ``scale``, ImageNet's by default; None, with
            ``std=None``, skips this step.
        std: likewise.
        scale: the divisor of stored values of any type, one number or one per channel, such as 10000 for reflectance
            in uint16. None divides integers by the largest value of their type, and accepts floats in [0, 1].
        bands: which bands of an image to use, in this order, counted from 0; None for all of them.
        clamp: whether to clamp the result to [0, 1], as SatlasPretrain does.

    Raises:
        ValueError: ``scale`` is not above 0, ``bands`` is empty or has negative entries, or ``clamp`` is given with
            ImageNet's ``mean``.
        TypeError: an argument has the wrong type.
    """

    mean: Statistic = IMAGENET_MEAN
    std: Statistic = IMAGENET_STD
    scale: Statistic = None
    bands: Sequence[int] | None = None
    clamp: bool = False

    def __post_init__(self) -> None:
        for name in ('mean', 'std', 'scale'):  # a list or an array is a tuple, so that objects can be compared
            value = getattr(self, name)
            if isinstance(value, (Sequence, np.ndarray)) and not isinstance(value, str):
                object.__setattr__(self, name, tuple(value))
        if checks.boolean('clamp', self.clamp) and self.mean == IMAGENET_MEAN:
            raise ValueError(
                "clamp=True would cut off most of what ImageNet's mean and std give; give mean= and std= too, such as "
                'mean=0 and std=1'
            )
        if self.bands is not None:
            object.__setattr__(self, 'bands', checks.integers('bands', self.bands, minimum=0))

    @property
    def check_range(self) -> bool:
        """Whether floats must lie in [0, 1]: not if they are divided by ``scale`` or already normalised."""
        return self.mean is not None and self.scale is None

    def check_for(self, channels: int, known: str | None) -> None:
        """Raise ValueError if the numbers do not fit the input channels of a backbone.

        Other numbers than those of ``known``, the preset that its weights are known to expect, only cause a warning.
        """
        if self.mean == IMAGENET_MEAN and (channels != len(IMAGENET_MEAN) or known not in (None, 'imagenet')):
            _not_imagenet(channels, known)
        if self.bands is not None and len(self.bands) != channels:
            raise ValueError(f'bands must be one per input channel of the backbone, {channels}, got {self.bands}')
        self.prepare(torch.zeros(channels, 1, 1))

    def stored(self, pixels: Pixels, channels: int) -> Tensor:
        """Return the chosen bands of decoded pixels, (channels, H, W) of uint8, uint16 or float32."""
        values, has_alpha = pixels.values, pixels.has_alpha
        if self.bands is not None:
            values, has_alpha = values[:, :, None] if values.ndim == 2 else values, False
            if max(self.bands) >= values.shape[2]:
                raise ImageError(f'there is no band {max(self.bands)}; it has {values.shape[2]}, counted from 0')
            values = values[:, :, list(self.bands)]
        if self.scale is not None and (values.dtype.kind == 'i' or values.dtype.itemsize > 2):
            values = np.asarray(values, np.float32)
        return to_tensor(Pixels(values, has_alpha), channels, self.check_range)

    def prepare(self, images: Tensor) -> Tensor:
        """Convert an image of :meth:`stored`, or a batch of them, to the backbone's input."""
        out = normalize(scale(images, self.scale), self.mean, self.std, any_range=self.scale is not None)
        return out.clamp(0, 1) if self.clamp else out


def resolve_normalization(given: Normalization | str | None, known: str | None = None) -> Normalization:
    """Return a normalisation, given as an object or by the name of a preset.

    None is that of ``known``, the preset that the weights are known to expect, or else ImageNet's.
    """
    if given is None:
        given = known or 'imagenet'
    if isinstance(given, str):
        return Normalization(**preset(given))
    if not isinstance(given, Normalization):
        raise TypeError(f'normalization must be a Normalization or a name, got {type(given).__name__}')
    return given


def _not_imagenet(channels: int, known: str | None) -> None:
    """Raise ValueError if ImageNet's statistics do not fit the channels, else warn that the weights expect others."""
    if known:
        advice = f'give normalization={known!r}'
    else:
        advice = 'give normalization=Normalization(...) with mean=, std= and scale='
    if channels != len(IMAGENET_MEAN):
        raise ValueError(
            f"the backbone takes {channels} channels, but ImageNet's mean and std are for "
            f'{len(IMAGENET_MEAN)}; {advice}'
        )
    _logger.warning("images are normalised with ImageNet's mean, which these weights do not expect: %s", advice)


def band_count(pixels: Pixels, bands: Sequence[int] | None) -> int:
    """Return the number of channels of an image: of the chosen bands, else of all bands but alpha."""
    if bands is not None:
        return len(bands)
    return (pixels.values.shape[2] if pixels.values.ndim == 3 else 1) - pixels.has_alpha

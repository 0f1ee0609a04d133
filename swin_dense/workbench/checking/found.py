"""What a check of a data set returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from swin_dense.workbench.checking.pixel_trip import PixelTrip


class Found(NamedTuple):
    """What a check of a data set has found."""

    notes: list[str]
    used_images: int | None = None  # that the framework uses; None if it is not known
    files: frozenset[str] = frozenset()  # the paths of its images
    samples: Sequence[Any] = ()  # some images, as its pipeline returns them
    pixels: PixelTrip | None = None  # of a segmentor

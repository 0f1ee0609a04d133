"""What a check of a data set returns."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from swin_dense.workbench.checking.pixel_trip import PixelTrip
from swin_dense.workbench.configs.experiment import DataSet


class Found(NamedTuple):
    """What a check of a data set has found."""

    notes: list[str]
    used_images: int | None = None  # that the framework uses; None if it is not known
    files: frozenset[str] = frozenset()  # the paths of its images
    samples: Sequence[Any] = ()  # some images, as its pipeline returns them
    pixels: PixelTrip | None = None  # of a segmentor


def in_its_scope(check: Callable[..., Found]) -> Callable[..., Found]:
    """Let the frameworks find names in the scope of a data set's config while a function checks the data set."""

    @functools.wraps(check)
    def checked(data: DataSet, *args: Any, **options: Any) -> Found:
        with data.experiment.in_scope():
            return check(data, *args, **options)

    return checked

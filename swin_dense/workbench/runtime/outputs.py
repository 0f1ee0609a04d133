"""What a model predicts for an image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np


class Instances(NamedTuple):
    """Detections in an image: boxes (N, 4) in pixels, scores (N,), labels (N,), and N masks (H, W) bool or none."""

    boxes: np.ndarray
    scores: np.ndarray
    labels: np.ndarray
    masks: Sequence[np.ndarray] = ()


class Outputs(NamedTuple):
    """The class of every pixel, the instances and the segment of every pixel; None for what is not predicted."""

    labels: np.ndarray | None = None
    instances: Instances | None = None
    panoptic: np.ndarray | None = None


@dataclass(frozen=True)
class Prediction:
    """The prediction of a model for an image.

    Attributes:
        record: the prediction in types that JSON supports.
        painted: the image with the prediction drawn on it, (H, W, 3), uint8, RGB; None for other pixels,
            or if it was not asked for.
        labels: class index of every pixel, (H, W), int32; None for a detector.
        panoptic: segment of every pixel, (H, W), int32, by the ``id`` of the segments in the record; pixels of no
            segment have another value. None if the model is not panoptic.
    """

    record: dict[str, Any]
    painted: np.ndarray | None = None
    labels: Any = None
    panoptic: np.ndarray | None = None

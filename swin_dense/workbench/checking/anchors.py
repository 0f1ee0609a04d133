"""Boxes that no anchor of a detector overlaps, by the detector's own anchor generators."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
from mmengine.registry import TASK_UTILS

from swin_dense.workbench.configs.entries import walk
from swin_dense.workbench.configs.experiment import Experiment

_LEAST_OVERLAP = 0.25  # intersection over union; the assigners of mmdet's recipes take 0.3 or more for a match


def notes_on_anchors(experiment: Experiment, boxes: Sequence[Sequence[float]], scale: float) -> list[str]:
    """Return a note on boxes that overlap no anchor, wherever it is placed.

    The default scope of mmengine must be that of the config.

    Args:
        experiment: the config.
        boxes: (left, top, right, bottom) of the objects to train on, in pixels of the images.
        scale: the size of an image as the pipeline loads it, divided by its own.
    """
    if not boxes:
        return []
    notes = []
    corners = np.array(boxes, float)
    sides = scale * (corners[:, 2:] - corners[:, :2])
    for address, part in walk(experiment.model, 'model'):
        if not isinstance(part, dict) or not isinstance(part.get('anchor_generator'), dict):
            continue
        generator = TASK_UTILS.build(copy.deepcopy(dict(part['anchor_generator'])))
        anchors = np.concatenate(
            [level.numpy() for level in getattr(generator, 'base_anchors', ())] or [np.ones((1, 4))]
        )
        anchor_sides = anchors[:, 2:] - anchors[:, :2]
        best = np.zeros(len(sides))
        for width, height in anchor_sides:
            shared = np.minimum(sides[:, 0], width) * np.minimum(sides[:, 1], height)
            best = np.maximum(best, shared / (sides.prod(1) + width * height - shared))
        is_small = (best < _LEAST_OVERLAP) & (sides.prod(1) < anchor_sides.prod(1).min())
        if is_small.any():
            smallest = np.sqrt(anchor_sides.prod(1).min())
            notes.append(
                f'{is_small.sum()} of {len(boxes)} boxes are so small that no anchor of {part.get("type")} overlaps '
                f'them by {_LEAST_OVERLAP}: the smallest has sides of {smallest:.3g} pixels, and the pipeline loads '
                f'images at {scale:.2g} of their size. Expect the detector to miss many of these; if they matter, load '
                f'larger images, give smaller scales to {address}.anchor_generator, or cut the images into tiles'
            )
    return notes

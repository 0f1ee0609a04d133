"""Draw predictions on an image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from swin_dense.workbench.runtime.outputs import Outputs

Palette = Sequence[Sequence[int]]


def painted(pixels: np.ndarray, record: dict[str, Any], outputs: Outputs, palette: Palette) -> np.ndarray:
    """Return an image, (H, W, 3) uint8 in RGB, with its prediction, of which a record is given too, drawn on it."""
    if outputs.labels is not None:
        return segments(pixels, outputs.labels, palette)
    masks = outputs.instances.masks if outputs.instances is not None else []
    if outputs.panoptic is not None:
        classes = {one['id']: one['label'] for one in record['segments']}
        numbers, inverse = np.unique(outputs.panoptic, return_inverse=True)
        labels = np.array([classes.get(number, len(palette)) for number in numbers.tolist()])
        pixels, masks = segments(pixels, labels[inverse].reshape(pixels.shape[:2]), palette), []
    return instances(pixels, record.get('instances', []), masks, palette)


def instances(
    pixels: np.ndarray, found: list[dict[str, Any]], masks: Sequence[np.ndarray], palette: Palette
) -> np.ndarray:
    """Return the image, (H, W, 3) uint8, with boxes, names, scores and masks of instances drawn on it.

    ``found`` are the instances of a record, and ``masks`` theirs, (H, W) bool, or none if the model predicts no masks.
    """
    import cv2

    painted = pixels.copy()
    for instance, mask in zip(found, masks, strict=False):
        colours = np.array(palette[instance['label']])
        painted[mask] = (painted[mask] * 0.5 + colours * 0.5).astype(np.uint8)
    for instance in found:
        left, top, right, bottom = map(round, instance['box'])
        # The font of OpenCV has the letters of ASCII.
        name = instance['class'] if instance['class'].isascii() else f'class {instance["label"]}'
        colour = [*map(int, palette[instance['label']])]
        cv2.rectangle(painted, (left, top), (right, bottom), colour, 2)
        text = f'{name} {100 * instance["score"]:.0f}'
        cv2.putText(painted, text, (left + 2, top + 12), cv2.FONT_HERSHEY_SIMPLEX, 0.4, colour, 1, cv2.LINE_AA)
    return painted


def segments(pixels: np.ndarray, labels: np.ndarray, palette: Palette) -> np.ndarray:
    """Return the image, (H, W, 3) uint8, blended with the colour of the class of each pixel; others stay."""
    known = labels < len(palette)
    colours = np.array(palette)[np.where(known, labels, 0)]
    mixed = (pixels * 0.5 + colours * 0.5).astype(np.uint8)
    return np.where(known[:, :, None], mixed, pixels)

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
    masks: Sequence[np.ndarray] = []
    if outputs.panoptic is not None:
        # Instances are segments too, so that their masks are not painted again.
        classes = {one['id']: one['label'] for one in record['segments']}
        numbers, inverse = np.unique(outputs.panoptic, return_inverse=True)
        of_numbers = [classes.get(number, len(palette)) for number in numbers.tolist()]
        labels = np.array(of_numbers)[inverse]
        pixels = segments(pixels, labels.reshape(pixels.shape[:2]), palette)
    elif outputs.instances is not None:
        masks = outputs.instances.masks
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
        colour = np.array(palette[instance['label']])
        mixed = painted[mask] * 0.5 + colour * 0.5
        painted[mask] = mixed.astype(np.uint8)
    for instance in found:
        left, top, right, bottom = map(round, instance['box'])
        line_colour = [int(part) for part in palette[instance['label']]]
        cv2.rectangle(painted, (left, top), (right, bottom), line_colour, 2)
        name = instance['class']
        if not name.isascii():  # the font of OpenCV has the letters of ASCII
            name = f'class {instance["label"]}'
        text = f'{name} {100 * instance["score"]:.0f}'
        place = (left + 2, top + 12)
        cv2.putText(painted, text, place, cv2.FONT_HERSHEY_SIMPLEX, 0.4, line_colour, 1, cv2.LINE_AA)
    return painted


def segments(pixels: np.ndarray, labels: np.ndarray, palette: Palette) -> np.ndarray:
    """Return the image, (H, W, 3) uint8, blended with the colour of the class of each pixel; others stay."""
    known = labels < len(palette)
    indices = np.where(known, labels, 0)
    colours = np.array(palette)[indices]
    mixed = pixels * 0.5 + colours * 0.5
    return np.where(known[:, :, None], mixed.astype(np.uint8), pixels)

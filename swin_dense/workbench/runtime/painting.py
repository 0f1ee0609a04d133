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
        label_of_id = np.full(outputs.panoptic.max() + 1, len(palette), np.int32)
        for segment in record['segments']:
            label_of_id[segment['id']] = segment['label']
        pixels = segments(pixels, label_of_id[outputs.panoptic], palette)
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
        colour = np.array(palette[instance['label']], np.uint8)
        painted[mask] = _mean(painted[mask], colour)
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
    colours = np.array([*palette, (0, 0, 0)], np.uint8)
    mixed = _mean(pixels, colours.take(labels, 0, mode='clip'))
    is_other = labels >= len(palette)
    mixed[is_other] = pixels[is_other]
    return mixed


def _mean(pixels: np.ndarray, colours: np.ndarray) -> np.ndarray:
    """Return the mean of two arrays of uint8, rounded down, without larger integers: an image may have many pixels."""
    common = pixels & colours
    other = pixels ^ colours
    other >>= 1
    common += other
    return common

"""Instance masks: paste box probabilities into an image, and encode masks as COCO run lengths."""

from __future__ import annotations

from typing import Any

import numpy as np


def pasted(probabilities: np.ndarray, box: np.ndarray, threshold: float, height: int, width: int) -> np.ndarray:
    """Return the mask of an instance in the image, (height, width) bool, pasted as in mmdet.

    Args:
        probabilities: (h, w) mask probabilities within the box.
        box: x1, y1, x2, y2 in pixels of the image.
        threshold: minimum probability of the pixels of the instance.
        height: height of the image in pixels.
        width: width of the image in pixels.
    """
    mask = np.zeros((height, width), bool)
    left, top = np.maximum(np.floor(box[:2]) - 1, 0).astype(int)
    right, bottom = np.minimum(np.ceil(box[2:]) + 1, (width, height)).astype(int)
    rows = _weights(top, bottom, box[1], box[3], probabilities.shape[0])
    columns = _weights(left, right, box[0], box[2], probabilities.shape[1])
    mask[top:bottom, left:right] = rows @ probabilities @ columns.T >= threshold
    return mask


def _weights(first: int, end: int, low: np.float32, high: np.float32, inputs: int) -> np.ndarray:
    """Return the interpolation weights of the inputs for the pixels ``first`` to ``end``, (pixels, inputs)."""
    pixel = np.arange(first, end, dtype=np.float32) + np.float32(0.5)
    with np.errstate(divide='ignore', invalid='ignore'):
        position = (pixel - low) / (high - low) * 2 - 1
    position[np.isinf(position)] = 0
    position = ((position + 1) * inputs - 1) / 2
    return np.maximum(1 - np.abs(position[:, None] - np.arange(inputs, dtype=np.float32)), 0)


def run_lengths(mask: np.ndarray) -> dict[str, Any]:
    """Encode a mask, (H, W) bool, as pycocotools does: alternating runs of 0 and 1 in column-major order, as text."""
    flat = np.concatenate([[False], mask.flatten(order='F')])
    starts = np.flatnonzero(np.diff(flat))
    runs = np.diff([0, *starts, mask.size]).tolist()
    # From the fourth run on, the format stores the difference to the run two places before.
    values = [run - (runs[index - 2] if index > 2 else 0) for index, run in enumerate(runs)]
    return {'size': list(mask.shape), 'counts': ''.join(map(_text, values))}


def _text(value: int) -> str:
    """Encode an integer as characters with five bits each, lowest first; the sixth bit marks that another follows."""
    text = ''
    while True:
        bits, value = value & 31, value >> 5
        is_last = value == (-1 if bits & 16 else 0)
        text += chr(48 + (bits if is_last else bits | 32))
        if is_last:
            return text

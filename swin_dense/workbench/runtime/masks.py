"""Instances: overlaps of boxes, masks pasted into an image, and masks encoded as COCO run lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np


class Instances(NamedTuple):
    """Detections in an image: boxes (N, 4) in pixels, scores (N,), labels (N,), and N masks (H, W) bool or none."""

    boxes: np.ndarray
    scores: np.ndarray
    labels: np.ndarray
    masks: Sequence[np.ndarray] = ()


def overlaps(box: np.ndarray, boxes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the IoU of a box and each of ``boxes`` (N, 4), and the share of the smaller one that the other covers."""
    common = (np.minimum(box[2:], boxes[:, 2:]) - np.maximum(box[:2], boxes[:, :2])).clip(0).prod(1)
    area, areas = (box[2:] - box[:2]).prod(), (boxes[:, 2:] - boxes[:, :2]).prod(1)
    smaller = np.maximum(np.minimum(area, areas), 1e-9)
    return common / np.maximum(area + areas - common, 1e-9), common / smaller


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
    return interpolation(((position + 1) * inputs - 1) / 2, inputs)


def interpolation(position: np.ndarray, inputs: int) -> np.ndarray:
    """Return the weights of the inputs for positions (N,) between them, counted from 0, (N, inputs)."""
    return np.maximum(1 - np.abs(position[:, None] - np.arange(inputs, dtype=np.float32)), 0)


def run_lengths(
    mask: np.ndarray, corner: tuple[int, int] = (0, 0), size: tuple[int, int] | None = None
) -> dict[str, Any]:
    """Encode a mask as pycocotools does: alternating runs of 0 and 1 in column-major order, as text.

    Args:
        mask: (h, w) bool.
        corner: (row, column) of its first pixel in the image.
        size: (height, width) of the image; None for that of the mask.
    """
    (height, width), rows = size or mask.shape, mask.shape[0] + 1
    # A zero above every column, and one behind the last, separate the columns.
    columns = np.zeros((mask.shape[1], rows), np.int8)
    columns[:, 1:] = mask.T
    changes = np.diff(np.append(columns.ravel(), 0))

    def in_image(slots: np.ndarray) -> np.ndarray:
        return (corner[1] + slots // rows) * height + corner[0] + slots % rows - 1

    begins, ends = in_image(np.flatnonzero(changes == 1) + 1), in_image(np.flatnonzero(changes == -1)) + 1
    apart = begins[1:] != ends[:-1]  # a column may begin where the one before ends
    begins, ends = begins[np.append(True, apart)[: len(begins)]], ends[np.append(apart, True)[: len(ends)]]
    changes = np.stack([begins, ends], 1).ravel()
    runs = np.diff([0, *changes[changes < height * width], height * width]).tolist()
    # From the fourth run on, the format stores the difference to the run two places before.
    values = [run - (runs[index - 2] if index > 2 else 0) for index, run in enumerate(runs)]
    return {'size': [height, width], 'counts': ''.join(map(_text, values))}


def area(encoded: dict[str, Any]) -> int:
    """Return the number of pixels of a mask of :func:`run_lengths`."""
    runs: list[int] = []
    value = bits = 0
    for character in encoded['counts']:
        code = ord(character) - 48
        value |= (code & 31) << bits
        bits += 5
        if not code & 32:
            value -= (code & 16) << (bits - 4)  # the highest bit is the sign
            runs.append(value + (runs[-2] if len(runs) > 2 else 0))
            value = bits = 0
    return sum(runs[1::2])


def _text(value: int) -> str:
    """Encode an integer as characters with five bits each, lowest first; the sixth bit marks that another follows."""
    text = ''
    while True:
        bits, value = value & 31, value >> 5
        is_last = value == (-1 if bits & 16 else 0)
        text += chr(48 + (bits if is_last else bits | 32))
        if is_last:
            return text

"""Overlaps of boxes, masks pasted into an image, and masks encoded as COCO run lengths."""

from __future__ import annotations

from typing import Any

import numpy as np


def overlaps(box: np.ndarray, boxes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the IoU of a box and each of ``boxes`` (N, 4), and the share of the smaller one that the other covers."""
    low, high = np.maximum(box[:2], boxes[:, :2]), np.minimum(box[2:], boxes[:, 2:])
    common = (high - low).clip(0).prod(1)
    area = (box[2:] - box[:2]).prod()
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(1)
    smaller = np.maximum(np.minimum(area, areas), 1e-9)
    return common / np.maximum(area + areas - common, 1e-9), common / smaller


def pasted(probabilities: np.ndarray, box: np.ndarray, threshold: float, height: int, width: int) -> np.ndarray:
    """Return the mask of an instance in the image, (height, width) bool, pasted as in mmdet.

    ``probabilities`` (h, w) fill the box, x1, y1, x2, y2 in pixels of the image; those from ``threshold`` up count.
    """
    mask = np.zeros((height, width), bool)
    left, top = np.maximum(np.floor(box[:2]) - 1, 0).astype(int)
    right, bottom = np.minimum(np.ceil(box[2:]) + 1, (width, height)).astype(int)
    rows = _weights(top, bottom, box[1], box[3], probabilities.shape[0])
    columns = _weights(left, right, box[0], box[2], probabilities.shape[1])
    mask[top:bottom, left:right] = rows @ probabilities @ columns.T >= threshold
    return mask


def _weights(first: int, end: int, low: np.float32, high: np.float32, inputs: int) -> np.ndarray:
    """Return the weights of the inputs for the pixels ``first`` to ``end``, (pixels, inputs)."""
    pixel = np.arange(first, end, dtype=np.float32) + np.float32(0.5)
    with np.errstate(divide='ignore', invalid='ignore'):
        position = (pixel - low) / (high - low) * 2 - 1
    position[np.isinf(position)] = 0
    return interpolation(((position + 1) * inputs - 1) / 2, inputs)


def interpolation(position: np.ndarray, inputs: int) -> np.ndarray:
    """Return the weights of the inputs for positions (N,) between them, counted from 0, (N, inputs)."""
    return np.maximum(1 - np.abs(position[:, None] - np.arange(inputs, dtype=np.float32)), 0)


def run_lengths(mask: np.ndarray) -> dict[str, Any]:
    """Encode a mask (H, W) in COCO's run lengths."""
    from pycocotools import mask as coco_mask

    found = coco_mask.encode(np.asfortranarray(mask, np.uint8))
    return {**found, 'counts': found['counts'].decode()}

"""Overlaps of boxes, masks pasted into an image, and masks encoded as COCO run lengths."""

from __future__ import annotations

from typing import Any

import numpy as np


def overlaps(box: np.ndarray, boxes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the IoU of a box and each of ``boxes`` (N, 4), and the share of the smaller one that the other covers."""
    low = np.maximum(box[:2], boxes[:, :2])
    high = np.minimum(box[2:], boxes[:, 2:])
    sides = high - low
    common = sides.clip(0).prod(1)
    area = (box[2:] - box[:2]).prod()
    sides_of_boxes = boxes[:, 2:] - boxes[:, :2]
    areas = sides_of_boxes.prod(1)
    union = area + areas - common
    smaller = np.minimum(area, areas)
    # Boxes without an area have no overlap.
    return common / np.maximum(union, 1e-9), common / np.maximum(smaller, 1e-9)


def pasted(probabilities: np.ndarray, box: np.ndarray, threshold: float, height: int, width: int) -> np.ndarray:
    """Return the mask of an instance in the image, (height, width) bool, pasted as in mmdet.

    ``probabilities`` (h, w) fill the box, x1, y1, x2, y2 in pixels of the image; those from ``threshold`` up count.
    """
    mask = np.zeros((height, width), bool)
    # A pixel more than the box at each side, within the image.
    first = np.floor(box[:2]) - 1
    end = np.ceil(box[2:]) + 1
    left, top = np.maximum(first, 0).astype(int)
    right, bottom = np.minimum(end, (width, height)).astype(int)
    x1, y1, x2, y2 = box
    rows = _weights(top, bottom, y1, y2, probabilities.shape[0])
    columns = _weights(left, right, x1, x2, probabilities.shape[1])
    enlarged = rows @ probabilities @ columns.T
    mask[top:bottom, left:right] = enlarged >= threshold
    return mask


def _weights(first: int, end: int, low: np.float32, high: np.float32, inputs: int) -> np.ndarray:
    """Return the weights of the inputs for the pixels ``first`` to ``end``, (pixels, inputs)."""
    pixel = np.arange(first, end, dtype=np.float32) + np.float32(0.5)
    with np.errstate(divide='ignore', invalid='ignore'):
        position = (pixel - low) / (high - low) * 2 - 1
    position[np.isinf(position)] = 0
    position = ((position + 1) * inputs - 1) / 2
    return interpolation(position, inputs)


def interpolation(position: np.ndarray, inputs: int) -> np.ndarray:
    """Return the weights of the inputs for positions (N,) between them, counted from 0, (N, inputs)."""
    places = np.arange(inputs, dtype=np.float32)
    distance = np.abs(position[:, None] - places)
    return np.maximum(1 - distance, 0)


def encode_rle(mask: np.ndarray) -> dict[str, Any]:
    """Encode a mask (H, W) in COCO's run lengths."""
    from pycocotools import mask as coco_mask

    by_columns = np.asfortranarray(mask, np.uint8)
    found = coco_mask.encode(by_columns)
    return {**found, 'counts': found['counts'].decode()}

"""Compare the outputs of an exported file with the predictions of its framework on an image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from swin_dense.workbench.runtime.masks import pasted
from swin_dense.workbench.runtime.queries import OFFSET
from swin_dense.workbench.runtime.queries import predicted as predicted_by_file

# Two instances match if their scores differ by at most SAME_SCORE and the IoU of their boxes is at least SAME_BOX, or
# the sides of the boxes differ by at most SAME_SIDE pixels: the IoU of thin boxes means little.
SAME_BOX = 0.98
SAME_SIDE = 0.01
SAME_SCORE = 1e-3
# Allowed share of different instances, mask pixels or class pixels, because rounding decides near ties.
LARGEST_SHARE = 0.02


@dataclass(frozen=True)
class Instances:
    """Detections in an image: boxes (N, 4) in pixels, scores (N,), labels (N,), masks (N, H, W) bool or None."""

    boxes: np.ndarray
    scores: np.ndarray
    labels: np.ndarray
    masks: np.ndarray | None = None


def instances_of_framework(detector: nn.Module, pixels: np.ndarray) -> Instances:
    """Return the detections of mmdet's own ``predict`` in pixels, (H, W, 3) uint8, BGR."""
    found = predicted(detector, pixels).pred_instances
    masks = found.masks.cpu().numpy() if 'masks' in found else None
    return Instances(found.bboxes.cpu().numpy(), found.scores.cpu().numpy(), found.labels.cpu().numpy(), masks)


def predicted(detector: nn.Module, pixels: np.ndarray) -> Any:
    """Return the data sample of mmdet's own ``predict`` for pixels, (H, W, 3) uint8, BGR."""
    from mmdet.structures import DetDataSample

    size = pixels.shape[:2]
    meta = {'ori_shape': size, 'img_shape': size, 'scale_factor': (1.0, 1.0)}
    return _predict(detector, pixels, DetDataSample(metainfo=meta))


def instances_of_file(outputs: list[np.ndarray], size: tuple[int, int], mask_threshold: float | None) -> Instances:
    """Return the detections in the outputs of a file, for an image of ``size`` (height, width)."""
    boxes, scores, labels, *probabilities = outputs
    if mask_threshold is None:
        return Instances(boxes, scores, labels)
    masks = [pasted(mask, box, mask_threshold, *size) for mask, box in zip(probabilities[0], boxes, strict=True)]
    return Instances(boxes, scores, labels, np.array(masks, bool).reshape(-1, *size))


def classes_of_framework(segmentor: nn.Module, pixels: np.ndarray, size: Sequence[int]) -> np.ndarray:
    """Return the class map of ``size`` (height, width) from mmseg's own ``predict`` for (H, W, 3) uint8, BGR."""
    from mmseg.structures import SegDataSample

    shape = pixels.shape[:2]
    sample = SegDataSample(metainfo={'ori_shape': tuple(size), 'img_shape': shape, 'pad_shape': shape})
    return _predict(segmentor, pixels, sample).pred_sem_seg.data[0].cpu().numpy()


def share_of_unmatched(theirs: Instances, ours: Instances, lowest: float, most: int) -> tuple[float, int]:
    """Return the share of instances in one result without a match in the other, and the number compared.

    Args:
        theirs: detections of the framework.
        ours: detections of the file.
        lowest: score threshold of both. Instances near it are not compared, because only one result may keep them.
        most: maximum number of instances. If a result has that many, those near its lowest score are not compared.
    """
    for found in (theirs, ours):
        if len(found.scores) >= most:
            lowest = max(lowest, float(found.scores.min()))
    missing = compared = 0
    for one, other in ((theirs, ours), (ours, theirs)):
        for index in np.flatnonzero(one.scores > lowest + SAME_SCORE):
            compared += 1
            missing += not _has_match(other, one, index)
    return missing / max(compared, 1), compared // 2


def share_of_other_masks(sample: Any, outputs: Sequence[np.ndarray], settings: Mapping[str, Any]) -> tuple[float, int]:
    """Compare ``outputs`` of a file, ``classes`` and ``masks``, with mmdet's data sample for the same pixels.

    ``settings`` are ``queries`` in its metadata. Returns the larger share of different instances or pixels of segments,
    and the number compared.
    """
    size = sample.img_shape
    found, panoptic = predicted_by_file(outputs, size, size, dict(settings), 0.0)
    share, count = 0.0, 0
    if found is not None:
        theirs = sample.pred_instances.numpy()
        probabilities = np.sort(outputs[0][:, :-1], axis=None)
        # Of the least probable pairs of query and class, either result may contain others.
        lowest = probabilities[-min(settings['instances'], len(probabilities))]
        # The masks are compared, not the boxes around them, which one pixel can change.
        ours = Instances(np.zeros_like(found[0]), found[1], found[2], np.reshape(found[3], (-1, *size)))
        theirs = Instances(np.zeros_like(theirs.bboxes), theirs.scores, theirs.labels, theirs.masks)
        share, count = share_of_unmatched(theirs, ours, float(lowest), len(probabilities) + 1)
    if panoptic is not None:
        segments = sample.pred_panoptic_seg.sem_seg[0].numpy()
        other, segments_count = share_of_other_segments(segments, panoptic, outputs[0].shape[1] - 1)
        share, count = max(share, other), count + segments_count
    return share, count


def share_of_other_segments(theirs: np.ndarray, ours: np.ndarray, classes: int) -> tuple[float, int]:
    """Return the share of pixels in which two maps of segments (H, W) differ, and the number of segments compared.

    Instances are matched by their overlap, because one near tie changes the numbers of all instances after it. Pixels
    of no segment have the number of classes.
    """
    shares = []
    for one, other in ((theirs, ours), (ours, theirs)):
        is_same = np.zeros(one.shape, bool)
        for segment in np.unique(one):
            mask = one == segment
            found, counts = np.unique(other[mask], return_counts=True)
            if found[counts.argmax()] % OFFSET == segment % OFFSET:
                is_same |= mask & (other == found[counts.argmax()])
        shares.append(1 - float(is_same.mean()))
    return max(shares), int((np.unique(theirs) != classes).sum())


def _has_match(other: Instances, one: Instances, index: int) -> bool:
    """Return whether ``other`` contains the instance ``index`` of ``one``."""
    is_like = (other.labels == one.labels[index]) & (np.abs(other.scores - one.scores[index]) <= SAME_SCORE)
    partners = np.flatnonzero(is_like & (_overlaps(one.boxes[index], other.boxes) >= SAME_BOX))
    if one.masks is None or other.masks is None:
        return one.masks is other.masks and len(partners) > 0
    mask = one.masks[index]
    masks = (other.masks[partner] for partner in partners)
    return any((mask ^ found).sum() <= LARGEST_SHARE * max((mask | found).sum(), 1) for found in masks)


def _overlaps(box: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """Return the IoU of a box (4,) with boxes (N, 4). It is 1 for boxes with sides within SAME_SIDE."""
    sides = np.minimum(box[2:], boxes[:, 2:]) - np.maximum(box[:2], boxes[:, :2])
    both = sides.clip(min=0).prod(1)
    union = (box[2:] - box[:2]).prod() + (boxes[:, 2:] - boxes[:, :2]).prod(1) - both
    return np.where(np.abs(box - boxes).max(1) <= SAME_SIDE, 1.0, both / np.maximum(union, 1e-9))


def _predict(model: Any, pixels: np.ndarray, sample: Any) -> Any:
    inputs = torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))
    with torch.no_grad():
        return model.test_step({'inputs': [inputs], 'data_samples': [sample]})[0]

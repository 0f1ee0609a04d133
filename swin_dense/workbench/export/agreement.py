"""Compare the outputs of an exported file with the predictions of its framework on an image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from swin_dense.workbench.runtime.instances import overlaps, pasted
from swin_dense.workbench.runtime.outputs import Instances
from swin_dense.workbench.runtime.queries import OFFSET
from swin_dense.workbench.runtime.queries import predicted as predicted_by_file

# Allowed share of different instances, mask pixels or class pixels, because rounding decides near ties.
LARGEST_SHARE = 0.02
# Two instances with a label match if the IoU of boxes and masks is at least this, and scores differ by at most that.
OVERLAP, ROUNDING = 0.98, 1e-3
# The IoU of boxes with sides that differ by at most this many pixels counts as 1: that of thin boxes means little.
SAME_SIDE = 0.01


def share_of_unmatched(theirs: Instances, ours: Instances, lowest: float, most: int) -> tuple[float, int]:
    """Return the share of instances in one result without a match in the other, and the number compared.

    Instances near ``lowest``, the score threshold of both, are not compared, because only one result may keep them; nor
    are those near the lowest score of a result with ``most`` instances, the maximum.
    """
    for found in (theirs, ours):
        if len(found.scores) >= most:
            lowest = max(lowest, float(found.scores.min()))
    compared = missing = 0
    for result, other in ((theirs, ours), (ours, theirs)):
        for index in np.flatnonzero(result.scores > lowest + ROUNDING):
            compared += 1
            missing += not _has_match(other, result, index)
    return missing / max(compared, 1), compared // 2


def instances_of_framework(detector: nn.Module, pixels: np.ndarray) -> Instances:
    """Return the detections of mmdet's own ``predict`` in pixels, (H, W, 3) uint8, BGR."""
    found = predicted(detector, pixels).pred_instances
    masks = found.masks.cpu().numpy() if 'masks' in found else ()
    boxes = found.bboxes.cpu().numpy()
    scores = found.scores.cpu().numpy()
    labels = found.labels.cpu().numpy()
    return Instances(boxes, scores, labels, masks)


def predicted(detector: nn.Module, pixels: np.ndarray) -> Any:
    """Return the data sample of mmdet's own ``predict`` for pixels, (H, W, 3) uint8, BGR."""
    from mmdet.structures import DetDataSample

    size = pixels.shape[:2]
    meta = {'ori_shape': size, 'img_shape': size, 'scale_factor': (1.0, 1.0)}
    return _predict(detector, pixels, DetDataSample(metainfo=meta))


def instances_of_file(outputs: list[np.ndarray], size: tuple[int, int], mask_threshold: float | None) -> Instances:
    """Return the detections in the outputs of a file, for an image of ``size`` (height, width)."""
    boxes, scores, labels, *probabilities = outputs
    masks = []
    if mask_threshold is not None:
        for mask, box in zip(probabilities[0], boxes, strict=True):
            masks.append(pasted(mask, box, mask_threshold, *size))
    return Instances(boxes, scores, labels, masks)


def classes_of_framework(segmentor: nn.Module, pixels: np.ndarray, size: Sequence[int]) -> np.ndarray:
    """Return the class map of ``size`` (height, width) from mmseg's own ``predict`` for (H, W, 3) uint8, BGR."""
    from mmseg.structures import SegDataSample

    shape = pixels.shape[:2]
    meta = {'ori_shape': tuple(size), 'img_shape': shape, 'pad_shape': shape}
    found = _predict(segmentor, pixels, SegDataSample(metainfo=meta))
    return found.pred_sem_seg.data[0].cpu().numpy()


def share_of_other_masks(sample: Any, outputs: Sequence[np.ndarray], settings: Mapping[str, Any]) -> tuple[float, int]:
    """Compare ``outputs`` of a file, ``classes`` and ``masks``, with mmdet's data sample for the same pixels.

    ``settings`` are ``queries`` in its metadata. Returns the larger share of different instances or pixels of segments,
    and the number compared.
    """
    size = sample.img_shape
    found, panoptic = predicted_by_file(outputs, size, size, dict(settings), 0.0)
    share = 0.0
    count = 0
    if found is not None:
        theirs = sample.pred_instances.numpy()
        probabilities = np.sort(outputs[0][:, :-1], axis=None)
        # Of the least probable pairs of query and class, either result may contain others.
        kept = min(settings['instances'], len(probabilities))
        lowest = float(probabilities[-kept])
        # The masks are compared, not the boxes around them, which one pixel can change.
        ours = found._replace(boxes=np.zeros_like(found.boxes))
        no_boxes = np.zeros_like(theirs.bboxes)
        theirs = Instances(no_boxes, theirs.scores, theirs.labels, theirs.masks)
        share, count = share_of_unmatched(theirs, ours, lowest, len(probabilities) + 1)
    if panoptic is not None:
        segments = sample.pred_panoptic_seg.sem_seg[0].numpy()
        classes = outputs[0].shape[1] - 1
        other, segments_count = share_of_other_segments(segments, panoptic, classes)
        share = max(share, other)
        count += segments_count
    return share, count


def _predict(model: Any, pixels: np.ndarray, sample: Any) -> Any:
    channels_first = np.ascontiguousarray(pixels.transpose(2, 0, 1))
    batch = {'inputs': [torch.from_numpy(channels_first)], 'data_samples': [sample]}
    with torch.no_grad():
        return model.test_step(batch)[0]


def share_of_other_segments(theirs: np.ndarray, ours: np.ndarray, classes: int) -> tuple[float, int]:
    """Return the share of pixels in which two maps of segments (H, W) differ, and the number of segments compared.

    Instances are matched by their overlap, because one near tie changes the numbers of all instances after it. Pixels
    of no segment have the number of classes.
    """
    shares = []
    for segments, other in ((theirs, ours), (ours, theirs)):
        is_same = np.zeros(segments.shape, bool)
        for segment in np.unique(segments):
            mask = segments == segment
            found, counts = np.unique(other[mask], return_counts=True)
            partner = found[counts.argmax()]
            if partner % OFFSET == segment % OFFSET:
                is_same |= mask & (other == partner)
        shares.append(1 - float(is_same.mean()))
    compared = np.unique(theirs) != classes
    return max(shares), int(compared.sum())


def _has_match(other: Instances, result: Instances, index: int) -> bool:
    """Return whether ``other`` contains the instance ``index`` of ``result``."""
    has_label = other.labels == result.labels[index]
    by_score = np.abs(other.scores - result.scores[index])
    has_score = by_score <= ROUNDING
    box = result.boxes[index]
    iou, _ = overlaps(box, other.boxes)
    by_side = np.abs(box - other.boxes).max(1)
    has_box = (iou >= OVERLAP) | (by_side <= SAME_SIDE)
    partners = np.flatnonzero(has_label & has_score & has_box)
    if not len(result.masks) or not len(other.masks):
        return len(result.masks) == len(other.masks) and len(partners) > 0
    mask = result.masks[index]
    for partner in partners:
        found = other.masks[partner]
        common = (mask & found).sum()
        union = (mask | found).sum()
        if common >= OVERLAP * union:
            return True
    return False

"""Predictions of MaskFormer and Mask2Former from the outputs of their file, in numpy.

The file returns for each query the probability of every class, ``classes`` (Q, C + 1), the last of which means no
object, and the logits of a small mask, ``masks`` (Q, h, w). Only the masks that are needed get the size of the image.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from swin_dense.workbench.runtime.instances import interpolation
from swin_dense.workbench.runtime.outputs import Instances

# In a map of segments, the number of an instance is multiplied by this and added to the class, as in mmdet.
OFFSET = 1000


def predicted(
    outputs: Sequence[np.ndarray],
    size: tuple[int, int],
    target: tuple[int, int],
    settings: dict[str, Any],
    score: float,
) -> tuple[Instances | None, np.ndarray | None]:
    """Return the instances from a score up and the map of segments, None for what the model does not predict.

    ``outputs`` are ``classes`` and ``masks`` of the file for an input of ``size`` (height, width), ``target`` is the
    size of the image, and ``settings`` are ``queries`` in the metadata.
    """
    classes, masks = outputs
    divisor = settings['divisor']
    weights = []
    # As in mmdet: to the padded input of the model, cropped, and to the image.
    for small, side, full in zip(masks.shape[1:], size, target, strict=True):
        padded = -(-side // divisor) * divisor
        to_input = _bilinear(small, padded)[:side]
        weights.append(_bilinear(side, full) @ to_input)
    rows, columns = weights

    def enlarged(query: int) -> np.ndarray:
        return rows @ masks[query] @ columns.T

    things = settings['things']
    found = panoptic = None
    if settings['instances'] is not None:
        found = instances(classes, enlarged, things, settings['instances'], score)
    if settings['panoptic'] is not None:
        panoptic = segments(classes, enlarged, target, things, settings['panoptic'])
    return found, panoptic


def instances(
    classes: np.ndarray, enlarged: Callable[[int], np.ndarray], things: int, most: int, score: float
) -> Instances:
    """Return the instances of an image from a score up, by descending score.

    Of the pairs of a query and a class, the ``most`` probable are considered. ``classes`` are probabilities (Q, C + 1),
    of which the first ``things`` have instances, and ``enlarged`` returns the mask logits of a query, (H, W).
    """
    probabilities = classes[:, :-1]
    best = np.argsort(-probabilities, axis=None, kind='stable')[:most]
    queries, labels = np.unravel_index(best, probabilities.shape)
    found: list[tuple[np.ndarray, np.float32, int, np.ndarray]] = []
    # The score is the probability times a mean of at most 1.
    usable = (labels < things) & (probabilities[queries, labels] >= score)
    for query in np.unique(queries[usable]):
        logits = enlarged(query)
        mask = logits > 0
        inside = _sigmoid(logits[mask])
        quality = inside.sum() / np.float32(mask.sum() + 1e-6)
        box = box_around(mask)
        for label in labels[usable & (queries == query)]:
            total = probabilities[query, label] * quality
            if total >= score:
                found.append((box, total, int(label), mask))
    found.sort(key=lambda instance: -instance[1])
    boxes = [box for box, _, _, _ in found]
    scores = [total for _, total, _, _ in found]
    labels_found = [label for _, _, label, _ in found]
    return Instances(
        np.array(boxes, np.float32).reshape(-1, 4),
        np.array(scores, np.float32),
        np.array(labels_found, np.int32),
        [mask for _, _, _, mask in found],
    )


def segments(
    classes: np.ndarray,
    enlarged: Callable[[int], np.ndarray],
    shape: tuple[int, int],
    things: int,
    settings: dict[str, Any],
) -> np.ndarray:
    """Return the segment of each pixel, (H, W) int32: the class, plus ``OFFSET`` times the number of an instance.

    Pixels of no segment have the number of classes. ``classes``, ``enlarged`` and ``things`` are as for
    :func:`instances`; ``settings`` are ``object_mask_thr``, ``iou_thr`` and ``filter_low_score`` of ``test_cfg``.
    """
    nothing = classes.shape[1] - 1
    labels = classes.argmax(1)
    scores = classes.max(1)
    is_kept = (labels != nothing) & (scores > settings['object_mask_thr'])
    kept = np.flatnonzero(is_kept)
    winner = np.zeros(shape, np.int64)
    highest = np.full(shape, -1, np.float32)
    is_likely = np.zeros(shape, bool)
    areas = []
    for index, query in enumerate(kept):
        inside = _sigmoid(enlarged(query))
        is_inside = inside >= 0.5
        areas.append(is_inside.sum())
        weighted = scores[query] * inside
        wins = weighted > highest
        winner[wins] = index
        highest[wins] = weighted[wins]
        is_likely[wins] = is_inside[wins]
    out = np.full(shape, nothing, np.int32)
    number = 1
    for index, query in enumerate(kept):
        mask = winner == index
        area = mask.sum()
        if not area or not areas[index] or area / areas[index] < settings['iou_thr']:
            continue
        if settings['filter_low_score']:
            mask &= is_likely
        is_thing = labels[query] < things
        out[mask] = labels[query] + is_thing * number * OFFSET
        number += is_thing
    return out


def described(panoptic: np.ndarray, classes: Sequence[str]) -> list[dict[str, Any]]:
    """Return ``id``, class, label and share of pixels of each segment in a map of :func:`segments`."""
    found = []
    for number in np.unique(panoptic).tolist():
        label = number % OFFSET
        if label < len(classes):
            share = float((panoptic == number).mean())
            found.append({'id': number, 'class': classes[label], 'label': label, 'share': share})
    return found


def _bilinear(inputs: int, outputs: int) -> np.ndarray:
    """Return the weights of the inputs along one axis for each output, (outputs, inputs), as in torch."""
    half = np.float32(0.5)
    centres = np.arange(outputs, dtype=np.float32) + half
    position = centres * np.float32(inputs / outputs) - half
    return interpolation(position.clip(0, inputs - 1), inputs)


def box_around(mask: np.ndarray) -> np.ndarray:
    """Return the box x1, y1, x2, y2 around a mask (H, W), zeros if it is empty."""
    columns = np.flatnonzero(mask.any(0))
    rows = np.flatnonzero(mask.any(1))
    if not len(rows):
        return np.zeros(4, np.float32)
    right = columns[-1] + 1
    bottom = rows[-1] + 1
    return np.array([columns[0], rows[0], right, bottom], np.float32)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    with np.errstate(over='ignore'):  # exp(100) is inf in float32, and 1 / inf is 0
        return 1 / (1 + np.exp(-x))

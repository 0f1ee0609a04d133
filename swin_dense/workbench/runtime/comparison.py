"""Compare two predictions for an image, in numpy: those of a framework and its file, or of a file and a smaller one."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from swin_dense.workbench.runtime.masks import Instances, overlaps
from swin_dense.workbench.runtime.queries import OFFSET

# Allowed share of different instances, mask pixels or class pixels, because rounding decides near ties.
LARGEST_SHARE = 0.02
# The IoU of boxes with sides that differ by at most this many pixels counts as 1: that of thin boxes means little.
SAME_SIDE = 0.01


class Tolerance(NamedTuple):
    """By how much two instances with the same label may differ to match.

    Attributes:
        overlap: minimum IoU of their boxes, and of their masks.
        score: maximum difference of their scores.
    """

    overlap: float
    score: float


# Of two programs that compute the same in float32.
ROUNDING = Tolerance(overlap=0.98, score=1e-3)


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
    missing, compared = count_unmatched(theirs, ours, lowest + ROUNDING.score, ROUNDING)
    return missing / max(compared, 1), compared // 2


def count_unmatched(theirs: Instances, ours: Instances, above: float, tolerance: Tolerance) -> tuple[int, int]:
    """Return how many instances of either result have no match in the other, and how many were compared.

    Args:
        theirs: detections of one program.
        ours: detections of another.
        above: only instances with a higher score are compared; their matches may have any score.
        tolerance: which instances match.
    """
    missing = compared = 0
    for one, other in ((theirs, ours), (ours, theirs)):
        for index in np.flatnonzero(one.scores > above):
            compared += 1
            missing += not _has_match(other, one, index, tolerance)
    return missing, compared


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
            partner = found[counts.argmax()]
            if partner % OFFSET == segment % OFFSET:
                is_same |= mask & (other == partner)
        shares.append(1 - float(is_same.mean()))
    return max(shares), int((np.unique(theirs) != classes).sum())


def _has_match(other: Instances, one: Instances, index: int, tolerance: Tolerance) -> bool:
    """Return whether ``other`` contains the instance ``index`` of ``one``."""
    has_label = other.labels == one.labels[index]
    has_score = np.abs(other.scores - one.scores[index]) <= tolerance.score
    box = one.boxes[index]
    has_box = overlaps(box, other.boxes)[0] >= tolerance.overlap
    has_box |= np.abs(box - other.boxes).max(1) <= SAME_SIDE
    partners = np.flatnonzero(has_label & has_score & has_box)
    if not len(one.masks) or not len(other.masks):
        return len(one.masks) == len(other.masks) and len(partners) > 0
    mask = one.masks[index]
    for partner in partners:
        found = other.masks[partner]
        if (mask & found).sum() >= tolerance.overlap * (mask | found).sum():
            return True
    return False

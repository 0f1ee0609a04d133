"""Compare a file with its module, given the choices that the file makes: no near tie decides whether they are equal.

Of two boxes with nearly the same score, or with an overlap near the threshold, rounding decides which one is kept, and
each library rounds in its own way. So the module takes the choices of the file. Each choice must be right within the
rounding, and all that is computed before and after it must be equal.
"""

import numpy as np
import onnx
import pytest
import torch

from swin_dense.workbench.export import detectors
from swin_dense.workbench.export.operators import LOWEST_SCORE

ROUNDING = 1e-4  # of scores and overlaps


def with_choices(path, changed):
    """Write a file that also returns the indices which each TopK and each non-maximum suppression chooses."""
    model = onnx.load(path)
    index = {'TopK': 1, 'NonMaxSuppression': 0}
    chosen = [node.output[index[node.op_type]] for node in model.graph.node if node.op_type in index]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in chosen)
    onnx.save(model, changed)
    return changed


def assert_equal_given_choices(module, session, img, outputs):
    """Run a file of :func:`with_choices` and its module on an image (1, 3, H, W), and compare all outputs."""
    found = session.run({'img': img})
    choices = iter(torch.from_numpy(array) for array in found[outputs:])

    def topk(scores, count, dim=-1, **_):
        chosen = next(choices)
        values = scores.gather(dim, chosen)
        best = torch.sort(scores, dim=dim, descending=True)[0].narrow(dim, 0, count)
        torch.testing.assert_close(values, best, rtol=0, atol=ROUNDING)
        assert all(len(set(row)) == count for row in chosen.movedim(dim, -1).reshape(-1, count).tolist())
        return values, chosen

    def nms(boxes, scores, threshold, most):
        kept = next(choices)[:, 2]
        assert_suppressed(
            boxes.double().numpy(),
            scores.numpy(),
            kept.numpy(),
            threshold,
            most,
        )
        return kept

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(torch.Tensor, 'topk', topk)
        patch.setattr(torch, 'topk', topk)
        patch.setattr(detectors, 'nms', nms)
        expected = [array.numpy() for array in module(torch.from_numpy(img))]
    assert next(choices, None) is None
    for ours, theirs in zip(found[:outputs], expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-2 if theirs.ndim == 2 else 1e-3)  # boxes in pixels


def assert_suppressed(boxes, scores, kept, threshold, most):
    """Check a non-maximum suppression by its definition, within the rounding."""
    counted = np.flatnonzero(scores > LOWEST_SCORE)
    assert len(set(kept)) == len(kept) <= most
    assert set(kept) <= set(counted)
    assert (np.diff(scores[kept]) <= ROUNDING).all()
    overlaps = iou(boxes[kept], boxes)
    np.fill_diagonal(between := overlaps[:, kept], 0)
    assert between.max(initial=0) <= threshold + ROUNDING
    is_better = scores[kept][:, None] >= scores - ROUNDING
    is_dropped = (is_better & (overlaps >= threshold - ROUNDING)).any(0)
    if len(kept) == most:
        is_dropped |= scores <= scores[kept].min() + ROUNDING
    is_dropped[kept] = True
    assert is_dropped[counted].all()


def iou(boxes, others):
    """Return the IoU of each of N boxes with each of M others, (N, M)."""
    low = np.maximum(boxes[:, None, :2], others[None, :, :2])
    high = np.minimum(boxes[:, None, 2:], others[None, :, 2:])
    common = (high - low).clip(0).prod(2)
    areas, other_areas = ((each[:, 2:] - each[:, :2]).prod(1) for each in (boxes, others))
    return common / np.maximum(areas[:, None] + other_areas - common, 1e-9)

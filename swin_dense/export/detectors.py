"""Whole detectors of mmdet as graphs: what their ``predict`` does, restated without a branch on a number of boxes.

Necks, heads, anchors and coders are mmdet's own; what selects boxes is restated. Its sizes are those that two
suppressions of boxes return, which are indexed with and never looked at.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swin_dense.export.operators import nms, roi_align


class Detector(nn.Module):
    """A detector of mmdet from an image to its boxes.

    Args:
        detector: of a kind that ``swin_dense.export.gate`` lets through, in evaluation mode.
    """

    OUTPUTS: tuple[str, ...] = ('boxes', 'scores', 'labels')

    def __init__(self, detector: nn.Module) -> None:
        super().__init__()
        self.detector: Any = detector

    def maps(self, img: Tensor) -> tuple[Tensor, ...]:
        """Return the maps of the neck for an image (1, 3, H, W) as it comes from the file."""
        prepare = self.detector.data_preprocessor
        img = normalized(img, prepare, prepare._channel_conversion)
        return tuple(self.detector.extract_feat(padded(img, prepare.pad_size_divisor, prepare.pad_value)))


class OneStageDetector(Detector):
    """RetinaNet."""

    def forward(self, img: Tensor) -> tuple[Tensor, ...]:
        """Return boxes (N, 4) in pixels of the image, scores (N,) and labels (N,), the best first."""
        head, config = self.detector.bbox_head, self.detector.bbox_head.test_cfg
        boxes, scores, labels = [], [], []
        for logits, deltas, anchors in levels(head, self.maps(img)):
            score = flat(logits).sigmoid().flatten()
            score, index = best(torch.where(score > config.score_thr, score, -1.0), config.nms_pre)
            row = index // head.num_classes
            boxes.append(decoded(head.bbox_coder, anchors[row], flat(deltas, 4)[row], img))
            scores.append(score)
            labels.append(index % head.num_classes)
        box, score, label = torch.cat(boxes), torch.cat(scores), torch.cat(labels)
        score = without_small(box, score, config)
        kept = remaining(box, score, label, config.nms, config.max_per_img)
        return box[kept], score[kept], label[kept]


class TwoStageDetector(Detector):
    """Faster and Cascade R-CNN, with masks or without."""

    def __init__(self, detector: nn.Module) -> None:
        super().__init__(detector)
        if self.detector.roi_head.with_mask:
            self.OUTPUTS = (*Detector.OUTPUTS, 'masks')

    def forward(self, img: Tensor) -> tuple[Tensor, ...]:
        """Return boxes (N, 4) in pixels of the image, scores (N,), labels (N,), the best first, and masks (N, h, w).

        The masks are probabilities in the boxes.
        """
        maps = self.maps(img)
        roi_head = self.detector.roi_head
        boxes, scores = self._classified(maps, self._proposals(maps, img), img)
        score, config = scores.flatten(), roi_head.test_cfg
        score = torch.where(score > config.score_thr, score, -1.0)
        label = torch.arange(scores.shape[1], device=img.device).expand(scores.shape).flatten()
        box = boxes.reshape(-1, 4)
        kept = remaining(box, score, label, config.nms, config.max_per_img)
        box, score, label = box[kept], score[kept], label[kept]
        if not roi_head.with_mask:
            return box, score, label
        return box, score, label, self._masks(maps, box, label)

    def _proposals(self, maps: tuple[Tensor, ...], img: Tensor) -> Tensor:
        head, config = self.detector.rpn_head, self.detector.rpn_head.test_cfg
        boxes, scores, sources = [], [], []
        for level, (logits, deltas, anchors) in enumerate(levels(head, maps)):
            score, index = best(flat(logits).sigmoid().flatten(), config.nms_pre)
            boxes.append(decoded(head.bbox_coder, anchors[index], flat(deltas, 4)[index], img))
            scores.append(score)
            sources.append(torch.full_like(index, level))
        box = torch.cat(boxes)
        score = without_small(box, torch.cat(scores), config)
        return box[remaining(box, score, torch.cat(sources), config.nms, config.max_per_img)]

    def _classified(self, maps: tuple[Tensor, ...], boxes: Tensor, img: Tensor) -> tuple[Tensor, Tensor]:
        """Return the boxes (N, classes, 4) and scores (N, classes) of proposals (N, 4), refined stage by stage."""
        roi_head = self.detector.roi_head
        heads = stages(roi_head.bbox_head)
        logits = []
        for stage, (extractor, head) in enumerate(zip(stages(roi_head.bbox_roi_extractor), heads, strict=True)):
            logit, deltas = head(pooled(extractor, maps, boxes))
            logits.append(logit)
            if stage < len(heads) - 1:
                label = logit[:, :-1].argmax(1)
                boxes = clamped(head.regress_by_class(boxes, label, deltas, {'img_shape': None}), head.bbox_coder, img)
        scores = (sum(logits) / float(len(logits))).softmax(-1)[:, :-1]
        repeats = 1 if head.reg_class_agnostic else head.num_classes
        boxes = boxes[:, None].expand(-1, repeats, -1).reshape(-1, 4)
        boxes = decoded(head.bbox_coder, boxes, deltas.reshape(-1, 4), img).reshape(-1, repeats, 4)
        return boxes.expand(-1, head.num_classes, -1), scores

    def _masks(self, maps: tuple[Tensor, ...], boxes: Tensor, labels: Tensor) -> Tensor:
        roi_head = self.detector.roi_head
        extractors, heads = stages(roi_head.mask_roi_extractor), stages(roi_head.mask_head)
        masks = [
            head(pooled(extractor, maps, boxes)).sigmoid() for extractor, head in zip(extractors, heads, strict=True)
        ]
        mask = torch.stack(masks).mean(0)
        if heads[-1].class_agnostic:
            return mask[:, 0]
        return mask[torch.arange(labels.shape[0], device=labels.device), labels]


def normalized(img: Tensor, preprocessor: Any, has_other_order: bool) -> Tensor:
    """Return an image (B, 3, H, W), BGR from 0 to 255, as the preprocessor of a framework gives it to the model."""
    if has_other_order:
        img = img[:, [2, 1, 0]]
    return (img - preprocessor.mean) / preprocessor.std if preprocessor._enable_normalize else img


def padded(img: Tensor, divisor: int, value: float) -> Tensor:
    """Return an image, (B, C, H, W), with sides that ``divisor`` divides."""
    if divisor == 1:
        return img
    height, width = ((side + divisor - 1) // divisor * divisor for side in img.shape[2:])
    return F.pad(img, (0, width - img.shape[3], 0, height - img.shape[2]), value=value)


def stages(part: nn.Module) -> list[Any]:
    """Return the stages of a part of a RoI head: a list in Cascade R-CNN, a module elsewhere."""
    return list(part) if isinstance(part, nn.ModuleList) else [part]


def levels(head: Any, maps: tuple[Tensor, ...]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return logits, deltas and anchors of every level of a dense head."""
    logits, deltas = head(maps)
    sizes = [one.shape[2:] for one in logits]
    anchors = head.prior_generator.grid_priors(sizes, logits[0].dtype, logits[0].device)
    return list(zip(logits, deltas, anchors, strict=True))


def flat(x: Tensor, columns: int = 1) -> Tensor:
    """Return a map (1, anchors * columns, H, W) in the order of anchors, (H * W * anchors, columns)."""
    return x.permute(0, 2, 3, 1).reshape(-1, columns)


def best(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the ``count`` best scores (N,) and where they are; if there are fewer, the others are -1 and anywhere."""
    score, index = torch.cat([scores, scores.new_full((count,), -1.0)]).topk(count)
    return score, index.clamp(max=scores.shape[0] - 1)


def decoded(coder: Any, boxes: Tensor, deltas: Tensor, img: Tensor) -> Tensor:
    """Return boxes (N, 4) moved by ``deltas`` (N, 4), inside the image."""
    return clamped(coder.decode(boxes, deltas), coder, img)


def clamped(boxes: Tensor, coder: Any, img: Tensor) -> Tensor:
    """Return the boxes, (N, 4), inside the image where their coder does that; in mmdet's own way it writes in place."""
    if not coder.clip_border:
        return boxes
    x, y = boxes[:, 0::2].clamp(0, img.shape[3]), boxes[:, 1::2].clamp(0, img.shape[2])
    return torch.stack([x, y], 2).flatten(1)


def without_small(boxes: Tensor, scores: Tensor, config: Any) -> Tensor:
    """Return the scores, with -1 for boxes that are no larger than the config wants them."""
    smallest = config.get('min_bbox_size', -1)
    if smallest < 0:
        return scores
    sides = boxes[:, 2:] - boxes[:, :2]
    return torch.where((sides > smallest).all(1), scores, -1.0)


def remaining(boxes: Tensor, scores: Tensor, groups: Tensor, config: Any, most: int) -> Tensor:
    """Return the indices of the boxes that remain in each group, the best of all first: mmcv's ``batched_nms``.

    It moves the groups away from each other, which rounds: done in the same way, the same boxes remain.
    """
    farthest = torch.where((scores >= 0)[:, None], boxes, 0.0).max()
    moved = boxes + (groups.to(boxes.dtype) * (farthest + 1))[:, None]
    return nms(moved, scores, config.iou_threshold, most)


def pooled(extractor: Any, maps: tuple[Tensor, ...], boxes: Tensor) -> Tensor:
    """Return what lies in the boxes, (N, C, h, w), each taken from the map that its size asks for.

    All boxes are pooled on all maps, where those of another map are one pixel. One without a size is zeros, as mmcv has
    it; OpenVINO would make it NaN.
    """
    level = extractor.map_roi_levels(F.pad(boxes, (1, 0)), extractor.num_inputs)
    level = torch.where((boxes[:, 2:] > boxes[:, :2]).all(1), level, -1)
    elsewhere = boxes.new_tensor([0.0, 0.0, 1.0, 1.0])
    out: Tensor | None = None
    for index, (layer, x) in enumerate(zip(extractor.roi_layers, maps, strict=False)):
        is_here = (level == index)[:, None]
        size = list(layer.output_size)
        part = roi_align(
            x, torch.where(is_here, boxes, elsewhere), size, layer.spatial_scale, layer.sampling_ratio, layer.aligned
        )
        part = torch.where(is_here[..., None, None], part, 0.0)
        out = part if out is None else out + part
    assert out is not None
    return out

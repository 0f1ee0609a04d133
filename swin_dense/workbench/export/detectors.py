"""Traceable versions of mmdet's detectors: ``predict`` without branches on the number of boxes.

Necks, heads, anchors and coders are mmdet's own modules. The selection of boxes is reimplemented: the number of boxes
that non-maximum suppression returns is data-dependent, so the code only indexes with its result.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swin_dense.utils import private_mm
from swin_dense.workbench.export.operators import nms, roi_align


class Detector(nn.Module):
    """Base class of traceable detectors, made of a detector of mmdet that ``gate`` accepts, in evaluation mode."""

    OUTPUTS: tuple[str, ...] = ('boxes', 'scores', 'labels')

    def __init__(self, detector: nn.Module) -> None:
        super().__init__()
        self.detector: Any = detector

    def maps(self, img: Tensor) -> tuple[Tensor, ...]:
        """Return the feature maps of the neck for an image (1, 3, H, W), BGR from 0 to 255."""
        prepare = self.detector.data_preprocessor
        img = normalize(img, prepare, private_mm.swaps_channels(prepare))
        img = pad_to_multiple(img, prepare.pad_size_divisor, prepare.pad_value)
        return tuple(self.detector.extract_feat(img))


class OneStageDetector(Detector):
    """RetinaNet."""

    def forward(self, img: Tensor) -> tuple[Tensor, ...]:
        """Return boxes (N, 4) in pixels of the image, scores (N,) and labels (N,) int32, by descending score."""
        head = self.detector.bbox_head
        config = head.test_cfg
        box, score, label, _ = candidates(head, self.maps(img), img)
        kept = batched_nms(box, score, label, config.nms, config.max_per_img)
        return box[kept], score[kept], label[kept].int()


class TwoStageDetector(Detector):
    """Faster, Mask, Cascade and Cascade Mask R-CNN."""

    def __init__(self, detector: nn.Module) -> None:
        super().__init__(detector)
        if self.detector.roi_head.with_mask:
            self.OUTPUTS = (*Detector.OUTPUTS, 'masks')

    def forward(self, img: Tensor) -> tuple[Tensor, ...]:
        """Return boxes (N, 4) in pixels of the image, scores (N,) and labels (N,) int32, by descending score.

        A detector with masks also returns masks (N, h, w), the probabilities inside each box.
        """
        maps = self.maps(img)
        rpn_head = self.detector.rpn_head
        config = rpn_head.test_cfg
        box, score, _, level = candidates(rpn_head, maps, img)
        kept = batched_nms(box, score, level, config.nms, config.max_per_img)
        boxes, scores = self._classified(maps, box[kept], img)
        roi_head = self.detector.roi_head
        config = roi_head.test_cfg
        score = scores.flatten()
        is_likely = score > config.score_thr
        score = torch.where(is_likely, score, -1.0)
        labels = torch.arange(scores.shape[1], device=img.device)
        label = labels.expand(scores.shape).flatten()
        box = boxes.reshape(-1, 4)
        kept = batched_nms(box, score, label, config.nms, config.max_per_img)
        box = box[kept]
        score = score[kept]
        label = label[kept]
        if not roi_head.with_mask:
            return box, score, label.int()
        masks = self._masks(maps, box, label)
        return box, score, label.int(), masks

    def _classified(self, maps: tuple[Tensor, ...], boxes: Tensor, img: Tensor) -> tuple[Tensor, Tensor]:
        """Return boxes (N, classes, 4) and scores (N, classes) for proposals (N, 4), after all stages of the head."""
        heads = as_stages(self.detector.roi_head.bbox_head)
        extractors = as_stages(self.detector.roi_head.bbox_roi_extractor)
        logits = []
        for extractor, head in zip(extractors, heads, strict=True):
            regions = pool_rois(extractor, maps, boxes)
            logit, deltas = head(regions)
            logits.append(logit)
            if head is not heads[-1]:
                label = logit[:, :-1].argmax(1)
                refined = head.regress_by_class(boxes, label, deltas, {'img_shape': None})
                boxes = clip_boxes(refined, head.bbox_coder, img)
        mean = sum(logits) / float(len(logits))
        scores = mean.softmax(-1)[:, :-1]
        repeats = 1 if head.reg_class_agnostic else head.num_classes
        boxes = boxes[:, None].expand(-1, repeats, -1)
        boxes = boxes.reshape(-1, 4)
        deltas = deltas.reshape(-1, 4)
        boxes = head.bbox_coder.decode(boxes, deltas)
        boxes = clip_boxes(boxes, head.bbox_coder, img)
        boxes = boxes.reshape(-1, repeats, 4)
        return boxes.expand(-1, head.num_classes, -1), scores

    def _masks(self, maps: tuple[Tensor, ...], boxes: Tensor, labels: Tensor) -> Tensor:
        heads = as_stages(self.detector.roi_head.mask_head)
        extractors = as_stages(self.detector.roi_head.mask_roi_extractor)
        masks = []
        for extractor, head in zip(extractors, heads, strict=True):
            regions = pool_rois(extractor, maps, boxes)
            logits = head(regions)
            masks.append(logits.sigmoid())
        mask = torch.stack(masks).mean(0)
        if heads[-1].class_agnostic:
            return mask[:, 0]
        rows = torch.arange(labels.shape[0], device=labels.device)
        return mask[rows, labels]


def normalize(img: Tensor, preprocessor: Any, has_other_order: bool) -> Tensor:
    """Normalise an image (B, 3, H, W), BGR from 0 to 255, as the framework's data preprocessor does."""
    if has_other_order:
        img = img[:, [2, 1, 0]]
    if not hasattr(preprocessor, 'mean'):
        return img
    return (img - preprocessor.mean) / preprocessor.std


def pad_to_multiple(img: Tensor, divisor: int, value: float) -> Tensor:
    """Pad an image (B, C, H, W) at the right and bottom to sides that are multiples of ``divisor``."""
    if divisor == 1:
        return img
    height, width = img.shape[2:]
    below = (height + divisor - 1) // divisor * divisor - height
    right = (width + divisor - 1) // divisor * divisor - width
    return F.pad(img, (0, right, 0, below), value=value)


def as_stages(part: nn.Module) -> list[Any]:
    """Return a component of a RoI head as a list of stages. It is a list in Cascade R-CNN and one module otherwise."""
    return list(part) if isinstance(part, nn.ModuleList) else [part]


def candidates(head: Any, maps: tuple[Tensor, ...], img: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the boxes (N, 4) of a dense head for non-maximum suppression, and their scores, labels and levels, (N,).

    The score is -1 if it is too low, or a side at most ``min_bbox_size`` in the config.
    """
    config = head.test_cfg
    all_logits, all_deltas = head(maps)
    sizes = [logits.shape[2:] for logits in all_logits]
    anchors = head.prior_generator.grid_priors(sizes, img.dtype, img.device)
    boxes = []
    scores = []
    labels = []
    levels = []
    for level, logits in enumerate(all_logits):
        score = flatten_map(logits).sigmoid().flatten()
        if 'score_thr' in config:
            is_likely = score > config.score_thr
            score = torch.where(is_likely, score, -1.0)
        # Smaller maps have fewer boxes than count, so that some with the score -1 are added.
        last = score.shape[0] - 1
        added = score.new_full((config.nms_pre,), -1.0)
        score, index = torch.cat([score, added]).topk(config.nms_pre)
        index = index.clamp(max=last)
        row = index // head.num_classes
        deltas = flatten_map(all_deltas[level], 4)
        box = head.bbox_coder.decode(anchors[level][row], deltas[row])
        boxes.append(clip_boxes(box, head.bbox_coder, img))
        scores.append(score)
        labels.append(index % head.num_classes)
        levels.append(torch.full_like(index, level))
    box = torch.cat(boxes)
    score = torch.cat(scores)
    smallest = config.get('min_bbox_size', -1)
    if smallest >= 0:
        sides = box[:, 2:] - box[:, :2]
        is_large = (sides > smallest).all(1)
        score = torch.where(is_large, score, -1.0)
    return box, score, torch.cat(labels), torch.cat(levels)


def flatten_map(x: Tensor, columns: int = 1) -> Tensor:
    """Reshape a map (1, anchors * columns, H, W) to (H * W * anchors, columns), the order of the anchors."""
    return x.permute(0, 2, 3, 1).reshape(-1, columns)


def clip_boxes(boxes: Tensor, coder: Any, img: Tensor) -> Tensor:
    """Clip boxes (N, 4) to the image if their coder does so. mmdet's own implementation writes in place."""
    if not coder.clip_border:
        return boxes
    x = boxes[:, 0::2].clamp(0, img.shape[3])
    y = boxes[:, 1::2].clamp(0, img.shape[2])
    return torch.stack([x, y], 2).flatten(1)


def batched_nms(boxes: Tensor, scores: Tensor, groups: Tensor, config: Any, most: int) -> Tensor:
    """Return the indices of boxes kept by non-maximum suppression in each group, by descending score.

    Like mmcv's ``batched_nms``, it offsets the boxes of each group. The same offsets give the same rounding, and so
    the same boxes.
    """
    is_usable = (scores >= 0)[:, None]
    farthest = torch.where(is_usable, boxes, 0.0).max()
    offsets = groups.to(boxes.dtype) * (farthest + 1)
    return nms(boxes + offsets[:, None], scores, config.iou_threshold, most)


def pool_rois(extractor: Any, maps: tuple[Tensor, ...], boxes: Tensor) -> Tensor:
    """Pool the features in the boxes (N, 4) to (N, C, h, w), each box from the map of its level.

    All boxes are pooled on all maps, to avoid data-dependent shapes; a box of another level is replaced by one pixel.
    Empty boxes give zeros, as in mmcv; OpenVINO would return NaN.
    """
    level = extractor.map_roi_levels(F.pad(boxes, (1, 0)), extractor.num_inputs)
    has_area = (boxes[:, 2:] > boxes[:, :2]).all(1)
    level = torch.where(has_area, level, -1)
    elsewhere = boxes.new_tensor([0.0, 0.0, 1.0, 1.0])
    out: Tensor | None = None
    for index, (layer, x) in enumerate(zip(extractor.roi_layers, maps, strict=False)):
        is_here = (level == index)[:, None]
        size = list(layer.output_size)
        here = torch.where(is_here, boxes, elsewhere)
        part = roi_align(x, here, size, layer.spatial_scale, layer.sampling_ratio, layer.aligned)
        is_here = is_here[..., None, None]
        part = torch.where(is_here, part, 0.0)
        out = part if out is None else out + part
    assert out is not None
    return out

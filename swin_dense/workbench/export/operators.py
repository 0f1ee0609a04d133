"""Custom operators for whole models: computed by mmcv in torch, translated to standard operators in ONNX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from swin_dense.utils.compat import custom_op

# A threshold between -1, the score of discarded boxes, and 0.
LOWEST_SCORE = -0.5


@custom_op(
    'swin_dense::nms',
    mutates_args=(),
    schema='(Tensor boxes, Tensor scores, float iou_threshold, int most) -> Tensor',
)
def nms(boxes: Tensor, scores: Tensor, iou_threshold: float, most: int) -> Tensor:
    """Return the indices of at most ``most`` boxes kept by non-maximum suppression, by descending score.

    ``boxes`` are (N, 4) as x1, y1, x2, y2. Those with a score below 0 are ignored, and those with a higher IoU than the
    threshold with a better box are dropped.
    """
    from mmcv.ops import nms as mmcv_nms

    (counted,) = torch.nonzero(scores > LOWEST_SCORE, as_tuple=True)
    _, kept = mmcv_nms(boxes[counted], scores[counted], iou_threshold)
    return counted[kept[:most]]


@nms.register_fake
def _nms_fake(boxes: Tensor, scores: Tensor, iou_threshold: float, most: int) -> Tensor:
    # Box coders of mmdet branch on an empty input. min=1 traces the other branch, which is also correct without boxes.
    count = torch.library.get_ctx().new_dynamic_size(min=1)
    return boxes.new_empty(count, dtype=torch.int64)


@custom_op(
    'swin_dense::roi_align',
    mutates_args=(),
    schema='(Tensor x, Tensor boxes, int[] size, float scale, int sampling_ratio, bool aligned) -> Tensor',
)
def roi_align(x: Tensor, boxes: Tensor, size: list[int], scale: float, sampling_ratio: int, aligned: bool) -> Tensor:
    """Pool the features of one map (1, C, H, W) in the boxes (N, 4), in pixels of the image, and return (N, C, *size).

    ``scale`` is the size of the map relative to the image; the other arguments are mmcv's.
    """
    from mmcv.ops import roi_align as mmcv_roi_align

    regions = F.pad(boxes, (1, 0))  # mmcv wants the index of the image before each box
    return mmcv_roi_align(x, regions, tuple(size), scale, sampling_ratio, 'avg', aligned)


@roi_align.register_fake
def _roi_align_fake(
    x: Tensor, boxes: Tensor, size: list[int], scale: float, sampling_ratio: int, aligned: bool
) -> Tensor:
    return x.new_empty((boxes.shape[0], x.shape[1], *size))


@custom_op('swin_dense::resize', mutates_args=(), schema='(Tensor x, Tensor size, bool align_corners) -> Tensor')
def resize(x: Tensor, size: Tensor, align_corners: bool) -> Tensor:
    """Resize a map (B, C, H, W) bilinearly to ``size``, (2,) int64, which may be a graph input; zeros keep the size."""
    height, width = size.tolist()
    if height == 0:
        height = x.shape[2]
    if width == 0:
        width = x.shape[3]
    return F.interpolate(x, (height, width), mode='bilinear', align_corners=align_corners)


@resize.register_fake
def _resize_fake(x: Tensor, size: Tensor, align_corners: bool) -> Tensor:
    context = torch.library.get_ctx()
    height = context.new_dynamic_size()
    width = context.new_dynamic_size()
    return x.new_empty((*x.shape[:2], height, width))


def translations() -> dict[Any, Callable[..., Any]]:
    """Return the ONNX translations of the operators, for ``torch.onnx.export``."""
    from onnxscript import opset18

    op: Any = opset18

    def onnx_nms(boxes: Any, scores: Any, iou_threshold: float, most: int) -> Any:
        boxes = op.Unsqueeze(boxes, [0])
        scores = op.Unsqueeze(scores, [0, 1])
        selected = op.NonMaxSuppression(boxes, scores, [most], [iou_threshold], [LOWEST_SCORE])
        return op.Gather(selected, 2, axis=1)  # rows are image, class, box

    def onnx_roi_align(x: Any, boxes: Any, size: Any, scale: float, sampling_ratio: int, aligned: bool) -> Any:
        count = op.Shape(boxes, start=0, end=1)
        images = op.Expand(op.Constant(value_ints=[0]), count)
        return op.RoiAlign(
            x,
            boxes,
            images,
            # 'half_pixel' of ONNX includes the shift by half a pixel.
            coordinate_transformation_mode='half_pixel' if aligned else 'output_half_pixel',
            mode='avg',
            output_height=size[0],
            output_width=size[1],
            sampling_ratio=sampling_ratio,
            spatial_scale=scale,
        )

    def onnx_resize(x: Any, size: Any, align_corners: bool) -> Any:
        own = op.Shape(x, start=2, end=4)
        sides = op.Where(op.Equal(size, 0), own, size)
        shape = op.Concat(op.Shape(x, start=0, end=2), sides, axis=0)
        return op.Resize(
            x,
            None,
            None,
            shape,
            coordinate_transformation_mode='align_corners' if align_corners else 'half_pixel',
            mode='linear',
        )

    namespace = torch.ops.swin_dense
    return {
        namespace.nms.default: onnx_nms,
        namespace.roi_align.default: onnx_roi_align,
        namespace.resize.default: onnx_resize,
    }

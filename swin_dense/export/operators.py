"""What whole models need and torch has no operator for: in torch mmcv's own, in the file standard ONNX operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from swin_dense.utils.compat import custom_op

# Boxes that do not count have the score -1: between it and 0.
LOWEST_SCORE = -0.5


@custom_op(
    'swin_dense::nms',
    mutates_args=(),
    schema='(Tensor boxes, Tensor scores, float iou_threshold, int most) -> Tensor',
)
def nms(boxes: Tensor, scores: Tensor, iou_threshold: float, most: int) -> Tensor:
    """Return the indices of at most ``most`` boxes that no better one overlaps, the best first.

    Args:
        boxes: (N, 4) as x1, y1, x2, y2.
        scores: (N,); boxes with a score below 0 do not count.
        iou_threshold: boxes that overlap more are dropped.
        most: number of boxes to keep.
    """
    from mmcv.ops import nms as mmcv_nms

    (counted,) = torch.nonzero(scores > LOWEST_SCORE, as_tuple=True)
    _, kept = mmcv_nms(boxes[counted], scores[counted], iou_threshold)
    return counted[kept[:most]]


@nms.register_fake
def _nms_fake(boxes: Tensor, scores: Tensor, iou_threshold: float, most: int) -> Tensor:
    # Coders of mmdet ask whether there are none; without any the other way, which is recorded, is right as well.
    return boxes.new_empty(torch.library.get_ctx().new_dynamic_size(min=1), dtype=torch.int64)


@custom_op(
    'swin_dense::roi_align',
    mutates_args=(),
    schema='(Tensor x, Tensor boxes, int[] size, float scale, int sampling_ratio, bool aligned) -> Tensor',
)
def roi_align(x: Tensor, boxes: Tensor, size: list[int], scale: float, sampling_ratio: int, aligned: bool) -> Tensor:
    """Return what lies in the boxes of one map, (N, C, *size).

    Args:
        x: (1, C, H, W).
        boxes: (N, 4) in pixels of the image.
        size: (height, width) of what is returned.
        scale: of the map relative to the image.
        sampling_ratio: points per bin and axis, 0 for as many as the box has pixels there.
        aligned: whether pixels are taken as squares, not as points.
    """
    from mmcv.ops import roi_align as mmcv_roi_align

    return mmcv_roi_align(x, F.pad(boxes, (1, 0)), tuple(size), scale, sampling_ratio, 'avg', aligned)


@roi_align.register_fake
def _roi_align_fake(
    x: Tensor, boxes: Tensor, size: list[int], scale: float, sampling_ratio: int, aligned: bool
) -> Tensor:
    return x.new_empty((boxes.shape[0], x.shape[1], *size))


@custom_op('swin_dense::resize', mutates_args=(), schema='(Tensor x, Tensor size, bool align_corners) -> Tensor')
def resize(x: Tensor, size: Tensor, align_corners: bool) -> Tensor:
    """Return ``x``, (B, C, H, W), in another size, bilinear.

    Args:
        x: the map.
        size: (2,) height and width, int64, which may come from outside; zeros stand for the size that ``x`` has.
        align_corners: as ``F.interpolate`` takes it.
    """
    height, width = (own if new == 0 else new for own, new in zip(x.shape[2:], size.tolist(), strict=True))
    return F.interpolate(x, (height, width), mode='bilinear', align_corners=align_corners)


@resize.register_fake
def _resize_fake(x: Tensor, size: Tensor, align_corners: bool) -> Tensor:
    context = torch.library.get_ctx()
    return x.new_empty((*x.shape[:2], context.new_dynamic_size(), context.new_dynamic_size()))


def translations() -> dict[Any, Callable[..., Any]]:
    """Return how the operators are written in ONNX, for ``torch.onnx.export``."""
    from onnxscript import opset18

    op: Any = opset18

    def onnx_nms(boxes: Any, scores: Any, iou_threshold: float, most: int) -> Any:
        selected = op.NonMaxSuppression(
            op.Unsqueeze(boxes, [0]), op.Unsqueeze(scores, [0, 1]), [most], [iou_threshold], [LOWEST_SCORE]
        )
        return op.Gather(selected, 2, axis=1)  # rows are image, class, box

    def onnx_roi_align(x: Any, boxes: Any, size: Any, scale: float, sampling_ratio: int, aligned: bool) -> Any:
        return op.RoiAlign(
            x,
            boxes,
            op.Expand(op.Constant(value_ints=[0]), op.Shape(boxes, start=0, end=1)),
            # ONNX subtracts half a pixel by itself.
            coordinate_transformation_mode='half_pixel' if aligned else 'output_half_pixel',
            mode='avg',
            output_height=size[0],
            output_width=size[1],
            sampling_ratio=sampling_ratio,
            spatial_scale=scale,
        )

    def onnx_resize(x: Any, size: Any, align_corners: bool) -> Any:
        own = op.Shape(x, start=2, end=4)
        return op.Resize(
            x,
            None,
            None,
            op.Concat(op.Shape(x, start=0, end=2), op.Where(op.Equal(size, 0), own, size), axis=0),
            coordinate_transformation_mode='align_corners' if align_corners else 'half_pixel',
            mode='linear',
        )

    mine = torch.ops.swin_dense
    return {
        mine.nms.default: onnx_nms,
        mine.roi_align.default: onnx_roi_align,
        mine.resize.default: onnx_resize,
    }

"""Traceable versions of mmseg's segmentors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swin_dense.workbench.export.deformable import replace_parts
from swin_dense.workbench.export.detectors import normalize, pad_to_multiple
from swin_dense.workbench.export.operators import resize
from swin_dense.workbench.export.queries import classes_and_masks


class Segmentor(nn.Module):
    """A segmentor of mmseg that ``gate`` accepts, in evaluation mode. Its auxiliary heads are removed in place."""

    def __init__(self, segmentor: nn.Module) -> None:
        super().__init__()
        segmentor.auxiliary_head = None  # type: ignore[assignment]
        self.segmentor: Any = segmentor

    def forward(self, img: Tensor, size: Tensor) -> Tensor:
        """Return the class of every pixel, (B, height, width) int32, of images (B, 3, H, W), BGR from 0 to 255.

        ``size``, (2,) int64, is that of the output; zeros keep that of ``img``. As in mmseg, logits are resized.
        """
        prepare = self.segmentor.data_preprocessor
        divisor = (prepare.test_cfg or {}).get('size_divisor', 1)
        x = normalize(img, prepare, prepare.channel_conversion)
        x = pad_to_multiple(x, divisor, prepare.pad_val)
        maps = self.segmentor.extract_feat(x)
        logits = self._logits(maps, x.shape[2:])
        logits = logits[:, :, : img.shape[2], : img.shape[3]]
        logits = resize(logits, size, self.segmentor.align_corners)
        return logits.argmax(1).int()

    def _logits(self, maps: Sequence[Tensor], size: Sequence[int]) -> Tensor:
        """Return the logits of the head for its input maps, resized to ``size``, (B, C, *size)."""
        head = self.segmentor.decode_head
        logits = head(maps)
        return F.interpolate(logits, tuple(size), mode='bilinear', align_corners=head.align_corners)


class MaskSegmentor(Segmentor):
    """MaskFormer and Mask2Former of mmseg. Parts of the segmentor are replaced in place."""

    def __init__(self, segmentor: nn.Module) -> None:
        super().__init__(segmentor)
        replace_parts(segmentor)

    def _logits(self, maps: Sequence[Tensor], size: Sequence[int]) -> Tensor:
        classes, masks = classes_and_masks(self.segmentor.decode_head, maps)
        masks = F.interpolate(masks, tuple(size), mode='bilinear', align_corners=False)
        # The best of several tiny values decides. Sigmoid is accurate to an absolute 5e-8 in ONNX Runtime.
        inside = 1 / (1 + (-masks).exp())
        probabilities = classes.softmax(-1)[..., :-1]
        return torch.einsum('bqc,bqhw->bchw', probabilities, inside)

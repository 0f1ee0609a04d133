"""Whole segmentors of mmseg as graphs."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from swin_dense.export.detectors import normalized
from swin_dense.export.operators import resize


class Segmentor(nn.Module):
    """A segmentor of mmseg from images to the class of every pixel, without its auxiliary heads.

    Args:
        segmentor: of a kind that ``swin_dense.export.gate`` lets through, in evaluation mode.
    """

    def __init__(self, segmentor: nn.Module) -> None:
        super().__init__()
        segmentor.auxiliary_head = None  # type: ignore[assignment]
        self.segmentor: Any = segmentor

    def forward(self, img: Tensor, size: Tensor) -> Tensor:
        """Return the classes, (B, height, width), int32.

        Args:
            img: (B, 3, H, W), BGR from 0 to 255.
            size: (2,) height and width of what is returned, int64; zeros stand for those of ``img``. Logits are
                resized, not classes, so this is another result than resizing what comes out.
        """
        prepare = self.segmentor.data_preprocessor
        maps = self.segmentor.extract_feat(normalized(img, prepare, prepare.channel_conversion))
        head = self.segmentor.decode_head
        logits = F.interpolate(head(maps), img.shape[2:], mode='bilinear', align_corners=head.align_corners)
        return resize(logits, size, self.segmentor.align_corners).argmax(1).int()

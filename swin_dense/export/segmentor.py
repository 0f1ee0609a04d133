"""A traceable version of mmseg's segmentors."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from swin_dense.export.detectors import normalize
from swin_dense.export.operators import resize


class Segmentor(nn.Module):
    """A segmentor of mmseg from images to the class of every pixel, without auxiliary heads.

    Args:
        segmentor: a segmentor that ``swin_dense.export.gate`` accepts, in evaluation mode. Its auxiliary heads are
            removed in place.
    """

    def __init__(self, segmentor: nn.Module) -> None:
        super().__init__()
        segmentor.auxiliary_head = None  # type: ignore[assignment]
        self.segmentor: Any = segmentor

    def forward(self, img: Tensor, size: Tensor) -> Tensor:
        """Return the class of every pixel, (B, height, width), int32.

        Args:
            img: (B, 3, H, W), BGR from 0 to 255.
            size: (2,) height and width of the output, int64. Zeros keep the size of ``img``. Logits are resized, so the
                result differs from resizing the returned classes.
        """
        prepare = self.segmentor.data_preprocessor
        maps = self.segmentor.extract_feat(normalize(img, prepare, prepare.channel_conversion))
        head = self.segmentor.decode_head
        logits = F.interpolate(head(maps), img.shape[2:], mode='bilinear', align_corners=head.align_corners)
        return resize(logits, size, self.segmentor.align_corners).argmax(1).int()

"""A Swin with a feature pyramid network, as the backbone of torchvision's detectors.

from torchvision.models.detection import MaskRCNN
detector = MaskRCNN(SwinFPN('swin_t', checkpoint), num_classes=3)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from swin_dense.integrations import require
from swin_dense.models.archs import Arch
from swin_dense.models.create import create_backbone
from swin_dense.utils import checks

require('torchvision', '0.28.0', 'torchvision')
from torchvision.ops import feature_pyramid_network as fpn  # noqa: E402

EXTRA_LEVELS = ('pool', 'p6p7', 'none')


class SwinFPN(nn.Module):
    """Swin and feature pyramid network for Faster, Mask and Keypoint R-CNN, RetinaNet and FCOS.

    Args:
        name: 'swin_t', 'swinv2_t' and the like, or an architecture as :func:`swin_dense.create_backbone` takes it; None
            for that of the checkpoint.
        checkpoint: anything that :func:`swin_dense.load_checkpoint` takes; a whole detector's file too.
        out_channels: channels of every level of the pyramid.
        extra: levels above the last stage. 'pool' adds one, for R-CNNs; 'p6p7' adds two, for RetinaNet and FCOS, which
            take ``out_indices=(1, 2, 3)``; 'none' adds none.
        norm_layer: makes the norm behind each convolution of the pyramid from its channels; None for no norm.
        **options: of :class:`swin_dense.SwinBackbone` or :class:`swin_dense.SwinV2Backbone`.

    Attributes:
        out_channels: what torchvision's detectors read, one number.
        body: the backbone.
        fpn: torchvision's FeaturePyramidNetwork.
    """

    def __init__(
        self,
        name: str | Mapping[str, Any] | Arch | None = 'swin_t',
        checkpoint: Any = None,
        *,
        out_channels: int = 256,
        extra: str = 'pool',
        norm_layer: Any = None,
        **options: Any,
    ) -> None:
        super().__init__()
        checks.one_of('extra', extra, EXTRA_LEVELS)
        self.out_channels = checks.integer('out_channels', out_channels)
        self.body = create_backbone(name, checkpoint, **{'out_indices': (0, 1, 2, 3), **options}).train()
        blocks = {
            'pool': fpn.LastLevelMaxPool,
            'p6p7': lambda: fpn.LastLevelP6P7(self.body.out_channels[-1], out_channels),
            'none': lambda: None,
        }
        self.fpn = fpn.FeaturePyramidNetwork(self.body.out_channels, out_channels, blocks[extra](), norm_layer)

    def forward(self, images: Tensor) -> OrderedDict[str, Tensor]:
        """Return the levels of the pyramid by name, the finest first: '0', '1', ..., then 'pool' or 'p6' and 'p7'.

        Args:
            images: (B, in_channels, H, W), any H and W.

        Returns:
            Name to (B, out_channels, ceil(H / stride), ceil(W / stride)).
        """
        return self.fpn(OrderedDict((str(level), maps) for level, maps in enumerate(self.body(images))))

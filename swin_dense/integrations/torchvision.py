"""A Swin backbone with a feature pyramid network for torchvision's detectors.

from torchvision.models.detection import MaskRCNN
detector = MaskRCNN(SwinFPN('swin_t', checkpoint), num_classes=3)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from swin_dense.archs import Arch
from swin_dense.integrations import require
from swin_dense.models.create import create_backbone
from swin_dense.utils import checks

require('torchvision', '0.28.0')
from torchvision.ops import feature_pyramid_network as fpn  # noqa: E402

EXTRA_LEVELS = ('pool', 'p6p7', 'none')


class SwinFPN(nn.Module):
    """Swin with a feature pyramid network, for Faster, Mask and Keypoint R-CNN, RetinaNet and FCOS.

    Args:
        name: a name such as 'swin_t' or 'swinv2_t', or an architecture, see :func:`swin_dense.create_backbone`; None
            uses the architecture of the checkpoint.
        checkpoint: see :func:`swin_dense.load_checkpoint`; may be the checkpoint of a whole detector.
        out_channels: number of channels of each pyramid level.
        extra: additional levels above the last stage. 'pool' adds one, for R-CNNs; 'p6p7' adds two, for RetinaNet and
            FCOS, which use ``out_indices=(1, 2, 3)``; 'none' adds none.
        norm_layer: a function from the number of channels to the norm after each convolution of the pyramid, or None.
        **options: options of :class:`swin_dense.SwinBackbone` or :class:`swin_dense.SwinV2Backbone`.

    Attributes:
        out_channels: number of channels of each level, read by torchvision's detectors.
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
        """Return the pyramid levels by name, finest first: '0', '1', ..., then 'pool' or 'p6' and 'p7'.

        Images are (B, in_channels, H, W), levels (B, out_channels, ceil(H / stride), ceil(W / stride)).
        """
        return self.fpn(OrderedDict((str(level), maps) for level, maps in enumerate(self.body(images))))

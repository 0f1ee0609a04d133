"""Swin encoders for segmentation_models_pytorch. Importing this module registers them.

unet = smp.Unet('swin_dense_t', encoder_weights=None, classes=2)
load_checkpoint(unet.encoder.backbone, 'swin_tiny_patch4_window7_224.pth')  # or prefix='teacher', and so on
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from torch import Tensor, nn

from swin_dense.archs import ARCHS
from swin_dense.integrations import require, strides_of
from swin_dense.models.create import BACKBONES

require('segmentation_models_pytorch', '0.6.0')
from segmentation_models_pytorch import encoders  # noqa: E402
from segmentation_models_pytorch.encoders._base import EncoderMixin  # noqa: E402


class SwinDenseEncoder(nn.Module, EncoderMixin):
    """Swin encoder. It returns the image, an empty map of half its size, and the feature pyramid.

    Args:
        network: 'swin' or 'swinv2'.
        arch: see :class:`swin_dense.SwinBackbone`.
        depth: number of downsampling steps, 2 to 5. The encoder has depth - 1 stages.
        output_stride: stride of the last map in pixels: 32, 16 or 8.
        **options: options of the backbone.
    """

    _is_torch_scriptable = False

    def __init__(self, network: str, arch: str, depth: int = 5, output_stride: int = 32, **options: Any) -> None:
        super().__init__()
        if depth not in range(2, 6):
            raise ValueError(
                f'encoder_depth must be between 2 and 5 for a Swin, whose first map has stride 4, got {depth}'
            )
        strides = strides_of(output_stride)
        self.backbone = BACKBONES[network](arch, out_indices=range(depth - 1), strides=strides, **options)
        self._depth, self._in_channels, self._output_stride = depth, 3, output_stride
        self._out_channels = [3, 0, *self.backbone.out_channels]

    def forward(self, x: Tensor) -> list[Tensor]:
        """Return the list of maps for decoders of smp, for images (B, in_channels, H, W)."""
        empty = x.new_empty(x.shape[0], 0, (x.shape[2] + 1) // 2, (x.shape[3] + 1) // 2)
        return [x, empty, *self.backbone(x)]

    def set_in_channels(self, in_channels: int, pretrained: bool = True) -> None:
        """Replace the patch embedding for another number of image channels."""
        super().set_in_channels(in_channels, pretrained)
        self.backbone.in_channels = in_channels
        self.backbone._change_given(in_channels=in_channels)

    def make_dilated(self, output_stride: int) -> None:
        """Do nothing: the strides of the stages already give the map sizes that dilation would give."""


class _NoWeights(Mapping):
    """The table of pretrained weights of an encoder, which is empty: an error says how to load weights."""

    def __getitem__(self, name: Any) -> NoReturn:
        raise ValueError(
            f'smp has no weights {name!r} for a Swin: pass encoder_weights=None, then call '
            'load_checkpoint(model.encoder.backbone, FILE) of swin_dense. For the mean and standard deviation, import '
            "swin_dense.integrations.timm and name the encoder 'tu-swin_dense_t' and the like"
        )

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


for _network in BACKBONES:
    for _arch in ARCHS:
        encoders.encoders[f'{_network}_dense_{_arch}'] = {
            'encoder': SwinDenseEncoder,
            'pretrained_settings': _NoWeights(),
            'params': {'network': _network, 'arch': _arch},
        }

"""Swin encoders for segmentation_models_pytorch. Importing this module registers them.

    smp.Unet('swin_dense_t', encoder_weights='swin_tiny_patch4_window7_224.pth', classes=2)

``encoder_weights`` is None, or a path or an address as in :func:`swin_dense.load_checkpoint`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from swin_dense.checkpoint import load_checkpoint
from swin_dense.integrations import require
from swin_dense.models.archs import ARCHS
from swin_dense.models.create import BACKBONES

require('segmentation_models_pytorch', '0.6.0', 'segmentation_models_pytorch')
from segmentation_models_pytorch import encoders  # noqa: E402
from segmentation_models_pytorch.encoders._base import EncoderMixin  # noqa: E402

STRIDES = {32: (4, 2, 2, 2), 16: (4, 2, 2, 1), 8: (4, 2, 1, 1)}
# The normalisation of published Swins: ImageNet statistics of RGB values between 0 and 1.
PREPROCESSING = {
    'input_space': 'RGB',
    'input_range': [0, 1],
    'mean': [0.485, 0.456, 0.406],
    'std': [0.229, 0.224, 0.225],
}


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
        if output_stride not in STRIDES:
            raise ValueError(f'output_stride must be one of {list(STRIDES)}, got {output_stride!r}')
        self.backbone = BACKBONES[network](
            arch, out_indices=range(depth - 1), strides=STRIDES[output_stride], **options
        )
        self._depth, self._in_channels, self._output_stride = depth, 3, output_stride
        self._out_channels = [3, 0, *self.backbone.out_channels]

    def forward(self, x: Tensor) -> list[Tensor]:
        """Return the list of maps for decoders of smp, for images (B, in_channels, H, W)."""
        empty = x.new_empty(x.shape[0], 0, (x.shape[2] + 1) // 2, (x.shape[3] + 1) // 2)
        return [x, empty, *self.backbone(x)]

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load a state dict of this encoder, or the checkpoint given as ``encoder_weights``."""
        if FILE in state_dict:
            return load_checkpoint(self.backbone, state_dict[FILE])
        return super().load_state_dict(state_dict, *args, **kwargs)

    def set_in_channels(self, in_channels: int, pretrained: bool = True) -> None:
        """Replace the patch embedding for another number of image channels."""
        super().set_in_channels(in_channels, pretrained)
        self.backbone.in_channels = in_channels
        self.backbone._change_given(in_channels=in_channels)

    def make_dilated(self, output_stride: int) -> None:
        """Do nothing: the strides of the stages already give the map sizes that dilation would give."""


# smp looks up encoder_weights in a table of the encoder, downloads the file from the repository given there, reads it
# and passes it to load_state_dict. The classes and functions below make these steps accept any path or address.
FILE = 'swin_dense file'


class _LocalFile(str):
    """The path or address of a checkpoint that smp must not download."""


class _Files(Mapping):
    """A table of pretrained weights that contains every path. The repository of a file is the file itself."""

    def __getitem__(self, path: Any) -> dict[str, Any]:
        if path == 'imagenet':  # smp's default
            raise ValueError(
                "encoder_weights='imagenet': smp has no weights of a Swin; give a file, an address, or None. "
                "The encoder 'tu-swin_dense_t' uses timm's weights if you import swin_dense.integrations.timm first"
            )
        return {'repo_id': _LocalFile(path), 'revision': None}

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __deepcopy__(self, memo: dict[int, Any]) -> _Files:
        return self


def _download(repo_id: str, *args: Any, **kwargs: Any) -> str:
    return repo_id if isinstance(repo_id, _LocalFile) else _smp_download(repo_id, *args, **kwargs)


def _load_file(filename: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    return {FILE: str(filename)} if isinstance(filename, _LocalFile) else _smp_load_file(filename, *args, **kwargs)


def _preprocessing(encoder_name: str, pretrained: Any = 'imagenet') -> dict[str, Any]:
    """Return the preprocessing parameters of an encoder. They are the same for all pretrained Swins."""
    is_ours = encoders.encoders.get(encoder_name, {}).get('encoder') is SwinDenseEncoder
    return copy.deepcopy(PREPROCESSING) if is_ours else _smp_preprocessing(encoder_name, pretrained)


_smp_download, _smp_load_file = encoders.hf_hub_download, encoders.load_file
_smp_preprocessing = encoders.get_preprocessing_params
encoders.hf_hub_download, encoders.load_file = _download, _load_file
encoders.get_preprocessing_params = _preprocessing
for _network in BACKBONES:
    for _arch in ARCHS:
        encoders.encoders[f'{_network}_dense_{_arch}'] = {
            'encoder': SwinDenseEncoder,
            'pretrained_settings': _Files(),
            'params': {'network': _network, 'arch': _arch},
        }

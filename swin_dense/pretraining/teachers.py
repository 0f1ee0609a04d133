"""Frozen networks as teachers of :class:`swin_dense.FeatureDistillation`: what goes in, and what their maps cover."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swin_dense.features.images import Statistic, normalize
from swin_dense.features.normalization import preset
from swin_dense.models.swin import SwinBackbone
from swin_dense.ops.windows import Pair
from swin_dense.utils import checks
from swin_dense.utils.choices import IMAGENET_MEAN, IMAGENET_STD


class Teacher(nn.Module):
    """A frozen network as a teacher: it takes images in [0, 1] and returns maps.

    Args:
        network: is called with normalised images (B, C, H, W), and returns one map (B, C_i, rows, columns), or several.
        out_channels: channels of each map.
        out_strides: stride of each map, in pixels of the images that the network gets. A map must have
            ceil(H / stride) x ceil(W / stride) cells.
        mean: the mean that the network expects to be subtracted, one number or one per channel, on the scale 0 to 1;
            None, with ``std=None``, skips the normalisation.
        std: likewise the standard deviation.
        multiple: images are resized so that their sides become the nearest multiples of this number of pixels, such as
            the patch size of a ViT, because its map would leave out the rest.
        size: side or (height, width) in pixels to which all images are resized instead, for networks of one size.

    Raises:
        ValueError: an argument has a value that is not allowed.
        TypeError: an argument has the wrong type.

    Examples:
        >>> from torch import nn
        >>> network = nn.Conv2d(3, 8, kernel_size=16, stride=16)
        >>> teacher = Teacher(network, out_channels=[8], out_strides=[16], multiple=16)
        >>> [tuple(one.shape) for one in teacher(torch.rand(1, 3, 60, 96))]
        [(1, 8, 4, 6)]
    """

    def __init__(
        self,
        network: Callable[[Tensor], Any],
        out_channels: Sequence[int],
        out_strides: Sequence[int],
        *,
        mean: Statistic = IMAGENET_MEAN,
        std: Statistic = IMAGENET_STD,
        multiple: int = 1,
        size: int | Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.network = network
        self.out_channels = checks.integers('out_channels', out_channels)
        self.out_strides = checks.integers('out_strides', out_strides)
        if len(self.out_channels) != len(self.out_strides):
            raise ValueError(
                'out_channels and out_strides must have one entry for each map of the teacher, got '
                f'{list(self.out_channels)} and {list(self.out_strides)}'
            )
        self.mean, self.std = mean, std
        self.multiple = checks.integer('multiple', multiple)
        self.size = None if size is None else checks.pair('size', size)

    @property
    def in_channels(self) -> int | None:
        """Number of channels of the images, or None if the normalisation does not tell it."""
        return len(self.mean) if isinstance(self.mean, Sequence) else None

    def input_size(self, height: int, width: int) -> Pair:
        """Return (height, width) to which an image of this size is resized for the network."""
        if self.size is not None:
            return self.size
        return tuple(max(1, round(side / self.multiple)) * self.multiple for side in (height, width))  # type: ignore[return-value]

    def map_sizes(self, height: int, width: int) -> list[Pair]:
        """Return (rows, columns) of each map of an image of this size."""
        height, width = self.input_size(height, width)
        return [(-(-height // stride), -(-width // stride)) for stride in self.out_strides]

    def forward(self, images: Tensor) -> list[Tensor]:
        """Compute the maps of images, without gradients.

        Args:
            images: (B, C, H, W) in [0, 1], on the device of the network.

        Returns:
            One (B, C_i, rows, columns) for each map.

        Raises:
            ValueError: the network returns other maps than ``out_channels`` and ``out_strides`` say.
        """
        with torch.no_grad():
            size = self.input_size(images.shape[2], images.shape[3])
            if size != images.shape[2:]:
                images = F.interpolate(images, size, mode='bilinear', align_corners=False, antialias=True)
            own = next(self.parameters(), images)
            found = self.network(normalize(images, self.mean, self.std, any_range=True).to(own.dtype))
            maps = [found] if isinstance(found, Tensor) else list(found)
        check_maps(self, maps, (images.shape[2], images.shape[3]), len(images))
        return maps


def check_maps(teacher: Teacher, maps: Sequence[Tensor], image_size: Pair, batch: int) -> None:
    """Raise ValueError unless maps of images have the shapes that the teacher promises."""
    sizes = teacher.map_sizes(*image_size)
    expected = [(batch, channels, *size) for channels, size in zip(teacher.out_channels, sizes, strict=True)]
    shapes = [tuple(one.shape) for one in maps]
    if shapes != expected:
        raise ValueError(
            f'the teacher has out_channels={list(teacher.out_channels)} and out_strides={list(teacher.out_strides)}, '
            f'which gives the shapes {expected} for images of {image_size[0]} x {image_size[1]} pixels, but its maps '
            f'have {shapes}'
        )


def teacher_of(network: Any) -> Teacher:
    """Return the teacher for a network of a known class.

    These are the backbones of this package; DINOv2, DINOv3 and SAM's encoder of transformers; and ViTs and ConvNeXts of
    timm, also in transformers' wrapper. The statistics of the images are ImageNet's, or those that timm's network
    names. ViTs give their last map, with its norm, without class and register tokens. ConvNeXts give one map per stage.

    Raises:
        TypeError: the class of the network is not known.
    """
    if isinstance(network, Teacher):
        return network
    if isinstance(network, SwinBackbone):
        statistics = preset(network.input_preset or 'imagenet')
        if set(statistics) > {'mean', 'std'}:
            raise TypeError(
                f'the weights of this teacher expect images of the preset {network.input_preset!r}; wrap the backbone '
                'in a Teacher, with a function that prepares images in [0, 1]'
            )
        return Teacher(network, network.out_channels, network.out_strides, **statistics)
    for kind in type(network).__mro__:
        library = kind.__module__.partition('.')[0]
        if adapt := _ADAPTERS.get(f'{library}.{kind.__name__}'):
            return adapt(network)
    raise TypeError(
        f'a teacher of the class {type(network).__name__} is not known, only Swins of this package and '
        f'{", ".join(_ADAPTERS)}; wrap it: Teacher(network, out_channels=[...], out_strides=[...], mean=..., std=...)'
    )


class _Adapter(nn.Module):
    """Calls a function with a network and images; a module, so that the network moves with the teacher."""

    def __init__(self, network: nn.Module, call: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.network, self.call = network, call

    def forward(self, images: Tensor) -> Any:
        return self.call(self.network, images)


def _transformers_vit(network: Any) -> Teacher:
    """DINOv2 and DINOv3: the last tokens are those of the patches."""
    config = network.config
    patch = config.patch_size

    def call(network: Any, images: Tensor) -> Tensor:
        rows, columns = (side // patch for side in images.shape[2:])
        tokens = network(images).last_hidden_state[:, -rows * columns :]
        return tokens.transpose(1, 2).unflatten(2, (rows, columns))

    return Teacher(_Adapter(network, call), [config.hidden_size], [patch], multiple=patch)


def _transformers_convnext(network: Any) -> Teacher:
    """DINOv3's ConvNeXt: the maps of the stages."""

    def call(network: Any, images: Tensor) -> Any:
        return network(images, output_hidden_states=True).hidden_states[1:]

    channels = network.config.hidden_sizes
    strides = [4 * 2**stage for stage in range(len(channels))]
    return Teacher(_Adapter(network, call), channels, strides, multiple=strides[-1])


def _sam(network: Any) -> Teacher:
    """SAM's encoder, whose images have one size."""
    encoder = network.vision_encoder
    config = encoder.config

    def call(encoder: Any, images: Tensor) -> Tensor:
        return encoder(images).last_hidden_state

    return Teacher(_Adapter(encoder, call), [config.output_channels], [config.patch_size], size=config.image_size)


def _timm_vit(network: Any) -> Teacher:
    def call(network: Any, images: Tensor) -> Any:
        return network.forward_intermediates(images, indices=1, norm=True, intermediates_only=True)

    embed = network.patch_embed
    patch = checks.pair('patch_size', embed.patch_size)
    if patch[0] != patch[1]:
        raise ValueError(f'a teacher must have square patches, got {patch}')
    size = embed.img_size if embed.strict_img_size else None
    options = _timm_statistics(network)
    return Teacher(_Adapter(network, call), [network.embed_dim], patch[:1], multiple=patch[0], size=size, **options)


def _timm_convnext(network: Any) -> Teacher:
    def call(network: Any, images: Tensor) -> Any:
        return network.forward_intermediates(images, intermediates_only=True)

    facts = network.feature_info
    strides = [fact['reduction'] for fact in facts]
    options = _timm_statistics(network)
    channels = [fact['num_chs'] for fact in facts]
    return Teacher(_Adapter(network, call), channels, strides, multiple=strides[-1], **options)


def _timm_statistics(network: Any) -> dict[str, Any]:
    facts = getattr(network, 'pretrained_cfg', {})  # a network that timm's factory did not build has none
    return {name: facts[name] for name in ('mean', 'std') if name in facts}


# By the library that has the class, and the class.
_ADAPTERS: dict[str, Callable[[Any], Teacher]] = {
    'transformers.Dinov2Model': _transformers_vit,
    'transformers.Dinov2WithRegistersModel': _transformers_vit,
    'transformers.DINOv3ViTModel': _transformers_vit,
    'transformers.DINOv3ConvNextModel': _transformers_convnext,
    'transformers.SamVisionModel': _sam,
    'transformers.SamModel': _sam,
    'transformers.TimmWrapperModel': lambda network: teacher_of(network.timm_model),
    'timm.VisionTransformer': _timm_vit,
    'timm.Eva': _timm_vit,
    'timm.ConvNeXt': _timm_convnext,
}

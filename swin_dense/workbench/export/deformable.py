"""Parts of models with queries for graphs of any size, because mmdet's and mmcv's read sizes from tensors.

Sizes of maps are passed as a list of (height, width) in ``spatial_shapes``, where the frameworks pass a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Sizes = Sequence[tuple[int, int]]


def replace_parts(model: nn.Module) -> None:
    """Replace deformable attention, sine encodings and pixel decoders in a model of mmdet or mmseg, in place."""
    from mmcv.ops import MultiScaleDeformableAttention
    from mmdet.models import layers

    replacements: dict[type[nn.Module], Callable[[Any], nn.Module]] = {
        MultiScaleDeformableAttention: RecordedAttention,
        layers.SinePositionalEncoding: RecordedEncoding,
        layers.MSDeformAttnPixelDecoder: RecordedPixelDecoder,
        layers.TransformerEncoderPixelDecoder: RecordedTransformerPixelDecoder,
    }
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) in replacements:
                setattr(parent, name, replacements[type(child)](child))


class RecordedAttention(nn.Module):
    """``MultiScaleDeformableAttention`` of mmcv, level by level."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.attention = attention

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor,
        *,
        query_pos: Tensor,
        reference_points: Tensor,
        spatial_shapes: Sizes,
        key_pos: Tensor | None = None,
        attn_mask: None = None,
        key_padding_mask: None = None,
        level_start_index: None = None,
        valid_ratios: Tensor | None = None,
    ) -> Tensor:
        """Return the output of the attention plus ``query``, (B, Q, C), as in mmcv for images without padding.

        ``value`` are the tokens of all levels, (B, N, C), ``query_pos`` is (B or 1, Q, C), and ``reference_points`` are
        centres (B, Q, levels, 2) or boxes (B, Q, levels, 4) from 0 to 1. Keys, and what has the type None, are ignored.
        """
        own = self.attention
        heads = own.num_heads
        levels = own.num_levels
        points = own.num_points
        own_query = query + query_pos
        values = own.value_proj(value).unflatten(2, (heads, -1))
        values = heads_first(values)
        offsets = own.sampling_offsets(own_query)
        offsets = heads_first(offsets.unflatten(2, (heads, levels, points, 2)))
        weights = own.attention_weights(own_query)
        weights = weights.unflatten(2, (heads, -1)).softmax(-1)
        weights = heads_first(weights).unflatten(2, (levels, points))
        references = reference_points[:, :, None]
        references = references.expand(query.shape[0], -1, heads, -1, -1)
        references = heads_first(references)[:, :, :, None]
        out: Any = 0
        start = 0
        for level, (height, width) in enumerate(spatial_shapes):
            offset = offsets[:, :, level]
            centre = references[:, :, level, :, :2]
            if references.shape[-1] == 2:
                x = offset[..., 0] / width
                y = offset[..., 1] / height
                place = centre + torch.stack([x, y], -1)
            else:
                sides = references[:, :, level, :, 2:]
                place = centre + offset / points * sides * 0.5
            size = (height, width)
            out = out + by_grid_sample(values, start, size, place, weights[:, :, level])
            start = start + height * width
        out = out.unflatten(0, (-1, heads)).transpose(1, 2)
        out = contiguous(out).flatten(2)
        return own.output_proj(out) + query


def by_grid_sample(values: Tensor, start: int, size: tuple[int, int], place: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of bilinear samples of a map, with zeros outside of it, (B, Q, C).

    The map of ``size`` (height, width) begins at ``start`` among the tokens of all maps, (B, N, C). The samples have
    places x and y from 0 to 1, (B, Q, points, 2), and weights (B, Q, points).
    """
    count = size[0] * size[1]
    tokens = values[:, start : start + count]
    level_map = tokens.transpose(1, 2).unflatten(2, size)
    found = F.grid_sample(level_map, 2 * place - 1, align_corners=False)  # (B, C, Q, points)
    weighted = found * weights[:, None]
    return weighted.sum(-1).transpose(1, 2)


class RecordedEncoding(nn.Module):
    """``SinePositionalEncoding`` of mmdet for images without padding."""

    def __init__(self, encoding: Any) -> None:
        super().__init__()
        self.encoding = encoding

    def forward(self, mask: Tensor | None, input: Tensor | None = None) -> Tensor:
        """Return the encoding (B, C, H, W) of a map (B, C, H, W), or of a mask (B, H, W) without padding."""
        if mask is not None:
            input = mask[:, None]
        return contiguous(self.encoding(None, input=input))


class RecordedPixelDecoder(nn.Module):
    """``MSDeformAttnPixelDecoder`` of mmdet, for Mask2Former."""

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        replace_parts(decoder)
        self.decoder = decoder

    def forward(self, feats: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Return the map for masks (B, C, H, W) and the maps for the transformer, coarsest first."""
        own = self.decoder
        coarsest_first = list(feats)[::-1]
        coarse = coarsest_first[: own.num_encoder_levels]
        maps = [conv(x) for conv, x in zip(own.input_convs, coarse, strict=True)]
        sizes = [(x.shape[2], x.shape[3]) for x in maps]
        levels = own.level_encoding.weight
        memory = own.encoder(
            query=torch.cat([as_tokens(x) for x in maps], 1),
            query_pos=encoded_levels(own.postional_encoding, maps, levels),
            key_padding_mask=None,
            spatial_shapes=sizes,
            level_start_index=None,
            valid_ratios=None,
            reference_points=reference_points(sizes),
        )
        outs = []
        start = 0
        for size in sizes:
            count = size[0] * size[1]
            outs.append(as_map(memory[:, start : start + count], size))
            start = start + count
        for index in reversed(range(len(own.lateral_convs))):
            x = own.lateral_convs[index](feats[index])
            coarser = F.interpolate(outs[-1], x.shape[2:], mode='bilinear', align_corners=False)
            outs.append(own.output_convs[index](x + coarser))
        return own.mask_feature(outs[-1]), outs[: own.num_outs]


class RecordedTransformerPixelDecoder(nn.Module):
    """``TransformerEncoderPixelDecoder`` of mmdet, for MaskFormer and images without padding."""

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        replace_parts(decoder)
        decoder.last_feat_conv = decoder.encoder_out_proj  # where the base class expects it
        self.decoder = decoder

    def forward(self, feats: Sequence[Tensor], batch_img_metas: None) -> tuple[Tensor, Tensor]:
        """Return the map for masks (B, C, H, W) and the last map after the encoder."""
        from mmdet.models.layers import PixelDecoder

        own = self.decoder
        x = own.encoder_in_proj(feats[-1])
        place = as_tokens(own.positional_encoding(None, input=x))
        memory = own.encoder(query=as_tokens(x), query_pos=place, key_padding_mask=None)
        memory = as_map(memory, x.shape[2:])
        return PixelDecoder.forward(own, [*feats[:-1], memory], batch_img_metas)


def reference_points(spatial_shapes: Sizes, valid_ratios: Any = None, device: Any = None) -> Tensor:
    """Return the centres of all pixels for each level, (1, N, levels, 2), as mmdet does for images without padding."""
    points = torch.cat([centres(height, width) for height, width in spatial_shapes])
    points = points[None, :, None]
    return points.expand(-1, -1, len(spatial_shapes), -1)


def centres(height: int, width: int) -> Tensor:
    """Return the centres of pixels as x, y from 0 to 1, (height * width, 2)."""
    x = (torch.arange(width) + 0.5) / width
    y = (torch.arange(height) + 0.5) / height
    x = x.expand(height, width)
    y = y[:, None].expand(height, width)
    return torch.stack([x, y], 2).flatten(0, 1)


def encoded_levels(encoding: nn.Module, maps: Sequence[Tensor], levels: Tensor) -> Tensor:
    """Return the positions of the tokens of all maps plus the encoding of their level, (B, N, C)."""
    places = []
    for x, level in zip(maps, levels, strict=True):
        place = as_tokens(encoding(None, input=x))
        places.append(place + level)
    return torch.cat(places, 1)


def as_tokens(x: Tensor) -> Tensor:
    """Reshape a map (B, C, H, W) to (B, H * W, C)."""
    return contiguous(x).flatten(2).transpose(1, 2)


def as_map(tokens: Tensor, size: Sequence[int]) -> Tensor:
    """Reshape tokens (B, H * W, C) to a map (B, C, H, W)."""
    return contiguous(tokens.transpose(1, 2)).unflatten(2, tuple(size))


def heads_first(x: Tensor) -> Tensor:
    """Move the heads of (B, N, heads, ...) to the batch, (B * heads, N, ...)."""
    return contiguous(x.transpose(1, 2)).flatten(0, 1)


def contiguous(x: Tensor) -> Tensor:
    """Copy a tensor to the order of its shape. ``x.contiguous()`` may return a view, whose strides fix sizes to > 1."""
    return x.clone(memory_format=torch.contiguous_format)

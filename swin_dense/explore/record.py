"""Compute the data that the page shows for a backbone and an image, with the package's own functions."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from swin_dense.archs.arch import published_letter
from swin_dense.explore.colours import pca_rgb
from swin_dense.explore.receptive_field import ReceptiveField, token_receptive_fields
from swin_dense.features.extraction import Extraction, evaluation_mode
from swin_dense.images.normalization import Normalization
from swin_dense.images.reading import scale
from swin_dense.models.attention import ShiftedWindowAttention
from swin_dense.models.swin import SwinBackbone
from swin_dense.ops.windows import Size, window_grid

# The worked example of the paper: a map of 112 x 112 tokens, windows of 7 x 7 and 128 channels.
PAPER_EXAMPLE = {'side': 112, 'window': 7, 'channels': 128}


@dataclass(frozen=True)
class Attention:
    """The inputs from which the attention weights of one block are computed; pairs are (height, width) in tokens."""

    q: Tensor  # (H, W, A, D), queries, scaled
    k: Tensor  # (H, W, A, D), keys
    pad_k: Tensor  # (A, D), the key of a padding token
    bias: Tensor  # (A, 2 * window height - 1, 2 * window width - 1), by query position minus key position, ascending
    window: Size
    shift: Size


@dataclass(frozen=True)
class Stage:
    """One stage: ``stride`` in pixels per token, ``size`` (height, width) in tokens, and its blocks."""

    stride: int
    size: Size
    channels: int
    blocks: list[Attention]
    receptive_fields: list[ReceptiveField]


@dataclass(frozen=True)
class PageData:
    """All data of the page."""

    model: str  # display name of the backbone
    pixels: np.ndarray  # (H, W, 3) uint8, the input image
    stages: list[Stage]
    levels: dict[int, np.ndarray]  # by stride, (rows, columns, 3) uint8: the principal components as colours
    costs: list[dict[str, Any]]  # of the paper's example, then of every stage, see :func:`_series`


def make_record(
    backbone: SwinBackbone,
    image: Any,
    max_side: int | None = None,
    normalization: Normalization | str | None = None,
) -> PageData:
    """Run a backbone on an image, any source of :func:`read_image`, and record the data of the page.

    An image whose longer side has more than ``max_side`` pixels is downscaled. Raises ValueError if a part of the
    backbone is compiled, so that the inputs of its parts cannot be recorded.
    """
    extraction = Extraction(backbone, normalization, page=0, max_side=max_side)
    pixels = extraction.read(image)
    img = extraction.input_for(pixels[None])
    inputs: dict[Any, Tensor] = {}

    def keep(module: Any, args: tuple[Tensor]) -> None:
        inputs[module] = args[0]

    built: Any = backbone.stages  # of SwinStage; a ModuleList has no type of its entries
    stages = []
    with evaluation_mode(backbone), torch.no_grad(), contextlib.ExitStack() as hooks:
        for stage in built:
            for block in stage.blocks:
                hooks.enter_context(block.attn.register_forward_pre_hook(keep))
        maps = dict(zip(backbone.out_strides, backbone(img), strict=True))
        if len(inputs) < sum(len(stage.blocks) for stage in built):
            raise ValueError('the backbone is compiled, and compiled code skips hooks; build one without torch.compile')
        for index, fields in enumerate(token_receptive_fields(backbone, (img.shape[2], img.shape[3]))):
            blocks = [_attention(block.attn, inputs[block.attn]) for block in built[index].blocks]
            height, width, heads, channels = blocks[0].q.shape
            stride = math.prod(backbone.strides[: index + 1])
            stages.append(Stage(stride, (height, width), heads * channels, blocks, fields))
    levels = {stride: _as_bytes(pca_rgb(level[0])) for stride, level in maps.items()}
    return PageData(_name(backbone), _picture(pixels, extraction.how), stages, levels, _costs(stages))


def msa_flops(height: int, width: int, channels: int) -> int:
    """Return the FLOPs of global self-attention on a map: 4 h w C^2 + 2 (h w)^2 C."""
    tokens = height * width
    return 4 * tokens * channels**2 + 2 * tokens**2 * channels


def window_msa_flops(height: int, width: int, channels: int, window: Size) -> int:
    """Return the FLOPs of window attention on a map of whole windows: 4 h w C^2 + 2 M^2 h w C."""
    tokens = height * width
    return 4 * tokens * channels**2 + 2 * window[0] * window[1] * tokens * channels


def _picture(pixels: Tensor, normalization: Normalization) -> np.ndarray:
    """Return an image as it is stored as colours, (H, W, 3): its first three channels, or its first."""
    shown = scale(pixels.cpu(), normalization.scale)
    shown = shown[:3] if len(shown) >= 3 else shown[:1].expand(3, -1, -1)
    return _as_bytes(shown.permute(1, 2, 0).numpy())


def _attention(attn: ShiftedWindowAttention, x: Tensor) -> Attention:
    channels, w_msa = x.shape[3], attn.w_msa
    window, shift = attn.windows_on(x.shape[1], x.shape[2])
    bias = w_msa.relative_bias(window)
    per_head = (w_msa.num_heads, channels // w_msa.num_heads)
    q, k, _ = w_msa.project(x)[0].float().cpu().chunk(3, -1)
    pad_k = w_msa.project(x.new_zeros(channels))[channels : 2 * channels].float().cpu()
    by_offset = torch.zeros(w_msa.num_heads, 2 * window[0] - 1, 2 * window[1] - 1)
    if bias is not None:
        rows, columns = (torch.arange(1 - side, side) for side in window)
        first, second = (
            (sign * rows).clamp(min=0)[:, None] * window[1] + (sign * columns).clamp(min=0) for sign in (1, -1)
        )
        by_offset = bias[:, first, second].float().cpu()
    return Attention(
        (q * w_msa.scale).unflatten(-1, per_head),
        k.unflatten(-1, per_head),
        pad_k.view(per_head),
        by_offset,
        window,
        shift,
    )


def _name(backbone: SwinBackbone) -> str:
    family = 'Swin V2' if backbone.network == 'swinv2' else 'Swin'
    letter = published_letter(vars(backbone.arch))
    if letter is not None:
        return f'{family}-{letter.upper()}'
    return f'{family} ({backbone.arch.embed_dims} channels; {", ".join(map(str, backbone.arch.depths))} blocks)'


def _as_bytes(colours: np.ndarray) -> np.ndarray:
    return (colours.clip(0, 1) * 255).round().astype(np.uint8)


def _costs(stages: list[Stage]) -> list[dict[str, Any]]:
    window, channels = (PAPER_EXAMPLE['window'],) * 2, PAPER_EXAMPLE['channels']
    sides = range(window[0], 2 * PAPER_EXAMPLE['side'] + 1, window[0])
    series = [
        _series('paper', window, channels, [(side, side) for side in sides], sides.index(PAPER_EXAMPLE['side'])),
    ]
    for index, stage in enumerate(stages):
        window = stage.blocks[0].window
        maps = []
        for eighths in range(1, 33):
            height, width = (-(-side * eighths // 8) for side in stage.size)
            rows, columns = window_grid(height, width, window)
            maps.append((rows * window[0], columns * window[1]))
        series.append(_series(index, window, stage.channels, maps, 7))
    return series


def _series(name: str | int, window: Size, channels: int, maps: list[Size], start: int) -> dict[str, Any]:
    """Return the cost of maps of whole windows; ``start`` is the index of the map that the page shows first.

    ``sizes`` are (height, width, FLOPs of global attention, FLOPs of window attention).
    """
    sizes = [(*size, msa_flops(*size, channels), window_msa_flops(*size, channels, window)) for size in maps]
    return {'name': name, 'window': window, 'channels': channels, 'sizes': sizes, 'start': start}

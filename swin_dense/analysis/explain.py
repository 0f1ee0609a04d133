"""What the backbone looks at: attention of one token, and Grad-CAM of any stage."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from swin_dense.features.inference import Inference, evaluation_mode
from swin_dense.ops import window_attention
from swin_dense.ops.windows import WindowSpec
from swin_dense.utils import checks

Score = Callable[[Mapping[int, Tensor]], Tensor]


@dataclass(frozen=True)
class TokenAttention:
    """Where one token of one block looks.

    Attributes:
        weights: (A, H, W), per head the share of every token of the stage's map; zero outside the token's window.
        padding: (A,), the share that goes to padding tokens, which also are attended to.
        cell: (row, column) of the token.
        stride: pixels per token.
        image_size: (height, width) in pixels.
    """

    weights: Tensor
    padding: Tensor
    cell: tuple[int, int]
    stride: int
    image_size: tuple[int, int]


def token_attention(
    backbone: Any, image: Any, stage: int, block: int, pixel: tuple[int, int], bgr: bool = False
) -> TokenAttention:
    """Compute the attention weights of the token at a pixel.

    Args:
        backbone: a :class:`swin_dense.SwinBackbone`.
        image: in any form that :func:`swin_dense.features.images.read_image` takes.
        stage: from 0.
        block: of the stage, from 0; odd ones have shifted windows.
        pixel: (row, column) in the image.
        bgr: an array or tensor holds blue first.

    Raises:
        ValueError: there is no such stage, block or pixel.
    """
    _check_index('stage', stage, len(backbone.stages))
    _check_index('block', block, len(backbone.stages[stage].blocks))
    img = _prepare(backbone, image, bgr)
    _check_index('pixel row', pixel[0], img.shape[2])
    _check_index('pixel column', pixel[1], img.shape[3])
    attn = backbone.stages[stage].blocks[block].attn
    with evaluation_mode(backbone), torch.no_grad(), recording_input(attn) as recorded:
        backbone(img)
    stride = math.prod(backbone.strides[: stage + 1])
    cell = (pixel[0] // stride, pixel[1] // stride)
    weights = _attention_weights(attn, recorded[0], cell)
    return TokenAttention(weights, 1 - weights.sum((1, 2)), cell, stride, (img.shape[2], img.shape[3]))


def _attention_weights(attn: Any, x: Tensor, cell: tuple[int, int]) -> Tensor:
    """Return the weights (A, H, W) with which a token's output sums the values of all tokens.

    The output is linear in the values, and its derivative with respect to them is the weights: so they come out of
    the operation itself, in raster order and right under shift, padding and mask.
    """
    channels, windows, w_msa = x.shape[-1], attn.windows_of(x), attn.w_msa
    head_dim = channels // w_msa.num_heads
    spec = WindowSpec(w_msa.num_heads, windows.window, windows.shift, w_msa.scale)
    qkv = w_msa.project(x).detach()
    values = qkv[..., 2 * channels :].requires_grad_()
    bias, pad_kv = windows.bias, w_msa.pad_kv(x)
    with torch.enable_grad():
        out = window_attention(torch.cat([qkv[..., : 2 * channels], values], -1), bias, pad_kv, spec, 'reference')
        # Heads do not mix, so the first channel of every head can be asked at once.
        (gradient,) = torch.autograd.grad(out[0, cell[0], cell[1], ::head_dim].sum(), values)
    return gradient[0, :, :, ::head_dim].permute(2, 0, 1)


def grad_cam(backbone: Any, image: Any, stage: int, target: Score | None = None, bgr: bool = False) -> Tensor:
    """Compute which cells of a stage raise a number that is made of the pyramid.

    Source: Selvaraju et al., Grad-CAM: Visual Explanations from Deep Networks via Gradient-based Localization,
    ICCV 2017.

    Args:
        backbone: a :class:`swin_dense.SwinBackbone`.
        image: in any form that :func:`swin_dense.features.images.read_image` takes.
        stage: from 0; its output is weighed by the gradient.
        target: from {stride: (1, C, H, W)} to one number, such as a class score of a head on top. None is
            :func:`strongest_channel`.
        bgr: an array or tensor holds blue first.

    Returns:
        (H, W) of the stage's map, not negative; not scaled.

    Raises:
        ValueError: there is no such stage, or the target does not depend on it.
    """
    _check_index('stage', stage, len(backbone.stages))
    img = _prepare(backbone, image, bgr).requires_grad_()  # frozen parameters would otherwise leave no graph
    with evaluation_mode(backbone), torch.enable_grad(), _recording_output(backbone.stages[stage]) as recorded:
        maps = dict(zip(backbone.out_strides, backbone(img), strict=True))
        score = (target or strongest_channel)(maps)
        if not isinstance(score, Tensor) or score.numel() != 1:
            raise ValueError(f'target must return one number as a tensor, got {score!r}')
        # A score without a graph depends on nothing.
        (gradient,) = torch.autograd.grad(score, recorded[0], allow_unused=True) if score.requires_grad else (None,)
    if gradient is None:
        raise ValueError(
            f'the target does not depend on stage {stage}; choose an earlier stage, '
            'and make the target of the maps without detach() or no_grad()'
        )
    weights = gradient.mean((1, 2), keepdim=True)
    return (recorded[0].detach() * weights).sum(-1)[0].clamp(min=0)


def strongest_channel(maps: Mapping[int, Tensor]) -> Tensor:
    """Return the mean of that channel of the coarsest map whose mean is the largest."""
    return maps[max(maps)].mean((2, 3)).max()


def _prepare(backbone: Any, image: Any, bgr: bool) -> Tensor:
    parameter = next(backbone.parameters())
    inference = Inference(bgr=bgr)
    img = inference.prepare(inference.read(image, backbone.in_channels))
    return img[None].to(parameter.device, parameter.dtype)


@contextmanager
def recording_input(module: nn.Module) -> Iterator[list[Tensor]]:
    """Collect what the module is given in the block."""
    recorded: list[Tensor] = []
    handle = module.register_forward_pre_hook(lambda module, args: recorded.append(args[0]))
    try:
        yield recorded
    finally:
        handle.remove()


@contextmanager
def _recording_output(module: nn.Module) -> Iterator[list[Tensor]]:
    recorded: list[Tensor] = []
    handle = module.register_forward_hook(lambda module, args, output: recorded.append(output))
    try:
        yield recorded
    finally:
        handle.remove()


def _check_index(name: str, value: int, length: int) -> None:
    if checks.integer(name, value, minimum=0) >= length:
        raise ValueError(f'{name} must lie between 0 and {length - 1}, got {value}')

"""Explanations of a backbone's output: the attention weights of one token, and Grad-CAM of any stage."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from swin_dense.features.inference import evaluation_mode
from swin_dense.features.normalization import IMAGENET, Inference, Normalization
from swin_dense.ops import plain
from swin_dense.ops.windows import window_grid
from swin_dense.utils import checks

Score = Callable[[Mapping[int, Tensor]], Tensor]


@dataclass(frozen=True)
class TokenAttention:
    """The attention weights of one query token in one block."""

    weights: Tensor  # (A, H, W), of every key token of the stage's map per head; zero outside the token's window
    padding: Tensor  # (A,), the total weight of padding tokens, which also take part in attention
    cell: tuple[int, int]  # (row, column) of the query token
    stride: int  # pixels per token
    image_size: tuple[int, int]  # (height, width) in pixels


def token_attention(
    backbone: Any,
    image: Any,
    stage: int,
    block: int,
    pixel: tuple[int, int],
    normalization: Normalization = IMAGENET,
) -> TokenAttention:
    """Compute the attention weights of the token at a pixel.

    Args:
        backbone: a :class:`swin_dense.SwinBackbone`.
        image: any source of :func:`swin_dense.features.images.read_image`.
        stage: index of the stage, from 0.
        block: index of the block in the stage, from 0; odd blocks have shifted windows.
        pixel: (row, column) in the image.
        normalization: how the stored values of the image become the backbone's input.
    """
    _check_index('stage', stage, len(backbone.stages))
    _check_index('block', block, len(backbone.stages[stage].blocks))
    img = _prepare(backbone, image, normalization)
    _check_index('pixel row', pixel[0], img.shape[2])
    _check_index('pixel column', pixel[1], img.shape[3])
    attn = backbone.stages[stage].blocks[block].attn
    recorded: list[Tensor] = []
    # With a hook on the dropout, attention computes the weights, (N, A, T, T), and passes them through it.
    hook = attn.w_msa.attn_drop.register_forward_pre_hook(lambda module, args: recorded.append(args[0]))
    with evaluation_mode(backbone), torch.no_grad(), hook:
        backbone(img)
    stride = math.prod(backbone.strides[: stage + 1])
    row, column = pixel[0] // stride, pixel[1] // stride
    size = window_grid(img.shape[2], img.shape[3], (stride, stride))
    numbers = torch.arange(1, 1 + size[0] * size[1], device=img.device).view(1, *size, 1)
    tokens_NT = plain.partition(numbers, *attn.windows_on(*size))[0, :, :, 0]  # 0 is padding
    window, token = (tokens_NT == numbers[0, row, column]).nonzero()[0].tolist()
    weights_AT = recorded[0][window, :, token]
    of_tokens = weights_AT.new_zeros(len(weights_AT), 1 + size[0] * size[1]).index_add(1, tokens_NT[window], weights_AT)
    return TokenAttention(
        of_tokens[:, 1:].unflatten(1, size), of_tokens[:, 0], (row, column), stride, (img.shape[2], img.shape[3])
    )


def grad_cam(
    backbone: Any,
    image: Any,
    stage: int,
    target: Score | None = None,
    normalization: Normalization = IMAGENET,
) -> Tensor:
    """Compute Grad-CAM: the cells of a stage's output that increase a scalar function of the pyramid.

    Source: Selvaraju et al., Grad-CAM: Visual Explanations from Deep Networks via Gradient-based Localization,
    ICCV 2017.

    Args:
        backbone: a :class:`swin_dense.SwinBackbone`.
        image: any source of :func:`swin_dense.features.images.read_image`.
        stage: index of the stage, from 0, whose output is weighted by the gradient.
        target: function from {stride: (1, C, H, W)} to a scalar tensor, such as a class score of a head, that depends
            on the stage. None for the largest channel mean of the coarsest map.
        normalization: how the stored values of the image become the backbone's input.

    Returns:
        (H, W) of the stage's map, non-negative, not scaled.
    """
    _check_index('stage', stage, len(backbone.stages))
    # With a gradient, so that there is a graph even if all parameters are frozen.
    img = _prepare(backbone, image, normalization).requires_grad_()
    recorded: list[Tensor] = []
    hook = backbone.stages[stage].register_forward_hook(lambda module, args, output: recorded.append(output[0]))
    with evaluation_mode(backbone), torch.enable_grad(), hook:
        maps = dict(zip(backbone.out_strides, backbone(img), strict=True))
        score = maps[max(maps)].mean((2, 3)).max() if target is None else target(maps)
        if not isinstance(score, Tensor) or score.numel() != 1:
            raise ValueError(f'target must return one number as a tensor, got {score!r}')
        # `autograd.grad` raises for a score without a graph.
        (gradient,) = torch.autograd.grad(score, recorded[0], allow_unused=True) if score.requires_grad else (None,)
    if gradient is None:
        raise ValueError(
            f'the target does not depend on stage {stage}; choose an earlier stage, '
            'and compute the target from the maps without detach() or no_grad()'
        )
    weights = gradient.mean((1, 2), keepdim=True)
    return (recorded[0].detach() * weights).sum(-1)[0].clamp(min=0)


def _prepare(backbone: Any, image: Any, normalization: Normalization) -> Tensor:
    inference = Inference(**vars(normalization), page=0)
    return inference.input_for(backbone, inference.read(image, backbone.in_channels)[None])


def _check_index(name: str, value: int, length: int) -> None:
    if checks.integer(name, value, minimum=0) >= length:
        raise ValueError(f'{checks.argument(name)} must lie between 0 and {length - 1}, got {value}')

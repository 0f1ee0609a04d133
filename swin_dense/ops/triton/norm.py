"""LayerNorm in one Triton kernel per pass, which writes the dtype and layout that the next operation needs.

Under autocast torch computes LayerNorm in float32 and the next matrix product casts the result, which doubles the bytes
written and needs another launch. The kernel rounds the result before writing it, which gives the same numbers. It can
also read 2x2 neighbours in place (patch merging), or write maps instead of tokens (outputs of the backbone), which
saves further passes over the map. Only the input and the weight are saved for the backward pass.

The kernels are in :mod:`swin_dense.ops.triton.norm_kernels`. They are registered as two torch operators, which
``torch.compile`` treats as opaque.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from swin_dense.ops.triton import gpu
from swin_dense.utils import compat

with contextlib.suppress(Exception):  # :mod:`swin_dense.ops.triton.gpu` records the reason
    from swin_dense.ops.triton import norm_kernels as kernels

MAX_CHANNELS = 8192

_PROGRAMS_PER_MULTIPROCESSOR = 4


def unsupported_reason(x: Tensor, channels: int) -> str | None:
    """Return why these kernels cannot normalise ``x`` over ``channels`` channels, or None."""
    reason = gpu.unsupported_reason(x)
    if reason is not None:
        return reason
    if channels > MAX_CHANNELS:
        return f'there are {channels} channels, more than {MAX_CHANNELS}'
    return None


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Normalise over the last axis, in float32, and convert to ``dtype``.

    Args:
        x: (..., C), float32, float16 or bfloat16.
        weight: (C,), in any of these dtypes, independent of that of x.
        bias: (C,), like ``weight``.
        eps: constant added to the variance.
        dtype: dtype of the result.

    Returns:
        (..., C).
    """
    return _forward(x.reshape(1, 1, -1, x.shape[-1]), weight, bias, eps, dtype, 'tokens').view(x.shape)


def layer_norm_to_maps(x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Normalise x, (B, H, W, C), over the last axis into contiguous (B, C, H, W); otherwise as :func:`layer_norm`."""
    return _forward(x, weight, bias, eps, dtype, 'maps')


def merge_and_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Join 2x2 neighbours of x, (B, H, W, C), and normalise: (B, ceil(H / 2), ceil(W / 2), 4C).

    The last axis is ordered by channel and then by neighbour, row by row, as in ``nn.Unfold``, with zeros outside of
    the map. ``weight`` and ``bias`` are (4C,); otherwise as :func:`layer_norm`.
    """
    return _forward(x, weight, bias, eps, dtype, 'merged')


# Functions by the layout of their result.
LAYOUTS = {'tokens': layer_norm, 'merged': merge_and_layer_norm, 'maps': layer_norm_to_maps}


@compat.custom_op(
    'swin_dense::layer_norm',
    mutates_args=(),
    schema='(Tensor x, Tensor weight, Tensor bias, float eps, ScalarType dtype, str layout) -> Tensor',
)
def _forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype, layout: str) -> Tensor:
    out = _forward_fake(x, weight, bias, eps, dtype, layout)
    launch = _Launch(x, layout)
    launch(kernels.forward, launch.tiles, x.contiguous(), weight.contiguous(), bias.contiguous(), out, eps)
    return out


@_forward.register_fake
def _forward_fake(x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype, layout: str) -> Tensor:
    batch, height, width, channels = x.shape
    shape = {
        'tokens': (batch, height, width, channels),
        'merged': (batch, -(-height // 2), -(-width // 2), 4 * channels),
        'maps': (batch, channels, height, width),
    }[layout]
    normed = (4 if layout == 'merged' else 1) * channels
    if weight.shape != (normed,) or bias.shape != (normed,):  # otherwise a kernel would read out of bounds
        raise ValueError(
            f'weight and bias must have the shape ({normed},) for {channels} channels in the layout {layout!r}, '
            f'got {tuple(weight.shape)} and {tuple(bias.shape)}'
        )
    return x.new_empty(shape, dtype=dtype)


@compat.custom_op(
    'swin_dense::layer_norm_backward',
    mutates_args=(),
    schema='(Tensor grad, Tensor x, Tensor weight, float eps, str layout) -> (Tensor, Tensor)',
)
def _backward(grad: Tensor, x: Tensor, weight: Tensor, eps: float, layout: str) -> tuple[Tensor, Tensor]:
    """Return the gradient of x, and the gradients of weight and bias as (2, C)."""
    launch = _Launch(x, layout)
    grad_x, _ = _backward_fake(grad, x, weight, eps, layout)
    partials = x.new_empty(launch.programs, 2, len(weight), dtype=torch.float32)
    tensors = (grad.contiguous(), x.contiguous(), weight.contiguous(), grad_x, partials)
    launch(kernels.backward, launch.programs, *tensors, eps, programs=launch.programs)
    return grad_x, partials.sum(0).to(weight.dtype)


@_backward.register_fake
def _backward_fake(grad: Tensor, x: Tensor, weight: Tensor, eps: float, layout: str) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(2, *weight.shape)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, ctx.eps, _, ctx.layout = inputs
    ctx.save_for_backward(x, weight)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    grad_x, grad_parameters = _backward(grad, *ctx.saved_tensors, ctx.eps, ctx.layout)
    return grad_x, *grad_parameters.unbind(), None, None, None


_forward.register_autograd(_gradients, setup_context=_save_for_backward)


class _Launch:
    """The launch grid and the arguments of the kernels for one input.

    Attributes:
        tiles: number of programs of the forward kernel.
        programs: number of programs of the backward kernel.
    """

    def __init__(self, x: Tensor, layout: str) -> None:
        batch, in_height, in_width, channels = x.shape
        merges, to_maps = layout == 'merged', layout == 'maps'
        height, width = (-(-in_height // 2), -(-in_width // 2)) if merges else (in_height, in_width)
        channels *= 4 if merges else 1
        block = max(16, 1 << (channels - 1).bit_length())
        tuning = parameters(block, layout)
        self.tiles = -(-batch * height * width // tuning['ROWS'])
        self.programs = min(self.tiles, _PROGRAMS_PER_MULTIPROCESSOR * gpu.multiprocessors(x.device))
        self._arguments = {
            'rows': batch * height * width,
            'height': height,
            'width': width,
            'in_height': in_height,
            'in_width': in_width,
            'CHANNELS': channels,
            'BLOCK': block,
            'MERGES': merges,
            'TO_MAPS': to_maps,
            **tuning,
        }

    def __call__(self, kernel: Any, grid: int, *tensors_and_eps: Any, **arguments: int) -> None:
        if grid == 0:
            return
        with torch.cuda.device_of(tensors_and_eps[0]):
            kernel[(grid,)](*tensors_and_eps, **self._arguments, **arguments)


def parameters(block: int, layout: str) -> dict[str, int]:
    """Return the launch parameters of the kernels for rows of ``block`` elements: rows at a time, and warps."""
    # Several rows at a time keep threads busy if rows are short. In maps, tokens are adjacent in memory, so use several
    # rows always, as far as registers allow.
    rows = max(1, 2048 // block, min(8, 8192 // block) if layout == 'maps' else 1)
    return {'ROWS': rows, 'num_warps': 4 if rows * block <= 4096 else 8}

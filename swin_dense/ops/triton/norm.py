"""LayerNorm in one Triton kernel forward and one backward, straight into the dtype and the layout that come next.

Under autocast torch computes LayerNorm in float32, and the next matrix product casts the result: twice the bytes and
one more launch. Here the result is rounded on its way to memory, to the same numbers. Reading 2x2 neighbours in place
(patch merging) and writing maps in place of tokens (the backbone's outputs) are further passes over the map that the
same kernel saves. For the backward pass the input alone is kept.

The kernels are in :mod:`swin_dense.ops.triton.norm_kernels`. To torch they are two operators, opaque to
``torch.compile``.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from swin_dense.ops.triton import gpu
from swin_dense.utils import compat

with contextlib.suppress(Exception):  # the reason is known to :mod:`swin_dense.ops.triton.gpu`
    from swin_dense.ops.triton import norm_kernels as kernels

MAX_CHANNELS = 8192

_PROGRAMS_PER_MULTIPROCESSOR = 4


def unsupported_reason(x: Tensor, channels: int) -> str | None:
    """Return why these kernels cannot normalise ``x`` over so many channels, or None."""
    reason = gpu.unsupported_reason(x)
    if reason is not None:
        return reason
    if channels > MAX_CHANNELS:
        return f'there are {channels} channels, more than {MAX_CHANNELS}'
    return None


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Normalise over the last axis, in float32, into ``dtype``.

    Args:
        x: (..., C), float32 or low precision.
        weight: (C,), in any of these dtypes whatever that of x is.
        bias: (C,).
        eps: added to the variance.
        dtype: of the result.

    Returns:
        (..., C).
    """
    return _forward(x.reshape(1, 1, -1, x.shape[-1]), weight, bias, eps, dtype, 'tokens').view(x.shape)


def layer_norm_to_maps(x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Normalise x, (B, H, W, C), over the last axis into contiguous (B, C, H, W); otherwise as :func:`layer_norm`."""
    return _forward(x, weight, bias, eps, dtype, 'maps')


def merge_and_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Join 2x2 neighbours of x, (B, H, W, C), and normalise: (B, ceil(H / 2), ceil(W / 2), 4C).

    For each channel the neighbours lie side by side, row by row, as ``nn.Unfold`` has them. Where the map ends there
    are zeros. ``weight`` and ``bias`` are (4C,); otherwise as :func:`layer_norm`.
    """
    return _forward(x, weight, bias, eps, dtype, 'merged')


# By the name of the layout that they leave.
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
    if weight.shape != (normed,) or bias.shape != (normed,):  # a kernel would read beyond them
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
    """Return the gradient of x, and those of weight and bias as (2, C)."""
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
    """How the kernels are cut into programs for one input.

    Attributes:
        tiles: how many programs the forward kernel has.
        programs: how many the backward kernel has.
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
    """Return the launch parameters of the kernels for rows of ``block`` numbers: rows at a time, and warps."""
    # Several rows at a time keep threads busy where rows are short. In maps it is the tokens that lie side by side, so
    # there several are wanted always, as far as registers go.
    rows = max(1, 2048 // block, min(8, 8192 // block) if layout == 'maps' else 1)
    return {'ROWS': rows, 'num_warps': 4 if rows * block <= 4096 else 8}

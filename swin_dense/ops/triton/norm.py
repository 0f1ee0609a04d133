"""LayerNorm in one Triton kernel per pass, which writes the dtype that the next operation needs.

Under autocast torch computes LayerNorm in float32 and the next matrix product casts the result, which doubles the bytes
written and needs another launch. The kernel rounds the result before writing it, which gives the same numbers. Only the
input and the weight are saved for the backward pass.

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


def unsupported_reason(x: Tensor) -> str | None:
    """Return why these kernels cannot normalise ``x``, (..., C), or None."""
    reason = gpu.unsupported_reason(x)
    if reason is not None:
        return reason
    if x.shape[-1] > MAX_CHANNELS:
        return f'there are {x.shape[-1]} channels, more than {MAX_CHANNELS}'
    return None


@compat.custom_op(
    'swin_dense::layer_norm',
    mutates_args=(),
    schema='(Tensor x, Tensor weight, Tensor bias, float eps, ScalarType dtype) -> Tensor',
)
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

    Raises:
        ValueError: weight or bias has another shape.
    """
    out = _forward_fake(x, weight, bias, eps, dtype)
    launch = _Launch(x)
    launch(kernels.forward, launch.tiles, x.contiguous(), weight.contiguous(), bias.contiguous(), out, eps)
    return out


@layer_norm.register_fake
def _forward_fake(x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    channels = x.shape[-1]
    if weight.shape != (channels,) or bias.shape != (channels,):  # otherwise a kernel would read out of bounds
        raise ValueError(
            f'weight and bias must have the shape ({channels},), got {tuple(weight.shape)} and {tuple(bias.shape)}'
        )
    return x.new_empty(x.shape, dtype=dtype)


@compat.custom_op(
    'swin_dense::layer_norm_backward',
    mutates_args=(),
    schema='(Tensor grad, Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)',
)
def _backward(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the gradient of x, and the gradients of weight and bias as (2, C)."""
    launch = _Launch(x)
    grad_x, _ = _backward_fake(grad, x, weight, eps)
    partials = x.new_empty(launch.programs, 2, len(weight), dtype=torch.float32)
    tensors = (grad.contiguous(), x.contiguous(), weight.contiguous(), grad_x, partials)
    launch(kernels.backward, launch.programs, *tensors, eps, programs=launch.programs)
    return grad_x, partials.sum(0).to(weight.dtype)


@_backward.register_fake
def _backward_fake(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(2, *weight.shape)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, ctx.eps, _ = inputs
    ctx.save_for_backward(x, weight)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    grad_x, grad_parameters = _backward(grad, *ctx.saved_tensors, ctx.eps)
    return grad_x, *grad_parameters.unbind(), None, None


layer_norm.register_autograd(_gradients, setup_context=_save_for_backward)


class _Launch:
    """The launch grid and the arguments of the kernels for one input.

    Attributes:
        tiles: number of programs of the forward kernel.
        programs: number of programs of the backward kernel.
    """

    def __init__(self, x: Tensor) -> None:
        channels = x.shape[-1]
        rows = x.numel() // channels
        block = max(16, 1 << (channels - 1).bit_length())
        # Several rows at a time keep threads busy if rows are short.
        rows_at_once = max(1, 2048 // block)
        self.tiles = -(-rows // rows_at_once)
        self.programs = min(self.tiles, _PROGRAMS_PER_MULTIPROCESSOR * gpu.multiprocessors(x.device))
        self._arguments = {
            'rows': rows,
            'CHANNELS': channels,
            'BLOCK': block,
            'ROWS': rows_at_once,
            'num_warps': 4 if rows_at_once * block <= 4096 else 8,
        }

    def __call__(self, kernel: Any, grid: int, *tensors_and_eps: Any, **arguments: int) -> None:
        if grid == 0:
            return
        with torch.cuda.device_of(tensors_and_eps[0]):
            kernel[(grid,)](*tensors_and_eps, **self._arguments, **arguments)

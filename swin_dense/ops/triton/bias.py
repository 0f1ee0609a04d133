"""Expand a relative position bias table with one kernel launch in the forward and one in the backward pass.

torch expands the table with a sliding view, a flip and a copy, and needs as many launches for the gradient. The kernels
compute the index of a pair of tokens in the table. In the backward pass, each element of the table's gradient is the
sum over its pairs in a fixed order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from swin_dense.ops.windows import bias_table_error
from swin_dense.utils import compat

with contextlib.suppress(Exception):  # :mod:`swin_dense.ops.triton.gpu` records the reason
    from swin_dense.ops.triton import bias_kernels as kernels


_BLOCK = 128  # elements of the result per program


def relative_position_bias(table: Tensor, window: tuple[int, int]) -> Tensor:
    """Expand a bias table as :func:`swin_dense.ops.windows.relative_position_bias` does.

    Raises:
        ValueError: the shape of the table does not match the window.
    """
    if table.ndim != 2 or table.shape[0] != (2 * window[0] - 1) * (2 * window[1] - 1):
        raise bias_table_error(table, window)  # a kernel would read out of bounds
    return _forward(table, window)


@compat.custom_op(
    'swin_dense::relative_position_bias', mutates_args=(), schema='(Tensor table, int[] window) -> Tensor'
)
def _forward(table: Tensor, window: Sequence[int]) -> Tensor:
    bias = _forward_fake(table, window)
    _launch(kernels.forward, table, bias, len(bias), window)
    return bias


@_forward.register_fake
def _forward_fake(table: Tensor, window: Sequence[int]) -> Tensor:
    tokens = window[0] * window[1]
    return table.new_empty(table.shape[1], tokens, tokens)


@compat.custom_op(
    'swin_dense::relative_position_bias_backward', mutates_args=(), schema='(Tensor grad, int[] window) -> Tensor'
)
def _backward(grad: Tensor, window: Sequence[int]) -> Tensor:
    grad_table = _backward_fake(grad, window)
    _launch(kernels.backward, grad, grad_table, len(grad), window)
    return grad_table


@_backward.register_fake
def _backward_fake(grad: Tensor, window: Sequence[int]) -> Tensor:
    return grad.new_empty((2 * window[0] - 1) * (2 * window[1] - 1), len(grad))


def _launch(kernel: Any, source: Tensor, out: Tensor, heads: int, window: Sequence[int]) -> None:
    grid = (-(-out.numel() // _BLOCK),)
    with torch.cuda.device_of(source):
        kernel[grid](source.contiguous(), out, out.numel(), heads, HEIGHT=window[0], WIDTH=window[1], BLOCK=_BLOCK)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.window = inputs[1]


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return _backward(grad, ctx.window), None


_forward.register_autograd(_gradients, setup_context=_save_for_backward)

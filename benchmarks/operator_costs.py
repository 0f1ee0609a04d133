"""The cost on a GPU of one call of each custom operator of this package.

A torch dispatch mode sees one call per operator, regardless of the number of kernels that it launches.
``tests/ops/test_costs.py`` compares these numbers with the actual launches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from swin_dense.ops.triton import attention, bias, norm


class OperatorCost(NamedTuple):
    """The cost of one call.

    Attributes:
        launches: number of kernel launches.
        bytes: bytes read and written, including temporaries.
        flops: FLOPs of the matrix products, two per multiply-add.
    """

    launches: int
    bytes: int
    flops: int = 0


def _attention(qkv: Tensor, relative_bias: Tensor, pad_kv: Tensor, num_heads: int, *geometry: Any) -> OperatorCost:
    launch = attention._Launch.of(qkv, num_heads, *geometry)
    outputs = attention._forward_fake(qkv, relative_bias, pad_kv, num_heads, *geometry)
    copies = [*_strided(qkv, pad_kv), *_gathered(launch, relative_bias)]
    moved = _bytes(qkv, relative_bias, pad_kv, *outputs) + 2 * _bytes(*copies)
    return OperatorCost(1 + len(copies), moved, _flops(qkv, relative_bias, products=2))


def _attention_backward(
    grad: Tensor,
    qkv: Tensor,
    relative_bias: Tensor,
    pad_kv: Tensor,
    out: Tensor,
    lse: Tensor,
    num_heads: int,
    *geometry: Any,
) -> OperatorCost:
    launch = attention._Launch.of(qkv, num_heads, *geometry)
    _, grads = attention._backward_fake(grad, qkv, relative_bias, pad_kv, out, lse, num_heads, *geometry)
    copies = [*_strided(grad, qkv, pad_kv), *_gathered(launch, relative_bias)]
    partials = launch.strips * grads.nbytes
    read = _bytes(grad, qkv, relative_bias, pad_kv, lse)
    # Partial sums are written, then read by the launch that reduces them.
    moved = read + qkv.nbytes + 2 * partials + grads.nbytes + 2 * _bytes(*copies)
    if launch.tiles == 1:
        return OperatorCost(2 + len(copies), moved, _flops(qkv, relative_bias, products=5))
    # The partial sums are zeroed first, and a separate kernel computes the gradients of queries and writes delta.
    moved += partials + read + _bytes(out, lse, lse)
    return OperatorCost(4 + len(copies), moved, _flops(qkv, relative_bias, products=7))


def _gathered(launch: attention._Launch, relative_bias: Tensor) -> list[Tensor]:
    return [] if launch.tiles == 1 else _strided(relative_bias)


def _flops(qkv: Tensor, relative_bias: Tensor, products: int) -> int:
    return 2 * products * (qkv.numel() // 3) * relative_bias.shape[-1]


def _norm(x: Tensor, weight: Tensor, offset: Tensor, eps: float, dtype: torch.dtype) -> OperatorCost:
    copies = _strided(x, weight, offset)
    out = norm._forward_fake(x, weight, offset, eps, dtype)
    return OperatorCost(1 + len(copies), _bytes(x, weight, offset, out, *copies, *copies))


def _norm_backward(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> OperatorCost:
    copies = _strided(grad, x, weight)
    sums = 4 * 2 * weight.numel()
    moved = _bytes(grad, x, x, weight, *copies, *copies) + (2 * norm._Launch(x).programs + 1) * sums
    if weight.dtype == torch.float32:
        return OperatorCost(2 + len(copies), moved)
    return OperatorCost(3 + len(copies), moved + sums + _bytes(weight, weight))  # another launch casts the sums


def _bias(source: Tensor, out: Tensor) -> OperatorCost:
    copies = _strided(source)
    return OperatorCost(1 + len(copies), _bytes(source, out, *copies, *copies))


def _strided(*tensors: Tensor) -> list[Tensor]:
    """Return the tensors that an operator must make contiguous before it launches a kernel."""
    return [x for x in tensors if not x.is_contiguous()]


def _bytes(*tensors: Tensor) -> int:
    return sum(x.nbytes for x in tensors)


# Maps qualified operator names to functions of the operator's arguments.
COSTS: dict[str, Callable[..., OperatorCost]] = {
    'swin_dense::triton_window_attention': _attention,
    'swin_dense::triton_window_attention_backward': _attention_backward,
    'swin_dense::layer_norm': _norm,
    'swin_dense::layer_norm_backward': _norm_backward,
    'swin_dense::relative_position_bias': lambda table, window: _bias(table, bias._forward_fake(table, window)),
    'swin_dense::relative_position_bias_backward': lambda grad, window: _bias(grad, bias._backward_fake(grad, window)),
}

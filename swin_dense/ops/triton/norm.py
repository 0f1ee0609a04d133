"""LayerNorm over the last axis in Triton for CUDA: one kernel forward; one, and a sum of partial sums, backward.

Each reads and writes a map once, in float32 inside, and writes the precision that the next layer reads. torch's takes
up to ten times as long, and under autocast casts before and after it. Sums have a fixed order, so the results are
deterministic.
"""

from __future__ import annotations

import contextlib
import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from swin_dense.ops.triton import gpu
from swin_dense.ops.triton.launch import Launch

with contextlib.suppress(Exception):  # :mod:`swin_dense.ops.triton.gpu` records the reason
    from swin_dense.ops.triton import norm_kernels as kernels

MAX_CHANNELS = 4096

# Numbers in a tile: as many as fit into registers; the backward pass holds twice as many tiles.
_TILE = 4096
# Few enough that their partial sums stay small.
_PROGRAMS_PER_MULTIPROCESSOR = 4


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Normalise x, (..., C), and return it in ``dtype``."""
    run = _Norm.apply if torch.is_grad_enabled() else forward
    return run(x, weight, bias, eps, dtype)


def forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Do the same without autograd."""
    x, weight, bias = gpu.aligned(x.contiguous(), weight.contiguous(), bias.contiguous())
    out = torch.empty_like(x, dtype=dtype)
    _launches(x.numel(), x.shape[-1], x.device, float(eps)).forward(x, weight, bias, out)
    return out


def backward(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and bias."""
    grad, x, weight = gpu.aligned(grad.contiguous(), x.contiguous(), weight.contiguous())
    channels = x.shape[-1]
    launches = _launches(x.numel(), channels, x.device, float(eps))
    grad_x = torch.empty_like(x)
    partials = x.new_empty(launches.programs, 2, channels, dtype=torch.float32)
    launches.backward(grad, x, weight, grad_x, partials)
    grad_weight, grad_bias = partials.sum(0).to(weight.dtype)
    return grad_x, grad_weight, grad_bias


class _Norm(torch.autograd.Function):
    """The kernels with gradients, which have gradients by torch's operations."""

    @staticmethod
    def forward(ctx, x, weight, bias, eps, dtype):
        ctx.save_for_backward(x, weight, bias)
        ctx.eps = eps
        return forward(x, weight, bias, eps, dtype)

    @staticmethod
    def backward(ctx, grad):
        x, weight, bias = ctx.saved_tensors
        if torch.is_grad_enabled():  # gradients of these gradients are wanted, which torch's operator has
            out = F.layer_norm(x.float(), weight.shape, weight.float(), bias.float(), ctx.eps)
            wanted = [tensor for tensor in (x, weight, bias) if tensor.requires_grad]
            grads = iter(torch.autograd.grad(out, wanted, grad.float(), create_graph=True))
            return *[next(grads) if needed else None for needed in ctx.needs_input_grad[:3]], None, None
        return *backward(grad, x, weight, ctx.eps), None, None


class _Launches:
    """The launches of the kernels for one size.

    Attributes:
        programs: number of programs of the backward pass.
    """

    def __init__(self, numbers: int, channels: int, device: torch.device, eps: float) -> None:
        rows = numbers // channels
        block = gpu.power_of_two(channels)
        # A program of the backward pass holds two tiles, so they are half as large.
        rows_forward, rows_backward = max(1, _TILE // block), max(1, _TILE // 2 // block)
        self.programs = min(-(-rows // rows_backward), _PROGRAMS_PER_MULTIPROCESSOR * gpu.multiprocessors(device))
        tiles = -(-rows // rows_forward)
        options = {'num_warps': 4 if block <= 2048 else 8}
        arguments = {'rows': rows, 'eps': eps, 'CHANNELS': channels, 'BLOCK': block}
        self.forward = Launch(kernels.forward, tiles, {**arguments, 'ROWS': rows_forward}, options)
        # A product that is rounded in one place and fused in another is not subtracted from itself exactly: with one
        # channel, whose gradient is 0, the difference times 1 / sqrt(eps) would remain.
        options = {**options, 'enable_fp_fusion': False}
        self.backward = Launch(kernels.backward, self.programs, {**arguments, 'ROWS': rows_backward}, options)


_launches = functools.lru_cache(maxsize=1024)(_Launches)

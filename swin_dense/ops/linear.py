"""Linear layers by oneDNN on AMD processors with AVX-512, where MKL, which torch uses for float32, has no such code."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swin_dense.ops import context, cpu
from swin_dense.utils import compat


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Do the same as ``F.linear``: (..., K) by (N, K) to (..., N)."""
    if not is_supported(x, weight, bias):
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias)):
        return _Linear.apply(x, weight, bias)
    return by_onednn(x, weight, bias)


def is_supported(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether oneDNN is faster, and computes the same as ``F.linear`` in this context."""
    return (
        not context.is_tracing()  # first, because compilers cannot trace what follows
        and is_faster()
        and torch._C._get_mkldnn_enabled()
        and all(tensor is None or _is_plain(tensor) for tensor in (x, weight, bias))
        and x.ndim > 1
        and x.shape[-1] == weight.shape[1]  # oneDNN would read beyond the end
        and not compat.is_autocast_enabled('cpu')
        and not context.plain_reason(x)
    )


def _is_plain(x: Tensor) -> bool:
    # Subclasses, such as quantised or distributed tensors, have operations of their own.
    is_tensor = type(x) in (Tensor, nn.Parameter)
    return is_tensor and x.dtype == torch.float32 and x.device.type == 'cpu' and x.layout == torch.strided


@functools.cache
def is_faster() -> bool:
    """Return whether torch would use MKL on an AMD processor with AVX-512, and can use oneDNN instead."""
    has_both = torch.backends.mkl.is_available() and hasattr(torch.ops.mkldnn, '_linear_pointwise')
    has_avx512 = torch.backends.cpu.get_cpu_capability() == 'AVX512'
    return has_both and has_avx512 and cpu.is_amd()


def by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute the layer by oneDNN, through the operator that torch's compiler uses; it has no gradient."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, 'none', [], '')


class _Linear(torch.autograd.Function):
    """The layer with gradients that have gradients themselves."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return by_onednn(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        rows, tokens = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        return (
            linear(grad, weight.t()) if ctx.needs_input_grad[0] else None,
            # oneDNN would first copy the transposed rows, which takes longer than it gains.
            rows.t() @ tokens if ctx.needs_input_grad[1] else None,
            rows.sum(0) if ctx.needs_input_grad[2] else None,
        )

"""Linear layers by oneDNN on AMD's Zen 5, where MKL, which torch uses for float32, runs no AVX-512 code."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swin_dense.ops import context
from swin_dense.utils import compat, private

# The AMD family that gains at least a tenth at 224 and at 512 pixels: Zen 5. Zen 4, whose AVX-512 units have 256 bits,
# loses at 224, and later families were not measured.
FAMILY = 26


def _is_faster_by_onednn() -> bool:
    """Return whether torch would use MKL on a processor where oneDNN was measured to be faster, and has oneDNN."""
    has_mkl = torch.backends.mkl.is_available()
    has_onednn = private.linear_pointwise is not None
    has_avx512 = torch.backends.cpu.get_cpu_capability() == 'AVX512'
    processor = _processor()
    family = re.search(r'family[\s:]+(\d+)', processor, re.IGNORECASE)
    is_measured = 'AuthenticAMD' in processor and family is not None and int(family[1]) == FAMILY
    return has_mkl and has_onednn and has_avx512 and is_measured


def _processor() -> str:
    try:
        with Path('/proc/cpuinfo').open(encoding='utf-8', errors='replace') as file:
            return file.read(1000)  # of the first core; the whole file takes long where there are many
    except OSError:
        return platform.processor()  # on Windows: family, model and vendor


# A library may replace it, before or after this import, and then means our linear layers too.
_TORCHS_FORWARD = context.torchs_forward(torch.nn.modules.linear, 'Linear')

# A constant, which torch.compile need not trace.
IS_FASTER_BY_ONEDNN = _is_faster_by_onednn()
# Products of fewer multiplications take as long by MKL.
LEAST_WORK = 1e7
# oneDNN keeps code and tables for every number of rows that it meets, so that memory would grow with each image size.
# It gets blocks of these sizes, and the rest padded to a multiple of REST.
BLOCKS = (2048, 1024, 512, 256)
REST = 16


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Do the same as ``F.linear``: (..., K) by (N, K) to (..., N)."""
    if IS_FASTER_BY_ONEDNN and is_supported(x, weight, bias):
        return linear_by_onednn(x, weight, bias)
    return F.linear(x, weight, bias)


def is_supported(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether oneDNN computes the same as ``F.linear`` in this context, and faster."""
    is_tracing = context.is_tracing()
    if is_tracing:
        if context.is_exporting() or context.is_transformed():
            return False
    elif x.numel() * len(weight) < LEAST_WORK:  # while compiling, each answer would give a graph of its own
        return False
    if nn.Linear.forward is not _TORCHS_FORWARD:
        return False
    tensors = (x, weight) if bias is None else (x, weight, bias)
    for tensor in tensors:
        # Subclasses, such as quantised or distributed tensors, have operations of their own.
        is_dense = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
        if not is_dense or tensor.dtype != torch.float32 or not tensor.is_cpu:
            return False
    # oneDNN would read beyond the end of a row, and it ignores the stride of a bias.
    rows_fit = x.ndim > 1 and x.shape[-1] == weight.shape[1]
    bias_fits = bias is None or bias.is_contiguous()
    if not rows_fit or not bias_fits or compat.is_autocast_enabled('cpu'):
        return False
    # torch.compile cannot trace the rest.
    return is_tracing or (private.is_mkldnn_enabled() and not context.needs_reference(x, is_tracing))


def linear_by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Do the same as ``F.linear`` by oneDNN, where :func:`is_supported` holds."""
    if compat.is_compiling():
        return _operator(x, weight, bias)
    # Autograd forbids in-place operations on a view that a function returns, so the function takes and returns rows.
    rows = x.reshape(-1, x.shape[-1])
    rows = _Linear.apply(rows, weight, bias)
    return rows.view(*x.shape[:-1], weight.shape[0])


def by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute the layer by oneDNN, in blocks of rows; it has no gradient."""
    weight = weight.contiguous()  # once, not in each block
    out = x.new_empty(*x.shape[:-1], len(weight))
    rows, out_rows = x.reshape(-1, x.shape[-1]), out.view(-1, len(weight))
    done = 0
    for size in BLOCKS:
        while done + size <= len(rows):
            out_rows[done : done + size] = _product(rows[done : done + size], weight, bias)
            done += size
    if done < len(rows):
        rest = rows[done:]
        padded = F.pad(rest, (0, 0, 0, -len(rest) % REST))
        out_rows[done:] = _product(padded, weight, bias)[: len(rest)]
    return out


def _product(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # The operator that torch's compiler uses
    return private.linear_pointwise(rows, weight, bias, 'none', [], '')


class _Linear(torch.autograd.Function):
    """The layer with gradients that have gradients themselves."""

    @staticmethod
    def forward(x, weight, bias):
        return by_onednn(x, weight, bias)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, weight, _ = inputs
        # As torch does: the map of weights that do not train is not kept.
        kept_x = x if ctx.needs_input_grad[1] else None
        kept_weight = weight if ctx.needs_input_grad[0] else None
        ctx.save_for_backward(kept_x, kept_weight)

    @staticmethod
    def backward(ctx, grad):
        return _gradients(ctx, grad, linear)


def _gradients(
    ctx: Any,
    grad: Tensor,
    product: Callable[..., Tensor],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the inputs; ``product`` multiplies as the layer does, and has gradients itself."""
    x, weight = ctx.saved_tensors
    rows = grad.reshape(-1, grad.shape[-1])  # torch.compile calls the operator on maps
    grad_x = grad_weight = grad_bias = None
    if ctx.needs_input_grad[0]:
        grad_x = product(grad, weight.t(), None)
    if ctx.needs_input_grad[1]:
        # oneDNN would first copy the transposed rows, which takes longer than it gains.
        grad_weight = rows.t() @ x.reshape(-1, x.shape[-1])
    if ctx.needs_input_grad[2]:
        grad_bias = rows.sum(0)
    return grad_x, grad_weight, grad_bias


# The same as an operator that torch.compile calls; a call of it takes longer than one of the function.
_operator = compat.custom_op(
    'swin_dense::linear', mutates_args=(), schema='(Tensor x, Tensor weight, Tensor? bias) -> Tensor'
)(by_onednn)


@_operator.register_fake
def _fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _gradients(ctx, grad, _operator)


_operator.register_autograd(_backward, setup_context=_Linear.setup_context)

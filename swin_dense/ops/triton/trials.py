"""The trials of kernels: a kernel, its inputs, and plain operations that compute the same on a small map.

Plain operations on the CPU are the reference, in float64 and in the dtype of the kernel. The kernels are called without
autograd, whose threads for a GPU may be waiting for this one: a checkpoint with ``use_reentrant=True`` runs the model
within the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swin_dense.ops.reference import attend_by_plain_operations
from swin_dense.ops.triton import attention, gpu, norm
from swin_dense.ops.windows import Size, WindowSpec

# How often the kernel may err by as much as plain operations in the same dtype do.
_TIMES_PLAIN = 2.5
# Allowed in any case, relative to the largest value. In float32 it is less than the error of products in TF32.
_FLOAT32_ERROR = 1e-4


class Trial(Protocol):
    """What a trial shows to be right: a kernel and the dtypes of its arguments, for which Triton compiles it."""

    @property
    def device(self) -> torch.device: ...

    def has_kernel(self) -> bool:
        """Return whether such a kernel exists."""

    def errors(self) -> list[tuple[float, float]]:
        """Return the error of each result of the kernel, relative to its largest value, and the largest allowed."""

    def fallback_description(self) -> tuple[str, str]:
        """Return the fallback of the kernel, and the option that asks for it, for a warning."""


class AttentionTrial(NamedTuple):
    """A trial of window attention on a map with padding and regions."""

    device: torch.device
    dtype: torch.dtype
    table_dtype: torch.dtype
    head_dim: int
    window: Size
    has_gradients: bool
    trains_table: bool

    def has_kernel(self) -> bool:
        fits = self.head_dim in attention.HEAD_DIMS and self.window[0] * self.window[1] <= attention.MAX_TOKENS
        return fits and {self.dtype, self.table_dtype}.issubset(gpu.DTYPES)

    def errors(self) -> list[tuple[float, float]]:
        heads = 2
        height, width = self.window
        spec = WindowSpec(heads, self.window, (height // 2, width // 2), self.head_dim**-0.5)
        size = height + 1, 2 * width - 1
        qkv = _wave((1, 2 * height, 2 * width, 3 * heads * self.head_dim), 1.7, self.dtype)
        table = _wave((attention.offsets(self.window), heads), 3.1, self.table_dtype)
        grad = _wave((1, *size, heads * self.head_dim), 0.9, self.dtype)

        def attend(qkv: Tensor, table: Tensor) -> Tensor:
            out = attend_by_plain_operations(qkv, lambda x: x, table, spec, nn.Identity())  # its own projection
            return out[:, : size[0], : size[1]]

        inputs = qkv.to(self.device), table.to(self.device)
        settings: Any = (heads, spec.window, spec.shift, spec.scale, size)
        out, lse = attention.forward(*inputs, *settings)
        found = [out]
        if self.has_gradients:
            arguments: Any = (*inputs, out, lse, *settings, self.trains_table)
            grads = attention.backward(grad.to(self.device), *arguments)
            found += grads if self.trains_table else grads[:1]
        return _errors(found, attend, [qkv, table], grad)

    def fallback_description(self) -> tuple[str, str]:
        return "attn_backend='auto' is torch's attention", "attn_backend='sdpa'"


class NormTrial(NamedTuple):
    """A trial of LayerNorm on some rows."""

    device: torch.device
    out_dtype: torch.dtype
    x_dtype: torch.dtype
    weight_dtype: torch.dtype
    channels: int
    has_gradients: bool

    def has_kernel(self) -> bool:
        dtypes = {self.out_dtype, self.x_dtype, self.weight_dtype}
        return 0 < self.channels <= norm.MAX_CHANNELS and dtypes.issubset(gpu.DTYPES)

    def errors(self) -> list[tuple[float, float]]:
        eps = 1e-5
        x = (2 * _wave((3, 23, self.channels), 1.7, torch.float32) + 1).to(self.x_dtype)
        weight = (_wave((self.channels,), 3.1, torch.float32) + 1).to(self.weight_dtype)
        bias = _wave((self.channels,), 0.7, self.weight_dtype)
        grad = _wave(tuple(x.shape), 0.9, self.out_dtype)

        def normalise(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            if x.dtype != torch.float64:  # torch's norm takes one dtype, and computes in float32
                x, weight, bias = x.float(), weight.float(), bias.float()
                return F.layer_norm(x, weight.shape, weight, bias, eps).to(self.out_dtype)
            return F.layer_norm(x, weight.shape, weight, bias, eps)

        inputs = x.to(self.device), weight.to(self.device), bias.to(self.device)
        found = [norm.forward(*inputs, eps, self.out_dtype)]
        if self.has_gradients:
            found += norm.backward(grad.to(self.device), *inputs[:2], eps)
        return _errors(found, normalise, [x, weight, bias], grad)

    def fallback_description(self) -> tuple[str, str]:
        return "norm_cfg=dict(type='LN') is torch's LayerNorm", 'norm_cfg=torch.nn.LayerNorm'


def _errors(
    found: Sequence[Tensor], function: Any, inputs: Sequence[Tensor], grad: Tensor
) -> list[tuple[float, float]]:
    """Return the errors of the results of a kernel, and those allowed, by plain operations for the same function."""
    expected = _results(function, [tensor.double() for tensor in inputs], grad.double())
    plain = _results(function, inputs, grad)
    # One tensor, so that the host waits for the device once.
    found_on_host = torch.cat([tensor.flatten().double() for tensor in found]).cpu()
    parts = found_on_host.split([tensor.numel() for tensor in found])
    errors = []
    for part, kernels, ours, truth in zip(parts, found, plain, expected, strict=False):
        scale = truth.abs().max()
        error = (part - truth.flatten()).abs().max() / scale
        plain_error = (ours.double() - truth).abs().max() / scale
        least = max(_FLOAT32_ERROR, torch.finfo(kernels.dtype).eps)
        errors.append((error.item(), max(_TIMES_PLAIN * plain_error.item(), least)))
    return errors


def _results(function: Any, inputs: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
    """Return the output of a function and its gradients."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


def _wave(shape: tuple[int, ...], step: float, dtype: torch.dtype) -> Tensor:
    """Return numbers between -1 and 1 that are not random, because the generator's state belongs to the user."""
    return (torch.arange(torch.Size(shape).numel(), dtype=torch.float32) * step).sin().reshape(shape).to(dtype)

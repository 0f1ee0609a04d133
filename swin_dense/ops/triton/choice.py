"""Decide whether the kernel is the default on a GPU: a trial compares it with plain operations.

The kernel was measured on an NVIDIA H200. On other GPUs, with other versions of Triton and on machines where Triton
cannot work, each kernel runs on a small map before it is first used. A kernel that fails or errs is not used in this
process, and one warning gives the cause and the remedy.
"""

from __future__ import annotations

import subprocess
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from swin_dense.ops import reference
from swin_dense.ops.triton import attention, gpu
from swin_dense.ops.windows import Pair, WindowSpec
from swin_dense.utils import compat

# The largest allowed error, relative to the largest value: eight times the rounding of low precision. In float32 it is
# less than the error of products in TF32.
_ROUNDINGS = 8
_FLOAT32_ERROR = 1e-4
_REPORT = 'report this with the output of swin-dense doctor'


class Trial(NamedTuple):
    """What a trial shows to be right; each is a kernel of its own."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    window: Pair
    has_gradients: bool


# Why the kernel of a trial is not used, or None.
_reasons: dict[Trial, str | None] = {}


def is_kernel(x: Tensor, spec: WindowSpec, dropout: float) -> bool:
    """Return whether 'auto' is the kernel for a map on a CUDA device, (B, H, W, C)."""
    # Subclasses have operations of their own, and modes such as FlopCounterMode count those of torch.
    if type(x) is not Tensor or dropout > 0 or attention.must_call_operators():
        return False
    trial = Trial(x.device, product_dtype(x), x.shape[3] // spec.num_heads, spec.window, torch.is_grad_enabled())
    if trial not in _reasons:
        if gpu.is_capturing():
            return False  # a graph cannot wait for the result of a trial
        _reasons[trial] = _reason_against(trial)
    return _reasons[trial] is None


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of a linear layer's output for ``x`` on a CUDA device, where autocast may choose it."""
    if compat.is_autocast_enabled('cuda') and x.dtype != torch.float64:
        return compat.get_autocast_dtype('cuda')
    return x.dtype


def _reason_against(trial: Trial) -> str | None:
    """Return why not to use the kernel, or None; warn if a remedy exists."""
    tokens = trial.window[0] * trial.window[1]
    if trial.dtype not in gpu.DTYPES or trial.head_dim not in attention.HEAD_DIMS or tokens > attention.MAX_TOKENS:
        return 'there is no such kernel'
    reason = gpu.unsupported_gpu_reason(trial.device)
    if reason is not None:
        return reason
    reason = gpu.unsupported_device_reason(trial.device)
    remedy = 'install a version of torch that comes with triton 3.6 or later'
    if reason is None:
        reason, remedy = _outcome(trial)
    if reason is not None and reason not in _reasons.values():
        warnings.warn(
            f"attn_backend='auto' is torch's attention on {trial.device}, which takes longer than swin_dense's Triton "
            f"kernel, because {reason}. To use the kernel, {remedy}; attn_backend='sdpa' silences this warning",
            stacklevel=2,
        )
    return reason


def _outcome(trial: Trial) -> tuple[str | None, str]:
    """Return why the kernel fails a trial, or None, and the remedy."""
    try:
        # In a thread of its own, where autocast, inference mode, torch modes and the hooks of activation checkpoints
        # are not in effect.
        with ThreadPoolExecutor(1) as pool:
            error = pool.submit(largest_error, trial).result()
    except Exception as exception:  # no compiler, a cache that cannot be written, a GPU of the future
        first_line = str(exception).strip().partition('\n')[0]
        return f'it failed ({type(exception).__name__}: {first_line})', _remedy(exception)
    allowed = max(_ROUNDINGS * torch.finfo(trial.dtype).eps, _FLOAT32_ERROR)
    if error <= allowed:
        return None, ''
    return f'its results differ from those of plain operations by {error:.1e}, more than {allowed:.1e}', _REPORT


def _remedy(exception: Exception) -> str:
    if isinstance(exception, subprocess.CalledProcessError) or 'C compiler' in str(exception):
        return (
            'install a C compiler and the headers of Python (apt install gcc python3-dev), or set TRITON_CACHE_DIR to '
            'a copy of that folder from a machine with the same GPU, Python, torch and Triton'
        )
    if isinstance(exception, OSError):
        return 'set TRITON_CACHE_DIR to a folder that can be written and whose files can be run'
    return _REPORT


def largest_error(trial: Trial) -> float:
    """Return the largest error of the kernel's output and gradients on a small map with padding and regions.

    Plain operations on the CPU are the reference. The kernels are called without autograd, whose threads for a GPU may
    be waiting for this one: a checkpoint with ``use_reentrant=True`` runs the model within the backward pass.
    """
    heads = 2
    height, width = trial.window
    tokens = height * width
    qkv = _wave((1, 2 * height, 2 * width, 3 * heads * trial.head_dim), 1.7).to(trial.dtype).float()
    bias = _wave((heads, tokens, tokens), 3.1)
    spec = WindowSpec(heads, trial.window, (height // 2, width // 2), trial.head_dim**-0.5)
    size = height + 1, 2 * width - 1
    leaves = [qkv.requires_grad_(), bias.requires_grad_()]
    # The map is its own projection.
    expected = [reference.window_attention(qkv, lambda x: x, bias, spec, nn.Identity())[:, : size[0], : size[1]]]
    grad = _wave(tuple(expected[0].shape), 0.9).to(trial.dtype).float()
    expected += torch.autograd.grad(expected[0], leaves, grad)

    inputs = qkv.detach().to(trial.device, trial.dtype), bias.detach().to(trial.device)
    settings: Any = (heads, spec.window, spec.shift, spec.scale, size)
    out, lse = attention.forward(*inputs, *settings)
    found = [out]
    if trial.has_gradients:
        found += attention.backward(grad.to(trial.device, trial.dtype), *inputs, out, lse, *settings)
    # One tensor, so that the host waits for the device once.
    found_on_host = torch.cat([tensor.flatten().float() for tensor in found]).cpu()
    parts = found_on_host.split([tensor.numel() for tensor in found])
    errors = [
        (part - truth.flatten()).abs().max() / truth.abs().max() for part, truth in zip(parts, expected, strict=False)
    ]
    return torch.stack(errors).max().item()  # NaN if any is


def _wave(shape: tuple[int, ...], step: float) -> Tensor:
    """Return numbers between -1 and 1 that are not random, because the generator's state belongs to the user."""
    return (torch.arange(torch.Size(shape).numel(), dtype=torch.float32) * step).sin().reshape(shape)

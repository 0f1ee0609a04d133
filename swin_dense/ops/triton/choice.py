"""Decide whether kernels are the default on a GPU: a trial compares each with plain operations.

The kernels were measured on an NVIDIA H200. On other GPUs, with other versions of Triton and on machines where Triton
cannot work, each kernel runs on a small map before it is first used. A kernel that fails or errs is not used in this
process, and one warning gives the cause and the remedy. :mod:`swin_dense.ops.triton.trials` has the trials.
"""

from __future__ import annotations

import subprocess
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from swin_dense.ops.triton import attention, gpu
from swin_dense.ops.triton.trials import AttentionTrial, NormTrial, Trial
from swin_dense.ops.windows import WindowSpec
from swin_dense.utils import compat

_REPORT = 'report this with the output of swin-dense doctor'
# Why the kernel of a trial is not used, or None.
_reasons: dict[Trial, str | None] = {}


def is_kernel(x: Tensor, table: Tensor | None, spec: WindowSpec, dropout: float) -> bool:
    """Return whether 'auto' is the kernel for a map on a CUDA device, (B, H, W, C), also while torch.compile traces."""
    # Subclasses have operations of their own, and modes such as FlopCounterMode count those of torch.
    has_mode = not compat.is_compiling() and attention.must_call_operators()
    if type(x) is not Tensor or dropout > 0 or has_mode:
        return False
    dtype = product_dtype(x)
    has_gradients = torch.is_grad_enabled()
    table_dtype, trains_table = dtype, False
    if table is not None:
        table_dtype, trains_table = table.dtype, has_gradients and table.requires_grad
    head_dim = x.shape[3] // spec.num_heads
    return _has_passed_attention(x.device, dtype, table_dtype, head_dim, spec.window, has_gradients, trains_table)


@compat.assume_constant_result  # torch.compile calls it while it traces, and cannot trace a trial
def _has_passed_attention(*settings: Any) -> bool:
    return has_passed(AttentionTrial(*settings))


def is_norm_kernel(x: Tensor, weight: Tensor, dtype: torch.dtype) -> bool:
    """Return whether the kernel normalises a map on a CUDA device, (..., C), and returns it in ``dtype``."""
    return has_passed(NormTrial(x.device, dtype, x.dtype, weight.dtype, x.shape[-1], torch.is_grad_enabled()))


def has_passed(trial: Trial) -> bool:
    """Return whether the kernel of a trial is right on this machine; the answer is kept."""
    if trial not in _reasons:
        if torch.cuda.is_current_stream_capturing():
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
    if not trial.has_kernel():
        return 'there is no such kernel'
    reason = gpu.unsupported_gpu_reason(trial.device)
    if reason is not None:
        return reason
    reason = gpu.unsupported_device_reason(trial.device)
    remedy = 'install a version of torch that comes with triton 3.6 or later'
    if reason is None:
        reason, remedy = _outcome(trial)
    if reason is not None and reason not in _reasons.values():
        alternative, option = trial.fallback_description()
        warnings.warn(
            f"{alternative} on {trial.device}, which takes longer than swin_dense's Triton kernel, because {reason}. "
            f'To use the kernel, {remedy}; {option} silences this warning',
            stacklevel=2,
        )
    return reason


def _outcome(trial: Trial) -> tuple[str | None, str]:
    """Return why the kernel fails a trial, or None, and the remedy."""
    try:
        # In a thread of its own, where autocast, inference mode, torch modes and the hooks of activation checkpoints
        # are not in effect, and which may wait for the device beside a thread that captures a CUDA graph.
        with ThreadPoolExecutor(1, initializer=gpu.ignore_captures) as pool:
            errors = pool.submit(trial.errors).result()
    except Exception as exception:  # no compiler, a cache that cannot be written, a GPU of the future
        first_line = str(exception).strip().partition('\n')[0]
        return f'it failed ({type(exception).__name__}: {first_line})', _remedy(exception)
    for error, allowed in errors:
        if not error <= allowed:  # NaN is neither less nor more
            return f'its results differ from those of plain operations by {error:.1e}, more than {allowed:.1e}', _REPORT
    return None, ''


def _remedy(exception: Exception) -> str:
    if isinstance(exception, subprocess.CalledProcessError) or 'C compiler' in str(exception):
        return (
            'install a C compiler and the headers of Python (apt install gcc python3-dev), or set TRITON_CACHE_DIR to '
            'a copy of that folder from a machine with the same GPU, Python, torch and Triton'
        )
    if isinstance(exception, OSError):
        return 'set TRITON_CACHE_DIR to a folder that can be written and whose files can be run'
    return _REPORT

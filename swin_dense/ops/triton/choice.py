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

from swin_dense.ops.triton import gpu
from swin_dense.ops.triton.trials import AttentionTrial, Trial
from swin_dense.ops.windows import WindowSpec
from swin_dense.utils import compat, private

_REPORT = 'report this with the output of swin-dense doctor'


class Reasons(dict[Any, str | None]):
    """Why the kernel of a trial is not used, or None, by the kind of the trial and its settings.

    A trial is made once, when a pass first looks up its reason; every pass does, which costs the host little.
    """

    def __missing__(self, key: Any) -> str | None:
        if torch.cuda.is_current_stream_capturing():
            return 'a graph cannot wait for the result of a trial'
        kind, *settings = key
        reason = self[key] = _reason_against(kind(*settings))
        return reason


reasons = Reasons()


def is_kernel(
    x: Tensor,
    table: Tensor | None,
    spec: WindowSpec,
    dropout: float,
    is_tracing: bool = False,
) -> bool:
    """Return whether 'auto' is the kernel for a map on a CUDA device, (B, H, W, C), also while torch.compile traces."""
    # Subclasses have operations of their own, and modes such as FlopCounterMode count those of torch.
    has_mode = not is_tracing and private.count_modes() > 0
    if type(x) is not Tensor or dropout > 0 or has_mode:
        return False
    dtype = x.dtype  # of the projection, which autocast may choose
    if compat.is_autocast_enabled('cuda') and dtype != torch.float64:
        dtype = compat.get_autocast_dtype('cuda')
    has_gradients = torch.is_grad_enabled()
    table_dtype, trains_table = dtype, False
    if table is not None:
        table_dtype, trains_table = table.dtype, has_gradients and table.requires_grad
    head_dim = x.shape[3] // spec.num_heads
    trial = (AttentionTrial, x.device, dtype, table_dtype, head_dim, spec.window, has_gradients, trains_table)
    return _has_passed(*trial) if is_tracing else reasons[trial] is None


@private.assume_constant_result  # torch.compile calls it while it traces, and cannot trace a trial
def _has_passed(*trial: Any) -> bool:
    return reasons[trial] is None


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
    if reason is not None and reason not in reasons.values():
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

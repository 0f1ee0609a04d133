"""Whether Triton kernels can run on the device of a tensor, and properties of this device."""

from __future__ import annotations

import ctypes
import os

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# In bytes. Triton compiles a kernel for tensors that begin at multiples of it, as those that torch allocates do.
ALIGNMENT = 16

_unusable: str | None = None
IS_INTERPRETED = False
try:
    import triton

    if TorchVersion(triton.__version__) < '3.6':
        _unusable = f'triton {triton.__version__} is older than 3.6, the first version that supports the kernels'

    @triton.jit
    def _nothing(x):
        pass

    # Triton reads TRITON_INTERPRET only while decorating kernels, so check the result instead of the variable.
    IS_INTERPRETED = not isinstance(_nothing, triton.JITFunction)
except Exception as error:  # a broken triton may raise any exception, and only the kernels need it
    _unusable = f'triton cannot be imported ({error})'


def unsupported_reason(x: Tensor) -> str | None:
    """Return why Triton kernels cannot run on ``x``, or None."""
    reason = unsupported_device_reason(x.device)
    if reason is not None:
        return reason
    return None if x.dtype in DTYPES else f'the input is {x.dtype}, not float32, float16 or bfloat16'


def unsupported_device_reason(device: torch.device) -> str | None:
    """Return why Triton kernels cannot run on a device, or None."""
    reason = unsupported_gpu_reason(device) or _unusable
    if reason is None and device.type != 'cuda' and not IS_INTERPRETED:
        return f'the input is on {device}, not on a CUDA device (for tests without one, set TRITON_INTERPRET=1)'
    return reason


def unsupported_gpu_reason(device: torch.device) -> str | None:
    """Return why the kernels do not support the model of a GPU, or None, also for other devices."""
    if device.type != 'cuda':
        return None
    if torch.version.hip is not None:
        return 'the kernels are for NVIDIA GPUs, but this torch is for AMD GPUs (ROCm)'
    if not torch.cuda.is_available() or torch.cuda.get_device_properties(device).major < 8:
        return 'triton needs a GPU of compute capability 8.0 or later'
    return None


def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of the device, or 1 for triton's interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == 'cuda' else 1


def ignore_captures() -> None:
    """Let this thread allocate memory and wait for the device while other threads capture CUDA graphs.

    In the default mode of a capture, 'global', both end it with an error, whichever thread they are in. torch can
    neither say whether another thread captures, nor change the mode of a thread, so this calls the driver.
    """
    if torch.cuda.is_available():
        driver = ctypes.CDLL('nvcuda.dll' if os.name == 'nt' else 'libcuda.so.1')
        thread_local = ctypes.c_int(1)  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(thread_local))


def aligned(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return tensors; of those that begin elsewhere, as a part of another tensor may, contiguous copies."""
    for tensor in tensors:
        if tensor.data_ptr() % ALIGNMENT:
            return tuple(
                x.clone(memory_format=torch.contiguous_format) if x.data_ptr() % ALIGNMENT else x for x in tensors
            )
    return tensors


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is not less than a positive number."""
    return 1 << (number - 1).bit_length()

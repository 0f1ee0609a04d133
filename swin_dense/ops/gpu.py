"""What the GPU under a tensor offers to the Triton kernels, and what an operator costs there."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from swin_dense import compat

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

_unusable: str | None = None
IS_INTERPRETED = False
try:
    import triton

    if TorchVersion(triton.__version__) < '3.6':
        _unusable = f'triton {triton.__version__} is older than 3.6, the first to take all that the kernels use'

    @triton.jit
    def _nothing(x):
        pass

    # Whether TRITON_INTERPRET was set when triton decorated the kernels: it asks only then.
    IS_INTERPRETED = not isinstance(_nothing, triton.JITFunction)
except Exception as error:  # an installed triton may fail in any way; nothing but the kernels needs it
    _unusable = f'triton cannot be imported ({error})'


def reason_not_to_run(x: Tensor) -> str | None:
    """Say why Triton kernels cannot run on ``x``, or return None."""
    if _unusable is not None:
        return _unusable
    if not (x.is_cuda or IS_INTERPRETED):
        return f'the input is on {x.device}, not on a CUDA device (for tests without one, set TRITON_INTERPRET=1)'
    if x.is_cuda and not (torch.cuda.is_available() and torch.cuda.get_device_properties(x.device).major >= 8):
        return 'triton needs a GPU of compute capability 8.0 or later'
    return None if x.dtype in DTYPES else f'the input is {x.dtype}, not float32, float16 or bfloat16'


def is_gpu(x: Tensor) -> bool:
    """Tell whether kernels are what ``x`` would be computed with by default; triton's interpreter is for tests."""
    return x.is_cuda


def multiprocessors(device: torch.device) -> int:
    """Return how many multiprocessors the device has, 1 for triton's interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == 'cuda' else 1


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype that autocast gives the next matrix product of ``x`` on a GPU, or None without autocast."""
    if not x.is_cuda or not compat.is_autocast_enabled('cuda'):
        return None
    return compat.get_autocast_dtype('cuda')


def is_capturing(device: torch.device) -> bool:
    """Tell whether the work on the device is being recorded into a CUDA graph."""
    return device.type == 'cuda' and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def stream(device: torch.device) -> int | None:
    """Return a number for the stream that work on the device goes to, None where there are no streams."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == 'cuda' else None


class OperatorCost(NamedTuple):
    """What one call of an operator costs on a GPU.

    Attributes:
        launches: of kernels.
        bytes: read and written, temporaries among them.
        flops: two per multiply-add of the matrix products.
    """

    launches: int
    bytes: int
    flops: int = 0


# What the operators of this package cost, by qualified name: what counts operations sees one, however many kernels
# it launches. Each takes the operator's arguments.
COSTS: dict[str, Callable[..., OperatorCost]] = {}

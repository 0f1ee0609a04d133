"""Environments to test kernels in: triton's interpreter, a GPU if available, and compilation without a GPU."""

import contextlib
import tempfile
import textwrap
from unittest import mock

import numpy as np
import pytest
import torch
from torch.torch_version import TorchVersion

from swin_dense.ops.triton import gpu
from swin_dense.utils import private
from tests.processes import python

_reason = gpu._unusable if gpu.IS_INTERPRETED else 'needs triton, and TRITON_INTERPRET=1 at its import'
if TorchVersion(np.__version__) >= '2.5':
    _reason = f"triton's interpreter does not work with numpy {np.__version__}"
needs_interpreter = pytest.mark.skipif(_reason is not None, reason=str(_reason))
needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')]
device = pytest.mark.parametrize(
    'device', [pytest.param('cpu', marks=needs_interpreter), pytest.param('cuda', marks=needs_gpu)]
)


@contextlib.contextmanager
def as_on_a_gpu():
    """Let all tensors answer the question for their device as on a GPU."""
    with (
        mock.patch.object(torch.Tensor, 'is_cuda', True, create=True),
        mock.patch.object(torch.Tensor, 'is_cpu', False, create=True),
        mock.patch.object(torch.cuda, 'is_current_stream_capturing', return_value=False),
        mock.patch.object(private, 'current_raw_stream', return_value=0),
    ):
        yield


def run_python(code, **environment):
    """Run a program in a separate process and return its stdout."""
    return python('-c', textwrap.dedent(code), **environment).stdout


def compile_for(capability, code):
    """Run a program in which launching a kernel only compiles it, for GPUs of a compute capability such as 90.

    Returns:
        Name and shared memory in bytes of each kernel, in launch order.
    """
    compile_only = """
        import torch, triton
        from triton.backends.compiler import GPUTarget

        class Driver:
            get_current_target = lambda self: GPUTarget('cuda', CAPABILITY, 32)
            get_current_device = lambda self: 0
            get_current_stream = lambda self, device: 0

        from swin_dense.ops.triton.launch import Launch

        def compile_only(launch, *tensors):
            compiled = launch._kernel.warmup(*tensors, grid=launch._grid, **launch._arguments, **launch._options)
            assert compiled.asm['cubin']
            print(compiled.metadata.name, compiled.metadata.shared)

        triton.runtime.driver.set_active(Driver())
        Launch.__call__ = compile_only
    """
    program = f'CAPABILITY = {capability}\n{textwrap.dedent(compile_only)}{textwrap.dedent(code)}'
    with tempfile.TemporaryDirectory() as cache:  # by default it is below the home folder
        stdout = run_python(program, TRITON_INTERPRET='0', TRITON_CACHE_DIR=cache)
    rows = [line.split() for line in stdout.splitlines()]
    return [(name, int(shared)) for name, shared in rows]

"""A simulated GPU: triton's interpreter, in which attention fails in a different manner for each window."""

import os
import signal
import time
from pathlib import Path

import torch

from swin_dense.doctor import kernel_cases, kernels
from swin_dense.doctor.kernel_cases import AttentionCase, BiasCase, Map, NormCase
from swin_dense.ops.triton import attention, gpu, verdicts

FOLDER = Path(__file__).parent
KEY = {'gpu': 'Stand-In 100', 'driver': '550.54', 'torch': '2.13.0', 'triton': '3.7.1', 'swin_dense': '0.1.0, 3f2a'}
MAP = Map(height=3, width=5, channels=16, heads=1)
# Windows by the behaviour that the simulated GPU shows for them.
WINDOWS = {
    'agrees': (2, 2),
    'is slow': (2, 3),
    'disagrees': (3, 2),
    'hangs': (3, 3),
    'crashes': (1, 4),
    'needs too much memory': (4, 1),
    'does not compile': (1, 2),
}
ATTENTION = {name: AttentionCase(window, torch.float32, torch.float32, (MAP,)) for name, window in WINDOWS.items()}
NORM = NormCase(torch.float32, torch.bfloat16, torch.float32, (MAP,))
BIAS = BiasCase((2, 2), torch.float32, (MAP,))
# Timeout of a kernel in seconds; the interpreter may need half of it if many processes share a processor.
PATIENCE = 60


def install():
    """Simulate the GPU in this process, which checks kernels or starts processes that do."""
    pretend(setattr)
    kernels._look = _look
    kernel_cases.timings = lambda case, device: {mode: _times(case) for mode in ('inference', 'training')}
    attention._Launch.__call__ = _launch


def pretend(patch):
    """Make this process treat the CPU as the simulated GPU.

    Args:
        patch: a function with the signature of ``setattr``.
    """
    patch(torch.version, 'cuda', '13.0')
    patch(gpu, 'is_gpu', lambda x: True)
    patch(gpu, 'autocast_dtype', lambda x: torch.bfloat16 if torch.is_autocast_enabled('cpu') else None)
    patch(verdicts, 'key', lambda device: KEY)
    patch(kernel_cases, 'all_cases', lambda: [*ATTENTION.values(), NORM, BIAS])
    patch(kernels, 'CASE_LIMIT', PATIENCE)
    patch(kernels, 'START_LIMIT', 900)
    patch(kernels, 'LIMIT', 3600)


def _look():
    return [kernels.Device('cpu', None, KEY, 0)]


def _times(case):
    """Return fixed times in microseconds, because those of the interpreter are meaningless."""
    return {'triton': 150.0 if case == ATTENTION['is slow'] else 50.0, 'sdpa': 100.0, 'plain': 200.0}


def _launch(self, kernel, *tensors, bias, launch=attention._Launch.__call__):
    window = self._arguments['WINDOW']
    if window == WINDOWS['disagrees']:
        self._arguments = {**self._arguments, 'scale': 1.01 * self._arguments['scale']}
    if window == WINDOWS['hangs']:
        time.sleep(1000)
    if window == WINDOWS['crashes']:
        os.write(2, b'CUDA error: an illegal memory access was encountered\n')
        os.kill(os.getpid(), signal.SIGSEGV)
    if window == WINDOWS['needs too much memory']:
        raise torch.cuda.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB.\nand a long dump')
    if window == WINDOWS['does not compile']:
        raise RuntimeError('out of registers\nand a long dump')
    launch(self, kernel, *tensors, bias=bias)

"""Window attention in C++ for inference on a CPU, compiled on first use; see ``window_attention.cpp``.

torch's own loader compiles it, once per torch and kind of processor, and keeps the result in its cache
(``TORCH_EXTENSIONS_DIR``). It is never chosen by itself, since that takes 10 to 30 seconds. Where it cannot be compiled
``sdpa`` does the work, and a warning says why. Others also do what the kernel does not: gradients, other types than
float32, head dims that 16 does not divide, and recording graphs.
"""

from __future__ import annotations

import functools
import logging
import shlex
import threading
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from swin_dense.ops import sdpa
from swin_dense.windows import Pair

_logger = logging.getLogger(__name__)
_LANES = 16
_FLAGS = {
    'AVX512': ['-mavx512f', '-mavx512dq', '-mavx512bw', '-mavx512vl', '-mfma', '-mprefer-vector-width=512'],
    'AVX2': ['-mavx2', '-mfma'],
}
_lock = threading.Lock()


def reason_not_to_run(qkv: Tensor, window_size: Pair, num_heads: int, dropout_p: float) -> str | None:
    return None if qkv.device.type in ('cpu', 'meta') else f'it runs on a CPU, and qkv is on {qkv.device}'


def window_attention(
    qkv: Tensor,
    relative_bias: Tensor | None,
    pad_kv: Tensor | None,
    num_heads: int,
    window_size: Pair,
    shift: Pair,
    scale: float,
    dropout_p: float = 0.0,
) -> Tensor:
    """See :func:`swin_dense.ops.window_attention`."""
    inputs = [tensor for tensor in (qkv, relative_bias, pad_kv) if tensor is not None]
    fits = qkv.dtype == torch.float32 and qkv.shape[-1] // 3 // num_heads % _LANES == 0 and dropout_p == 0.0
    wants_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    is_recorded = torch.compiler.is_compiling() or not sdpa.has_values(qkv)
    if wants_grad or not fits or is_recorded or not is_available():
        return sdpa.window_attention(qkv, relative_bias, pad_kv, num_heads, window_size, shift, scale, dropout_p)
    bias, pad = (None if tensor is None else tensor.float() for tensor in (relative_bias, pad_kv))
    return torch.ops.swin_dense.cpp_window_attention(qkv, bias, pad, num_heads, window_size, shift, scale)


def is_available() -> bool:
    """Compile the kernel if that was not tried yet, and tell whether it can be called."""
    with _lock:
        return _load()


@functools.cache
def _load() -> bool:
    capability = torch.backends.cpu.get_cpu_capability()
    try:
        from torch.utils import cpp_extension

        _logger.info('compiling the C++ window attention for %s unless it is in the cache', capability)
        # The loader quotes every path in the commands that it writes but this one, which may hold a space.
        with mock.patch.object(cpp_extension, 'TORCH_LIB_PATH', shlex.quote(cpp_extension.TORCH_LIB_PATH)):
            cpp_extension.load(
                name=f'swin_dense_cpp_{capability.lower().replace(" ", "_")}',
                sources=[str(Path(__file__).parent / 'window_attention.cpp')],
                extra_cflags=['-O3', '-fopenmp', *_FLAGS.get(capability, [])],
                is_python_module=False,
            )
    except (ImportError, OSError, RuntimeError) as error:  # no compiler, no ninja, no place to write, ...
        _logger.warning('the C++ window attention cannot be compiled, "sdpa" stands in for it: %s', error)
        return False
    return True

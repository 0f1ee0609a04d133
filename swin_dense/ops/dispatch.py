"""Choose the implementation of window attention."""

from __future__ import annotations

import functools
import logging
from types import ModuleType

import torch
from torch import Tensor

from swin_dense.ops import bmm, context, plain, sdpa, windows
from swin_dense.ops.triton import attention as triton
from swin_dense.ops.triton import bias, gpu, verdicts
from swin_dense.ops.windows import Pair, WindowSpec

_logger = logging.getLogger('swin_dense.ops')

# Modules by backend name, in the order in which 'auto' tries them. Each has `window_attention`, with the arguments of
# the function below except `backend`, and `unsupported_reason(qkv, spec)`, which returns why it cannot run, or None.
IMPLEMENTATIONS: dict[str, ModuleType] = {'triton': triton, 'bmm': bmm, 'sdpa': sdpa, 'reference': plain}
BACKENDS = ('auto', *IMPLEMENTATIONS)


def window_attention(
    qkv: Tensor, relative_bias: Tensor | None, pad_kv: Tensor | None, spec: WindowSpec, backend: str = 'auto'
) -> Tensor:
    """Compute attention within shifted windows; input and output are in raster order.

    The map is padded to a multiple of the window, rolled by minus the shift and cut into windows. Attention is computed
    within each window and region, and the windows are put back. Padding tokens are attended to, with ``pad_kv`` as
    their keys and values.

    Args:
        qkv: (B, H, W, 3C) queries, keys and values of the real tokens.
        relative_bias: (A, T, T) added to the scores of every window, T tokens per window, or None.
        pad_kv: (2C,) key and value of a padding token, or None for zeros. The official code pads with zeros before the
            qkv layer, which maps them to its bias, so this is the k and v part of the qkv bias.
        spec: heads, window, shift, scale and dropout.
        backend: one of ``BACKENDS``. 'auto' uses the first backend that can run and logs its choice once. It uses the
            Triton kernels only if `swin-dense doctor` found them correct and faster on this GPU, and 'bmm', batched
            products, only with gradients on AMD processors, in float32, in windows of up to 64 tokens.

    Returns:
        (B, H, W, C).

    Raises:
        ValueError: the backend is unknown.
        RuntimeError: the requested backend cannot run here.

    Examples:
        >>> spec = WindowSpec(num_heads=3, window=(7, 7), shift=(3, 3), scale=32**-0.5)
        >>> window_attention(torch.rand(1, 20, 30, 3 * 96), None, None, spec).shape
        torch.Size([1, 20, 30, 96])
    """
    if context.is_exporting():
        return plain.window_attention(qkv, relative_bias, pad_kv, spec)
    return _choose(backend, qkv, relative_bias, pad_kv, spec).window_attention(qkv, relative_bias, pad_kv, spec)


def relative_position_bias(table: Tensor, window: Pair, backend: str = 'auto') -> Tensor:
    """Do the same as :func:`swin_dense.ops.windows.relative_position_bias`, on a GPU by a kernel if it may run."""
    by_kernel = gpu.is_gpu(table) and _may_expand_by_kernel(table, window, backend)
    return (bias if by_kernel else windows).relative_position_bias(table, window)


def _may_expand_by_kernel(table: Tensor, window: Pair, backend: str) -> bool:
    # Compilers fuse the plain version with the operations around it.
    if context.is_rewritten() or backend not in ('auto', 'triton') or gpu.unsupported_reason(table):
        return False
    mode = (table.dtype, table.device, torch.is_grad_enabled())
    return backend == 'triton' or not verdicts.reason_against_bias(window, *mode)


def _choose(
    backend: str, qkv: Tensor, relative_bias: Tensor | None, pad_kv: Tensor | None, spec: WindowSpec
) -> ModuleType:
    if backend not in BACKENDS:
        raise ValueError(f'backend must be one of {", ".join(BACKENDS)}, got {backend!r}')
    is_automatic = backend == 'auto'
    names = list(IMPLEMENTATIONS) if is_automatic else [backend]
    if is_automatic and not gpu.is_gpu(qkv):
        names.remove('triton')  # its interpreter is for tests only
    if is_automatic and not bmm.is_faster(qkv, spec):
        names.remove('bmm')
    if context.plain_reason(qkv):  # plain operations are the fallback of every backend
        names.append('reference')
    reasons: list[str] = []
    for name in names:
        reason = IMPLEMENTATIONS[name].unsupported_reason(qkv, spec)
        if reason is None and is_automatic and name == 'triton':
            reason = _unproven_reason(qkv, relative_bias, pad_kv, spec)
        if reason is None:
            if is_automatic and not context.is_tracing():  # logging would break the graph
                _log_once(name, tuple(reasons))
            return IMPLEMENTATIONS[name]
        reasons.append(f'{name}: {reason}')
    raise RuntimeError(f'window attention cannot run here: {"; ".join(reasons)}; use backend="auto"')


def _unproven_reason(qkv: Tensor, relative_bias: Tensor | None, pad_kv: Tensor | None, spec: WindowSpec) -> str | None:
    """Return why 'auto' does not use the Triton kernels although they can run, or None."""
    # While compiling, torch.compile handles torch.func itself.
    if not context.is_tracing() and context.is_transformed():
        return 'a torch.func transform is active'
    head_dim = qkv.shape[-1] // 3 // spec.num_heads
    bias_dtype, pad_dtype = (qkv.dtype if x is None else x.dtype for x in (relative_bias, pad_kv))
    return verdicts.reason_against_attention(
        head_dim, spec.window, qkv.dtype, bias_dtype, pad_dtype, qkv.device, torch.is_grad_enabled()
    )


@functools.lru_cache(maxsize=32)
def _log_once(name: str, reasons: tuple[str, ...]) -> None:
    _logger.info('window attention uses backend %r%s', name, f' ({"; ".join(reasons)})' if reasons else '')

"""Shifted-window attention: one front door, one module per backend; and the fused block of a CPU.

A backend module has a ``window_attention`` with the arguments of the front door (less ``backend``), all of them
given, and a ``reason_not_to_run(qkv, window_size, num_heads, dropout_p)`` that says why it cannot serve such an
input here, or None. Blocks that ``fused`` computes whole do not come here.
"""

from __future__ import annotations

import functools
import logging
from types import ModuleType

from torch import Tensor

from swin_dense import checks, windows
from swin_dense.ops import bias, gpu, proof, recorded, reference, sdpa, surroundings, triton

_logger = logging.getLogger(__name__)

_BACKENDS: dict[str, ModuleType] = {'triton': triton, 'sdpa': sdpa, 'reference': reference}
# What 'auto' tries, in this order; triton only on a GPU on which it has agreed with sdpa.
_AUTOMATIC = ('triton', 'sdpa')

BACKENDS = ('auto', *_BACKENDS)


def window_attention(
    qkv: Tensor,
    relative_bias: Tensor | None,
    pad_kv: Tensor | None,
    num_heads: int,
    window_size: tuple[int, int],
    shift: tuple[int, int],
    scale: float | None = None,
    dropout_p: float = 0.0,
    backend: str = 'auto',
) -> Tensor:
    """Attend within shifted windows, from raster order to raster order.

    The map is padded to a multiple of the window, rolled by minus the shift, cut into windows, attended within
    each window and region, and put back. Padding tokens are attended to: their keys and values are ``pad_kv``.

    Args:
        qkv: (B, H, W, 3C) queries, keys and values of the real tokens.
        relative_bias: (A, T, T) added to the scores of every window, T tokens per window, or None.
        pad_kv: (2C,) key and value of a padding token, or None for zeros. A linear layer maps the official code's
            zero padding to its bias, so this is the k and v part of the qkv bias.
        num_heads: A, which divides C.
        window_size: (height, width) in tokens.
        shift: (height, width) in tokens, each smaller than the window.
        scale: factor on the scores, ``(C / A) ** -0.5`` where it is None.
        dropout_p: probability to drop an attention weight.
        backend: one of ``BACKENDS``. 'auto' takes the first that can run and logs which, once.

    Returns:
        (B, H, W, C).

    Raises:
        ValueError: the backend is unknown.
        RuntimeError: the backend that was asked for cannot run here.
    """
    module = _choose(backend, qkv, relative_bias, window_size, num_heads, dropout_p)
    if scale is None:
        scale = (qkv.shape[-1] // 3 // num_heads) ** -0.5
    return module.window_attention(qkv, relative_bias, pad_kv, num_heads, window_size, shift, scale, dropout_p)


def relative_position_bias(table: Tensor, window_size: tuple[int, int], backend: str = 'auto') -> Tensor:
    """Expand a bias table as :func:`swin_dense.windows.relative_position_bias` does, by a kernel where one may run.

    Args:
        table: ((2 * window height - 1) * (2 * window width - 1), A).
        window_size: (height, width) in tokens.
        backend: of the attention that takes the result.

    Returns:
        (A, T, T).
    """
    # Whoever records a graph fuses this with what is around it.
    is_plain = surroundings.is_rewritten() or backend not in ('auto', 'triton') or not gpu.is_gpu(table)
    if is_plain or gpu.reason_not_to_run(table):
        return windows.relative_position_bias(table, window_size)
    if backend == 'auto' and proof.reason_against_bias(window_size, table.dtype, table.device):
        return windows.relative_position_bias(table, window_size)
    return bias.relative_position_bias(table, window_size)


def _choose(
    backend: str,
    qkv: Tensor,
    relative_bias: Tensor | None,
    window_size: tuple[int, int],
    num_heads: int,
    dropout_p: float,
) -> ModuleType:
    is_automatic = backend == 'auto'
    if not is_automatic:
        checks.one_of('backend', backend, BACKENDS)
    if surroundings.is_exported():
        return recorded
    names: tuple[str, ...] = _AUTOMATIC if is_automatic else (backend,)
    if surroundings.reason_for_plain_operations(qkv):  # the textbook serves whoever the backend cannot
        names = (*names, 'reference')
    refused: list[str] = []
    for name in names:
        reason = _BACKENDS[name].reason_not_to_run(qkv, window_size, num_heads, dropout_p)
        if reason is None and is_automatic and name == 'triton':
            reason = _reason_not_to_prefer_triton(qkv, relative_bias, window_size, num_heads)
        if reason is None:
            if is_automatic and not surroundings.is_recorded():  # a log line would break the graph
                _log_once(name, tuple(refused))
            return _BACKENDS[name]
        refused.append(f'{name}: {reason}')
    hint = '' if is_automatic else '; use backend="auto"'
    raise RuntimeError(f'window attention cannot run here: {"; ".join(refused)}{hint}')


def _reason_not_to_prefer_triton(
    qkv: Tensor, relative_bias: Tensor | None, window_size: tuple[int, int], num_heads: int
) -> str | None:
    if not gpu.is_gpu(qkv):
        return 'its interpreter is for tests'
    # torch.compile looks into torch.func by itself.
    if not surroundings.is_recorded() and surroundings.is_transformed():
        return 'torch.func transforms what runs'
    bias_dtype = qkv.dtype if relative_bias is None else relative_bias.dtype
    head_dim = qkv.shape[-1] // 3 // num_heads
    return proof.reason_against_attention(head_dim, window_size, qkv.dtype, bias_dtype, qkv.device)


@functools.lru_cache(maxsize=32)
def _log_once(name: str, refused: tuple[str, ...]) -> None:
    _logger.info('window attention uses backend %r%s', name, f' ({"; ".join(refused)})' if refused else '')

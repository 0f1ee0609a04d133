"""Shifted-window attention: one front door, one module per backend.

A backend module has a ``window_attention`` with the arguments of the front door (less ``backend``), all of them
given, and a ``reason_not_to_run(qkv, window_size, num_heads, dropout_p)`` that says why it cannot serve such an
input here, or None. Standard blocks on a CPU do not come here: ``branches`` computes them whole.
"""

from __future__ import annotations

import functools
import logging
from types import ModuleType

import torch
from torch import Tensor

from swin_dense import checks
from swin_dense.ops import cpp, reference, sdpa, triton

_logger = logging.getLogger(__name__)

_BACKENDS: dict[str, ModuleType] = {'triton': triton, 'sdpa': sdpa, 'cpp': cpp, 'reference': reference}
# What 'auto' tries, in this order. reference is the oracle of the tests; triton has not been run on a GPU yet, and
# until then nobody gets it unasked.
_AUTOMATIC = ('sdpa',)

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
    module = _choose(backend, qkv, window_size, num_heads, dropout_p)
    if scale is None:
        scale = (qkv.shape[-1] // 3 // num_heads) ** -0.5
    return module.window_attention(qkv, relative_bias, pad_kv, num_heads, window_size, shift, scale, dropout_p)


def _choose(backend: str, qkv: Tensor, window_size: tuple[int, int], num_heads: int, dropout_p: float) -> ModuleType:
    if backend != 'auto':
        checks.one_of('backend', backend, BACKENDS)
        reason = _BACKENDS[backend].reason_not_to_run(qkv, window_size, num_heads, dropout_p)
        if reason:
            raise RuntimeError(f'backend {backend!r} cannot run here: {reason}; use backend="auto"')
        return _BACKENDS[backend]
    refused: list[str] = []
    for name in _AUTOMATIC:
        module = _BACKENDS[name]
        reason = module.reason_not_to_run(qkv, window_size, num_heads, dropout_p)
        if reason is None:
            if not torch.compiler.is_compiling():  # a log line would break the graph
                _log_once(name, tuple(refused))
            return module
        refused.append(f'{name}: {reason}')
    raise RuntimeError(f'no backend can run: {"; ".join(refused)}')


@functools.lru_cache(maxsize=32)
def _log_once(name: str, refused: tuple[str, ...]) -> None:
    _logger.info('window attention uses backend %r%s', name, f' ({"; ".join(refused)})' if refused else '')

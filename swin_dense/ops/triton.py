"""Window attention as one Triton kernel forward and one or two backward: for CUDA.

It takes qkv as one linear layer leaves it and returns what the next one takes; the scores never leave the chip. The
backward pass computes them again from qkv and one number per query, and adds nothing up in an order left to chance, so
the same input gives the same bits. See ``docs/decisions/triton-kernel.md``.

The kernels stand in :mod:`swin_dense.ops.triton_kernels`. To torch they are two operators, opaque to
``torch.compile`` and ``torch.export``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from swin_dense.ops.reference import REGION_PENALTY
from swin_dense.windows import Pair, window_grid

try:
    import triton

    from swin_dense.ops import triton_kernels as kernels
except ImportError as error:
    _unusable: str | None = f'triton cannot be imported ({error})'
    IS_INTERPRETED = False
else:
    _unusable = None
    if TorchVersion(triton.__version__) < '3.6':
        _unusable = f'triton {triton.__version__} is older than 3.6, the first to take all that the kernels use'
    IS_INTERPRETED = kernels.IS_INTERPRETED.value

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HEAD_DIMS = (16, 32, 64)
MAX_TOKENS = 256

# Enough programs to balance the load, few enough that the bias which each reads serves many windows and that the
# bias gradients which each writes stay small.
_PROGRAMS_PER_MULTIPROCESSOR = 8


def reason_not_to_run(qkv: Tensor, window_size: Pair, num_heads: int, dropout_p: float) -> str | None:
    if _unusable is not None:
        return _unusable
    if not (qkv.is_cuda or IS_INTERPRETED):
        return f'qkv is on {qkv.device}, not on a CUDA device (for tests without one, set TRITON_INTERPRET=1)'
    if qkv.is_cuda and torch.cuda.get_device_properties(qkv.device).major < 8:
        return 'triton needs a GPU of compute capability 8.0 or later'
    if qkv.dtype not in DTYPES:
        return f'qkv is {qkv.dtype}, not float32, float16 or bfloat16'
    head_dim = qkv.shape[-1] // 3 // num_heads
    if head_dim not in HEAD_DIMS:
        return f'the head dimension is {head_dim}, not one of {HEAD_DIMS}'
    if window_size[0] * window_size[1] > MAX_TOKENS:
        return f'a window has {window_size[0]} x {window_size[1]} tokens, more than {MAX_TOKENS}'
    if dropout_p > 0:
        return 'the attention weights, which dropout acts on, are never stored'
    return None


def window_attention(
    qkv: Tensor,
    relative_bias: Tensor | None,
    pad_kv: Tensor | None,
    num_heads: int,
    window_size: Pair,
    shift: Pair,
    scale: float,
    dropout_p: float,
) -> Tensor:
    """See :func:`swin_dense.ops.window_attention`."""
    if relative_bias is None:
        tokens = window_size[0] * window_size[1]
        relative_bias = qkv.new_zeros(num_heads, tokens, tokens)
    if pad_kv is None:
        pad_kv = qkv.new_zeros(qkv.shape[-1] // 3 * 2)
    return _forward(qkv, relative_bias, pad_kv, num_heads, window_size, shift, scale)[0]


_GEOMETRY = 'int num_heads, int[] window_size, int[] shift, float scale'


@torch.library.custom_op(
    'swin_dense::triton_window_attention',
    mutates_args=(),
    schema=f'(Tensor qkv, Tensor relative_bias, Tensor pad_kv, {_GEOMETRY}) -> (Tensor, Tensor)',
)
def _forward(
    qkv: Tensor,
    relative_bias: Tensor,
    pad_kv: Tensor,
    num_heads: int,
    window_size: Sequence[int],
    shift: Sequence[int],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return the output and, for the backward pass, the log-sum-exp of every query's scores."""
    qkv, relative_bias, pad_kv = qkv.contiguous(), relative_bias.contiguous(), pad_kv.contiguous()
    out, lse = _forward_fake(qkv, relative_bias, pad_kv, num_heads, window_size, shift, scale)
    launch = _Launch(qkv, num_heads, window_size, shift, scale)
    launch(kernels.forward, qkv, relative_bias, pad_kv, out, lse)
    return out, lse


@_forward.register_fake
def _forward_fake(
    qkv: Tensor,
    relative_bias: Tensor,
    pad_kv: Tensor,
    num_heads: int,
    window_size: Sequence[int],
    shift: Sequence[int],
    scale: float,
) -> tuple[Tensor, Tensor]:
    batch, height, width, channels = qkv.shape[0], qkv.shape[1], qkv.shape[2], qkv.shape[3] // 3
    rows, columns = window_grid(height, width, (window_size[0], window_size[1]))
    out = qkv.new_empty(batch, height, width, channels)
    tokens = window_size[0] * window_size[1]
    return out, qkv.new_empty(batch * rows * columns, num_heads, tokens, dtype=torch.float32)


@torch.library.custom_op(
    'swin_dense::triton_window_attention_backward',
    mutates_args=(),
    schema='(Tensor grad_out, Tensor qkv, Tensor relative_bias, Tensor pad_kv, Tensor out, Tensor lse, '
    f'{_GEOMETRY}) -> (Tensor, Tensor, Tensor)',
)
def _backward(
    grad_out: Tensor,
    qkv: Tensor,
    relative_bias: Tensor,
    pad_kv: Tensor,
    out: Tensor,
    lse: Tensor,
    num_heads: int,
    window_size: Sequence[int],
    shift: Sequence[int],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of qkv, relative_bias and pad_kv."""
    grad_out, qkv = grad_out.contiguous(), qkv.contiguous()
    relative_bias, pad_kv = relative_bias.contiguous(), pad_kv.contiguous()
    launch = _Launch(qkv, num_heads, window_size, shift, scale)
    grad_qkv = qkv.new_empty(qkv.shape)
    grad_bias = qkv.new_zeros(launch.strips, *relative_bias.shape, dtype=torch.float32)
    grad_pad = qkv.new_empty(launch.strips * launch.tiles, *pad_kv.shape, dtype=torch.float32)
    delta = torch.empty_like(lse)
    if launch.tiles > 1:
        launch(kernels.backward_queries, grad_out, qkv, relative_bias, pad_kv, out, lse, delta, grad_qkv)
    launch(kernels.backward_keys, grad_out, qkv, relative_bias, pad_kv, lse, delta, grad_qkv, grad_bias, grad_pad)
    return grad_qkv, grad_bias.sum(0).to(relative_bias.dtype), grad_pad.sum(0).to(pad_kv.dtype)


@_backward.register_fake
def _backward_fake(
    grad_out: Tensor,
    qkv: Tensor,
    relative_bias: Tensor,
    pad_kv: Tensor,
    out: Tensor,
    lse: Tensor,
    num_heads: int,
    window_size: Sequence[int],
    shift: Sequence[int],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return qkv.new_empty(qkv.shape), relative_bias.new_empty(relative_bias.shape), pad_kv.new_empty(pad_kv.shape)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    qkv, relative_bias, pad_kv, *ctx.geometry = inputs
    ctx.save_for_backward(qkv, relative_bias, pad_kv, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grad_out: Tensor, _: None) -> tuple[Tensor | None, ...]:
    return (*_backward(grad_out, *ctx.saved_tensors, *ctx.geometry), None, None, None, None)


_forward.register_autograd(_gradients, setup_context=_save_for_backward)


class _Launch:
    """How kernels are cut into programs for one input.

    Attributes:
        tiles: into how many tiles the queries, and the keys, of a window are cut.
        strips: how many programs share the windows of one head and tile.
    """

    def __init__(
        self, qkv: Tensor, num_heads: int, window_size: Sequence[int], shift: Sequence[int], scale: float
    ) -> None:
        batch, height, width, channels = qkv.shape[0], qkv.shape[1], qkv.shape[2], qkv.shape[3] // 3
        rows, columns = window_grid(height, width, (window_size[0], window_size[1]))
        windows = batch * rows * columns
        head_dim = channels // num_heads
        block = _block(window_size[0] * window_size[1], head_dim, qkv.dtype)
        self.tiles = -(-window_size[0] * window_size[1] // block)
        programs = _PROGRAMS_PER_MULTIPROCESSOR * _multiprocessors(qkv.device)
        wanted = -(-programs // (num_heads * self.tiles))
        windows_each = max(1, -(-windows // wanted))
        self.strips = -(-windows // windows_each)
        self._qkv = qkv
        self._grid = (self.strips * self.tiles * num_heads,)
        is_heavy = qkv.dtype == torch.float32 or head_dim == 64
        self._arguments = {
            'scale': scale,
            'windows': windows,
            'height': height,
            'width': width,
            'shift_y': shift[0],
            'shift_x': shift[1],
            'heads': num_heads,
            'strips': self.strips,
            'HEAD_DIM': head_dim,
            'WINDOW': tuple(window_size),
            'PENALTY': REGION_PENALTY,
            'BLOCK': block,
            'num_warps': (2 if block == 16 else 4) * (2 if is_heavy else 1),
            'num_stages': 1 if qkv.dtype == torch.float32 else 2,
            'enable_fp_fusion': True,
        }

    def __call__(self, kernel: Any, *tensors: Tensor) -> None:
        if self._grid[0] == 0:
            return
        with torch.cuda.device_of(self._qkv):
            kernel[self._grid](*tensors, **self._arguments)


def _block(tokens: int, head_dim: int, dtype: torch.dtype) -> int:
    """Return the side of the square tiles of scores, a power of two."""
    if tokens <= 32:
        return 16 if tokens <= 16 else 32
    if dtype == torch.float32 and head_dim == 64:
        return 32  # a tile of 64 does not fit into the registers
    padded = {block: -(-tokens // block) * block for block in (64, 32)}
    return min(padded, key=padded.__getitem__)


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == 'cuda' else 1

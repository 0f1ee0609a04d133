"""Window attention in Triton for CUDA: one kernel in the forward pass and one or two in the backward pass.

The kernels read the output of the qkv layer and write the input of the projection layer without any rearrangement, and
never write the scores to memory. The backward pass recomputes them from qkv and one number per query. All sums have a
fixed order, so the results are deterministic. See ``docs/decisions/triton-kernel.md``.

The kernels are in :mod:`swin_dense.ops.triton.attention_kernels`. They are registered as two torch operators, which
``torch.compile`` treats as opaque.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from swin_dense.ops.triton import gpu
from swin_dense.ops.windows import REGION_PENALTY, Pair, WindowSpec, window_grid
from swin_dense.utils import compat

with contextlib.suppress(Exception):  # :mod:`swin_dense.ops.triton.gpu` records the reason
    from swin_dense.ops.triton import attention_kernels as kernels

HEAD_DIMS = (16, 32, 64)
MAX_TOKENS = 256

# Enough programs to balance the load, but few enough that each reuses its bias tile for many windows, and that the bias
# gradients, one copy per strip of programs, stay small.
_PROGRAMS_PER_MULTIPROCESSOR = 8


def unsupported_reason(qkv: Tensor, spec: WindowSpec) -> str | None:
    reason = gpu.unsupported_reason(qkv)
    if reason is not None:
        return reason
    head_dim = qkv.shape[-1] // 3 // spec.num_heads
    if head_dim not in HEAD_DIMS:
        return f'the head dimension is {head_dim}, not one of {HEAD_DIMS}'
    if spec.tokens > MAX_TOKENS:
        return f'a window has {spec.window[0]} x {spec.window[1]} tokens, more than {MAX_TOKENS}'
    if spec.dropout > 0:
        return 'dropout of attention weights is not supported, because they are never stored'
    return None


def window_attention(qkv: Tensor, relative_bias: Tensor | None, pad_kv: Tensor | None, spec: WindowSpec) -> Tensor:
    """See :func:`swin_dense.ops.window_attention`."""
    channels, bias_shape = qkv.shape[-1] // 3, (spec.num_heads, spec.tokens, spec.tokens)
    if relative_bias is None:
        relative_bias = qkv.new_zeros(bias_shape)
    if pad_kv is None:
        pad_kv = qkv.new_zeros(2 * channels)
    if relative_bias.shape != bias_shape or pad_kv.shape != (2 * channels,):
        raise ValueError(  # otherwise a kernel would read out of bounds
            f'relative_bias and pad_kv must have the shapes {bias_shape} and {(2 * channels,)}, '
            f'got {tuple(relative_bias.shape)} and {tuple(pad_kv.shape)}'
        )
    return _forward(qkv, relative_bias, pad_kv, spec.num_heads, spec.window, spec.shift, spec.scale)[0]


_GEOMETRY = 'int num_heads, int[] window_size, int[] shift, float scale'


@compat.custom_op(
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
    """Return the output and, for the backward pass, the log-sum-exp of the scores of each query."""
    launch = _Launch.of(qkv, num_heads, window_size, shift, scale)
    qkv, pad_kv, relative_bias = qkv.contiguous(), pad_kv.contiguous(), launch.prepare(relative_bias)
    out, lse = _forward_fake(qkv, relative_bias, pad_kv, num_heads, window_size, shift, scale)
    launch(kernels.forward, qkv, relative_bias, pad_kv, out, lse, bias=relative_bias)
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


@compat.custom_op(
    'swin_dense::triton_window_attention_backward',
    mutates_args=(),
    schema='(Tensor grad_out, Tensor qkv, Tensor relative_bias, Tensor pad_kv, Tensor out, Tensor lse, '
    f'{_GEOMETRY}) -> (Tensor, Tensor)',
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
) -> tuple[Tensor, Tensor]:
    """Return the gradient of qkv, and one float32 vector: the gradients of relative_bias and, per tile, of pad_kv."""
    launch = _Launch.of(qkv, num_heads, window_size, shift, scale)
    grad_qkv, grads = _backward_fake(
        grad_out, qkv, relative_bias, pad_kv, out, lse, num_heads, window_size, shift, scale
    )
    grad_out, qkv, pad_kv = grad_out.contiguous(), qkv.contiguous(), pad_kv.contiguous()
    bias = launch.prepare(relative_bias)
    new = qkv.new_empty if launch.tiles == 1 else qkv.new_zeros  # with several tiles, the kernel accumulates into it
    partials = new(launch.strips, len(grads), dtype=torch.float32)
    delta = torch.empty_like(lse)
    if launch.tiles > 1:
        launch(kernels.backward_queries, grad_out, qkv, bias, pad_kv, out, lse, delta, grad_qkv, bias=bias)
    launch(kernels.backward_keys, grad_out, qkv, bias, pad_kv, lse, delta, grad_qkv, partials, bias=bias)
    return grad_qkv, partials.sum(0)


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
) -> tuple[Tensor, Tensor]:
    tokens, head_dim = relative_bias.shape[-1], qkv.shape[-1] // 3 // num_heads
    numbers = num_heads * tokens**2 + tiles(tokens, head_dim, qkv.dtype) * len(pad_kv)
    return qkv.new_empty(qkv.shape), qkv.new_empty(numbers, dtype=torch.float32)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    qkv, relative_bias, pad_kv, *ctx.geometry = inputs
    ctx.save_for_backward(qkv, relative_bias, pad_kv, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grad_out: Tensor, _: None) -> tuple[Tensor | None, ...]:
    qkv, relative_bias, pad_kv, *outputs = ctx.saved_tensors
    grad_qkv, grads = _backward(grad_out, qkv, relative_bias, pad_kv, *outputs, *ctx.geometry)
    grad_bias, grad_pad = grads.split([relative_bias.numel(), len(grads) - relative_bias.numel()])
    grad_pad = grad_pad if len(grad_pad) == len(pad_kv) else grad_pad.view(-1, len(pad_kv)).sum(0)
    grad_bias = grad_bias.view_as(relative_bias).to(relative_bias.dtype)
    return grad_qkv, grad_bias, grad_pad.to(pad_kv.dtype), None, None, None, None


_forward.register_autograd(_gradients, setup_context=_save_for_backward)


class _Launch:
    """The launch grid and the arguments of the kernels for one input.

    Attributes:
        tiles: number of tiles into which the queries, and the keys, of a window are divided.
        strips: number of programs that share the windows of one head and tile.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        num_heads: int,
        window_size: Pair,
        shift: Pair,
        scale: float,
    ) -> None:
        batch, height, width, channels = shape[0], shape[1], shape[2], shape[3] // 3
        rows, columns = window_grid(height, width, window_size)
        windows, tokens, head_dim = batch * rows * columns, window_size[0] * window_size[1], channels // num_heads
        tuning = parameters(tokens, head_dim, dtype)
        self.tiles = tiles(tokens, head_dim, dtype)
        programs = _PROGRAMS_PER_MULTIPROCESSOR * gpu.multiprocessors(device)
        wanted = -(-programs // (num_heads * self.tiles))
        windows_each = max(1, -(-windows // wanted))
        self.strips = -(-windows // windows_each)
        self._grid = (self.strips * self.tiles * num_heads,)
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
            'WINDOW': window_size,
            'PENALTY': REGION_PENALTY,
            'enable_fp_fusion': True,
            **tuning,
        }

    @classmethod
    def of(cls, qkv: Tensor, num_heads: int, window_size: Sequence[int], shift: Sequence[int], scale: float) -> _Launch:
        """Return the launch for an input, which is cached by its shape, dtype and device."""
        window, by = (window_size[0], window_size[1]), (shift[0], shift[1])
        return _launch(tuple(qkv.shape), qkv.dtype, qkv.device, num_heads, window, by, scale)

    def prepare(self, bias: Tensor) -> Tensor:
        """Return the bias in the layout that the kernels read: contiguous if a window has several tiles."""
        return bias if self.tiles == 1 else bias.contiguous()

    def __call__(self, kernel: Any, *tensors: Tensor, bias: Tensor) -> None:
        if self._grid[0] == 0:
            return
        strides = dict(zip(('bias_head', 'bias_query', 'bias_key'), bias.stride(), strict=True))
        with torch.cuda.device_of(bias):
            kernel[self._grid](*tensors, **strides, **self._arguments)


_launch = functools.lru_cache(maxsize=1024)(_Launch)


def tiles(tokens: int, head_dim: int, dtype: torch.dtype) -> int:
    """Return the number of tiles into which the queries, and the keys, of a window are divided."""
    return -(-tokens // parameters(tokens, head_dim, dtype)['BLOCK'])


def parameters(tokens: int, head_dim: int, dtype: torch.dtype) -> dict[str, int]:
    """Return the launch parameters of the kernels for a window size: tile size, warps and stages."""
    block = _block(tokens, head_dim, dtype)
    is_heavy = dtype == torch.float32 or head_dim == 64
    return {
        'BLOCK': block,
        'num_warps': (2 if block == 16 else 4) * (2 if is_heavy else 1),
        'num_stages': 1 if dtype == torch.float32 else 2,
    }


def _block(tokens: int, head_dim: int, dtype: torch.dtype) -> int:
    """Return the side of the square tiles of scores, which is a power of two."""
    if tokens <= 32:
        return 16 if tokens <= 16 else 32
    if dtype == torch.float32 and head_dim == 64:
        return 32  # a tile of side 64 does not fit into registers
    padded = {block: -(-tokens // block) * block for block in (64, 32)}
    return min(padded, key=padded.__getitem__)

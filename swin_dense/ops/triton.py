"""Window attention as one Triton kernel forward and one or two backward: for CUDA.

It takes qkv as one linear layer leaves it and returns what the next one takes; the scores never leave the chip. The
backward pass computes them again from qkv and one number per query, and adds nothing up in an order left to chance, so
the same input gives the same bits. See ``docs/decisions/triton-kernel.md``.

The kernels stand in :mod:`swin_dense.ops.triton_kernels`. To torch they are two operators, opaque to
``torch.compile``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from swin_dense import compat
from swin_dense.ops import gpu
from swin_dense.ops.reference import REGION_PENALTY
from swin_dense.windows import Pair, window_grid

try:
    from swin_dense.ops import partial_sums
    from swin_dense.ops import triton_kernels as kernels
except Exception:  # the reason is known to :mod:`swin_dense.ops.gpu`
    pass

HEAD_DIMS = (16, 32, 64)
MAX_TOKENS = 256

# Enough programs to balance the load, few enough that the bias which each reads serves many windows and that the
# bias gradients which each writes stay small.
_PROGRAMS_PER_MULTIPROCESSOR = 8


def reason_not_to_run(qkv: Tensor, window_size: Pair, num_heads: int, dropout_p: float) -> str | None:
    reason = gpu.reason_not_to_run(qkv)
    if reason is not None:
        return reason
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
    tokens, channels = window_size[0] * window_size[1], qkv.shape[-1] // 3
    if relative_bias is None:
        relative_bias = qkv.new_zeros(num_heads, tokens, tokens)
    if pad_kv is None:
        pad_kv = qkv.new_zeros(2 * channels)
    if relative_bias.shape != (num_heads, tokens, tokens) or pad_kv.shape != (2 * channels,):
        raise ValueError(  # a kernel would read beyond them
            f'relative_bias and pad_kv must have the shapes {(num_heads, tokens, tokens)} and {(2 * channels,)}, '
            f'got {tuple(relative_bias.shape)} and {tuple(pad_kv.shape)}'
        )
    return _forward(qkv, relative_bias, pad_kv, num_heads, window_size, shift, scale)[0]


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
    """Return the output and, for the backward pass, the log-sum-exp of every query's scores."""
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
    launch = _Launch.of(qkv, num_heads, window_size, shift, scale)
    grads = _backward_fake(grad_out, qkv, relative_bias, pad_kv, out, lse, num_heads, window_size, shift, scale)
    grad_out, qkv, pad_kv = grad_out.contiguous(), qkv.contiguous(), pad_kv.contiguous()
    bias = launch.prepare(relative_bias)
    new = qkv.new_empty if launch.tiles == 1 else qkv.new_zeros  # several tiles add to what is there
    bias_partials = new(launch.strips, *bias.shape, dtype=torch.float32)
    pad_partials = qkv.new_empty(launch.strips * launch.tiles, *pad_kv.shape, dtype=torch.float32)
    delta = torch.empty_like(lse)
    if launch.tiles > 1:
        launch(kernels.backward_queries, grad_out, qkv, bias, pad_kv, out, lse, delta, grads[0], bias=bias)
    launch(
        kernels.backward_keys,
        *(grad_out, qkv, bias, pad_kv, lse, delta, grads[0], bias_partials, pad_partials),
        bias=bias,
    )
    partial_sums.add_up(bias_partials, grads[1], pad_partials, grads[2])
    return grads


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
    # The gradient of the bias has the strides of the bias, which whoever expanded it finds easiest to undo.
    return qkv.new_empty(qkv.shape), torch.empty_like(relative_bias), pad_kv.new_empty(pad_kv.shape)


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
        self.tiles = -(-tokens // tuning['BLOCK'])
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
        """Return the launch for an input; it is worked out once."""
        window, by = (window_size[0], window_size[1]), (shift[0], shift[1])
        return _launch(tuple(qkv.shape), qkv.dtype, qkv.device, num_heads, window, by, scale)

    def prepare(self, bias: Tensor) -> Tensor:
        """Return the bias as the kernels read it: where a window has several tiles, over and over."""
        return bias if self.tiles == 1 else bias.contiguous()

    def __call__(self, kernel: Any, *tensors: Tensor, bias: Tensor) -> None:
        if self._grid[0] == 0:
            return
        strides = dict(zip(('bias_head', 'bias_query', 'bias_key'), bias.stride(), strict=True))
        with torch.cuda.device_of(bias):
            kernel[self._grid](*tensors, **strides, **self._arguments)


_launch = functools.lru_cache(maxsize=1024)(_Launch)


def parameters(tokens: int, head_dim: int, dtype: torch.dtype) -> dict[str, int]:
    """Return the launch parameters of the kernels for windows of so many tokens: tile, warps and stages."""
    block = _block(tokens, head_dim, dtype)
    is_heavy = dtype == torch.float32 or head_dim == 64
    return {
        'BLOCK': block,
        'num_warps': (2 if block == 16 else 4) * (2 if is_heavy else 1),
        'num_stages': 1 if dtype == torch.float32 else 2,
    }


def _block(tokens: int, head_dim: int, dtype: torch.dtype) -> int:
    """Return the side of the square tiles of scores, a power of two."""
    if tokens <= 32:
        return 16 if tokens <= 16 else 32
    if dtype == torch.float32 and head_dim == 64:
        return 32  # a tile of 64 does not fit into the registers
    padded = {block: -(-tokens // block) * block for block in (64, 32)}
    return min(padded, key=padded.__getitem__)


def _forward_cost(qkv: Tensor, bias: Tensor, pad_kv: Tensor, num_heads: int, *geometry: Any) -> gpu.OperatorCost:
    launch = _Launch.of(qkv, num_heads, *geometry)
    out, lse = _forward_fake(qkv, bias, pad_kv, num_heads, *geometry)
    copies = _copied(launch, bias, qkv, pad_kv)
    moved = _bytes(qkv, bias, pad_kv, out, lse) + 2 * _bytes(*copies)
    return gpu.OperatorCost(1 + len(copies), moved, _flops(qkv, bias, products=2))


def _backward_cost(
    grad: Tensor,
    qkv: Tensor,
    bias: Tensor,
    pad_kv: Tensor,
    out: Tensor,
    lse: Tensor,
    num_heads: int,
    *geometry: Any,
) -> gpu.OperatorCost:
    launch = _Launch.of(qkv, num_heads, *geometry)
    copies = _copied(launch, bias, qkv, pad_kv, grad)
    partials = 4 * launch.strips * (bias.numel() + launch.tiles * pad_kv.numel())
    read = _bytes(grad, qkv, bias, pad_kv, lse)
    moved = read + _bytes(qkv, bias, pad_kv) + 2 * partials + 2 * _bytes(*copies)
    if launch.tiles == 1:
        return gpu.OperatorCost(2 + len(copies), moved, _flops(qkv, bias, products=5))
    # Zeros for the partial sums, and queries' gradients by a kernel of their own, which also leaves delta behind.
    moved += 4 * launch.strips * bias.numel() + read + _bytes(out, lse, lse)
    return gpu.OperatorCost(4 + len(copies), moved, _flops(qkv, bias, products=7))


def _copied(launch: _Launch, bias: Tensor, *others: Tensor) -> list[Tensor]:
    """Return what the operator copies before it launches a kernel."""
    copies = [x for x in others if not x.is_contiguous()]
    return copies if launch.tiles == 1 or bias.is_contiguous() else [bias, *copies]


def _bytes(*tensors: Tensor) -> int:
    return sum(x.nbytes for x in tensors)


def _flops(qkv: Tensor, bias: Tensor, products: int) -> int:
    return 2 * products * (qkv.numel() // 3) * bias.shape[-1]


gpu.COSTS['swin_dense::triton_window_attention'] = _forward_cost
gpu.COSTS['swin_dense::triton_window_attention_backward'] = _backward_cost

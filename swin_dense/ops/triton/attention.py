"""Window attention in Triton for CUDA: one kernel in the forward pass and one to three in the backward pass.

The kernels read the output of the qkv layer and the table of the position bias, write the input of the projection layer
in raster order, and never write the scores to memory. The backward pass recomputes them from qkv and one number per
query. All sums have a fixed order, so the results are deterministic. See ``docs/decisions/triton-kernel.md``.

The kernels are in :mod:`swin_dense.ops.triton.attention_kernels`. In eager mode an autograd function calls them,
because a call of a registered operator takes longer than the launch of a kernel. ``torch.compile`` records two
operators, which it treats as opaque.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from swin_dense.ops import context, layout
from swin_dense.ops.reference import Projection
from swin_dense.ops.triton import gpu
from swin_dense.ops.triton.launch import Launch
from swin_dense.ops.windows import (
    REGION_PENALTY,
    Size,
    WindowSpec,
    relative_position_bias,
    window_grid,
)
from swin_dense.utils import compat
from swin_dense.utils.private import count_modes

with contextlib.suppress(Exception):  # :mod:`swin_dense.ops.triton.gpu` records the reason
    from swin_dense.ops.triton import attention_kernels as kernels

HEAD_DIMS = (16, 32, 64)
MAX_TOKENS = 256

# Enough programs to balance the load, but few enough that each reuses its bias tile for many windows, and that the bias
# gradients, one copy per strip of programs, stay small.
_PROGRAMS_PER_MULTIPROCESSOR = 8


def unsupported_reason(
    x: Tensor,
    spec: WindowSpec,
    dropout: float = 0.0,
) -> str | None:
    """Return why the kernel cannot run on a map, (B, H, W, C), or None."""
    reason = gpu.unsupported_reason(x)
    if reason is not None:
        return reason
    head_dim = x.shape[-1] // spec.num_heads
    if head_dim not in HEAD_DIMS:
        return f'the head dimension is {head_dim}, not one of {HEAD_DIMS}'
    if spec.window[0] * spec.window[1] > MAX_TOKENS:
        return f'a window has {spec.window[0]} x {spec.window[1]} tokens, more than {MAX_TOKENS}'
    if dropout > 0:
        return 'dropout of attention weights is not supported, because they are never stored'
    return None


def check_supported(x: Tensor, spec: WindowSpec, dropout: float) -> None:
    """Raise RuntimeError if the kernel cannot run on a map, (B, H, W, C)."""
    reason = unsupported_reason(x, spec, dropout)
    if reason is not None:
        raise RuntimeError(f'attn_backend="triton" cannot run here: {reason}; use attn_backend="auto"')


def attend_by_kernel(
    x: Tensor,
    project: Projection,
    table: Tensor | None,
    spec: WindowSpec,
    is_tracing: bool,
) -> Tensor:
    """See :func:`swin_dense.ops.window_attention`; without dropout, and where the kernel can run."""
    size = x.shape[1], x.shape[2]
    qkv = project(layout.pad_to_multiple(x, spec.window))
    shape = (offsets(spec.window), spec.num_heads)
    if table is None:
        table = qkv.new_zeros(shape)
    if table.shape != shape or table.device != qkv.device:  # the kernel would read out of bounds
        raise ValueError(
            f'the table of the position bias must have the shape {shape} on {qkv.device}, '
            f'got {tuple(table.shape)} on {table.device}'
        )
    run = _Attention.apply if torch.is_grad_enabled() else forward
    if must_call_operators(is_tracing):
        run = _forward_operator
    out, _ = run(qkv, table, spec.num_heads, spec.window, spec.shift, spec.scale, size)
    return out


def must_call_operators(is_tracing: bool) -> bool:
    """Return whether torch.compile, a torch mode such as FlopCounterMode, or torch.func must see operators."""
    return is_tracing or count_modes() > 0 or context.is_transformed()


# ``size`` is the (height, width) of the map in tokens; that of qkv is a multiple of the window.
_GEOMETRY = 'int num_heads, int[] window_size, int[] shift, float scale, SymInt[] size'


def forward(
    qkv: Tensor,
    table: Tensor,
    num_heads: int,
    window_size: Sequence[int],
    shift: Sequence[int],
    scale: float,
    size: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Return the output and, for the backward pass, the log-sum-exp of the scores of each query."""
    qkv, table = gpu.aligned(qkv.contiguous(), table)
    launches = _launches_of(qkv, table, num_heads, window_size, shift, scale, size)
    out, lse = _empty_outputs(qkv, table, num_heads, window_size, shift, scale, size)
    launches.forward(qkv, launches.bias(table), out, lse)
    return out, lse


def _empty_outputs(
    qkv: Tensor,
    table: Tensor,
    num_heads: int,
    window_size: Sequence[int],
    shift: Sequence[int],
    scale: float,
    size: Sequence[int],
) -> tuple[Tensor, Tensor]:
    batch, height, width, channels = qkv.shape
    window = (window_size[0], window_size[1])
    rows, columns = window_grid(height, width, window)
    windows = batch * rows * columns
    tokens = window[0] * window[1]
    out = qkv.new_empty(batch, size[0], size[1], channels // 3)
    lse = qkv.new_empty(windows, num_heads, tokens, dtype=torch.float32)
    return out, lse


def backward(
    grad_out: Tensor,
    qkv: Tensor,
    table: Tensor,
    out: Tensor,
    lse: Tensor,
    num_heads: int,
    window_size: Sequence[int],
    shift: Sequence[int],
    scale: float,
    size: Sequence[int],
    trains_table: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of qkv and of the table, which is empty unless ``trains_table``."""
    grad_out, qkv, table = gpu.aligned(grad_out.contiguous(), qkv.contiguous(), table)
    launches = _launches_of(qkv, table, num_heads, window_size, shift, scale, size)
    bias = launches.bias(table)
    grad_qkv = torch.empty_like(qkv)
    delta = torch.empty_like(lse)
    if launches.tiles > 1:
        launches.backward_queries(grad_out, qkv, bias, out, lse, delta, grad_qkv)
    if not trains_table:
        launches.backward_keys(grad_out, qkv, bias, lse, delta, grad_qkv, delta)  # nothing is added up
        return grad_qkv, table.new_empty(0)
    tokens = window_size[0] * window_size[1]
    new = qkv.new_empty if launches.tiles == 1 else qkv.new_zeros  # with several tiles, the kernel accumulates into it
    partials = new(launches.strips, num_heads, tokens, tokens, dtype=torch.float32)
    launches.backward_keys_and_bias(grad_out, qkv, bias, lse, delta, grad_qkv, partials)
    grad_table = table.new_empty(table.shape)
    launches.table_gradient(partials, grad_table)
    return grad_qkv, grad_table


def _empty_gradients(
    grad_out: Tensor,
    qkv: Tensor,
    table: Tensor,
    *others: Any,
) -> tuple[Tensor, Tensor]:
    trains_table = others[-1]
    return qkv.new_empty(qkv.shape), table.new_empty(table.shape if trains_table else 0)


def _save_for_backward(
    ctx: Any,
    inputs: tuple[Any, ...],
    output: tuple[Tensor, Tensor],
) -> None:
    qkv, table, *ctx.geometry = inputs
    ctx.save_for_backward(qkv, table, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _gradients(
    ctx: Any,
    grad_out: Tensor,
    _: None,
) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    run: Any = _backward_operator if must_call_operators(compat.is_compiling()) else backward
    trains_table = ctx.needs_input_grad[1]
    grad_qkv, grad_table = run(grad_out, *saved, *ctx.geometry, trains_table)
    return grad_qkv, grad_table if trains_table else None, None, None, None, None, None


class _Attention(torch.autograd.Function):
    """The kernels in eager mode."""

    @staticmethod
    def forward(ctx, *inputs):
        outputs = forward(*inputs)
        _save_for_backward(ctx, inputs, outputs)  # as setup_context, torch would inspect a signature at every call
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        return _gradients(ctx, *grads)


_forward_operator = compat.custom_op(
    'swin_dense::triton_window_attention',
    mutates_args=(),
    schema=f'(Tensor qkv, Tensor table, {_GEOMETRY}) -> (Tensor, Tensor)',
)(forward)
_backward_operator = compat.custom_op(
    'swin_dense::triton_window_attention_backward',
    mutates_args=(),
    schema='(Tensor grad_out, Tensor qkv, Tensor table, Tensor out, Tensor lse, '
    f'{_GEOMETRY}, bool trains_table) -> (Tensor, Tensor)',
)(backward)
_forward_operator.register_fake(_empty_outputs)
_backward_operator.register_fake(_empty_gradients)
_forward_operator.register_autograd(_gradients, setup_context=_save_for_backward)


class _Launches:
    """The launches of the kernels for one input.

    Attributes:
        tiles: number of tiles into which the queries, and the keys, of a window are divided.
        strips: number of programs that share the windows of one head and tile.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        table_strides: Size,
        num_heads: int,
        window_size: Size,
        shift: Size,
        scale: float,
        size: Size,
    ) -> None:
        batch, height, width, channels = shape
        rows, columns = window_grid(height, width, window_size)
        windows = batch * rows * columns
        tokens = window_size[0] * window_size[1]
        head_dim = channels // 3 // num_heads
        tuning = parameters(tokens, head_dim, dtype)
        self.tiles = tiles(tokens, head_dim, dtype)
        programs = _PROGRAMS_PER_MULTIPROCESSOR * gpu.multiprocessors(device)
        wanted = -(-programs // (num_heads * self.tiles))
        windows_each = max(1, -(-windows // wanted))
        self.strips = -(-windows // windows_each)
        self._window = window_size
        numbers = {
            'scale': scale,
            'windows': windows,
            'height': height,
            'width': width,
            'shift_y': shift[0],
            'shift_x': shift[1],
            'out_height': size[0],
            'out_width': size[1],
            'heads': num_heads,
            'strips': self.strips,
            'table_offset': table_strides[0],
            'table_head': table_strides[1],
        }
        constants = {
            'HEAD_DIM': head_dim,
            'WINDOW': window_size,
            'PENALTY': REGION_PENALTY,
            'BLOCK': tuning.pop('BLOCK'),
        }
        grid = self.strips * self.tiles * num_heads
        options = {'enable_fp_fusion': True, **tuning}
        self.forward = Launch(kernels.forward, grid, {**numbers, **constants}, options)
        self.backward_queries = Launch(kernels.backward_queries, grid, {**numbers, **constants}, options)
        arguments = {**numbers, **constants, 'TRAINS_BIAS': False}
        self.backward_keys = Launch(kernels.backward_keys, grid, arguments, options)
        arguments = {**arguments, 'TRAINS_BIAS': True}
        self.backward_keys_and_bias = Launch(kernels.backward_keys, grid, arguments, options)
        pairs = gpu.power_of_two(tokens)
        self.table_gradient = Launch(
            kernels.table_gradient,
            offsets(window_size) * num_heads,
            {
                'heads': num_heads,
                'strips': self.strips,
                'WINDOW': window_size,
                'PAIRS': pairs,
                'STRIPS': max(1, 1024 // pairs),
            },
            {'num_warps': 4},
        )

    def bias(self, table: Tensor) -> Tensor:
        """Return the bias as kernels read it: the table if a window is one tile, else that of all pairs of tokens."""
        return table if self.tiles == 1 else relative_position_bias(table, self._window).contiguous()


_launches = functools.lru_cache(maxsize=1024)(_Launches)


def _launches_of(
    qkv: Tensor,
    table: Tensor,
    num_heads: int,
    window_size: Sequence[int],
    shift: Sequence[int],
    scale: float,
    size: Sequence[int],
) -> _Launches:
    """Return the launches for an input, which are cached by its shape, dtype and device."""
    pairs = (window_size[0], window_size[1]), (shift[0], shift[1]), scale, (size[0], size[1])
    return _launches(tuple(qkv.shape), qkv.dtype, qkv.device, table.stride(), num_heads, *pairs)


def offsets(window: Size) -> int:
    """Return the number of offsets between two tokens of a window, P."""
    return (2 * window[0] - 1) * (2 * window[1] - 1)


def tiles(tokens: int, head_dim: int, dtype: torch.dtype) -> int:
    """Return the number of tiles into which the queries, and the keys, of a window are divided."""
    return -(-tokens // parameters(tokens, head_dim, dtype)['BLOCK'])


def parameters(
    tokens: int,
    head_dim: int,
    dtype: torch.dtype,
) -> dict[str, int]:
    """Return the launch parameters of the kernels: tile size, warps and stages, the fastest on an H200."""
    block = _block(tokens, head_dim, dtype)
    warps = 4 if block == 64 else 1
    stages = 3
    if dtype == torch.float32:
        stages = 2 if block == 64 else 1
    if head_dim == 64:  # not measured
        warps *= 2
        stages = min(stages, 2)
    return {'BLOCK': block, 'num_warps': warps, 'num_stages': stages}


def _block(tokens: int, head_dim: int, dtype: torch.dtype) -> int:
    """Return the side of the square tiles of scores, which is a power of two."""
    if tokens <= 32:
        return 16 if tokens <= 16 else 32
    if dtype == torch.float32 and head_dim == 64:
        return 32  # a tile of side 64 does not fit into registers
    return 64 if -tokens % 64 <= -tokens % 32 else 32  # the side that needs fewer padding tokens

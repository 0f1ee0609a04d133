"""The partial sums that programs of a kernel leave behind, added up in a fixed order by one more kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from swin_dense.ops.interpreter import cast

_ROWS, _COLUMNS = 32, 128
# What varies from stage to stage must not make triton compile the kernel again.
_VARYING = ['rows', 'columns', 'other_rows', 'other_columns', 'tokens', 'stride_head', 'stride_query', 'stride_key']


@triton.jit
def _sum(partials, rows, column, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        is_inside = (row < rows)[:, None] & (column < columns)[None, :]
        total += tl.load(partials + row.to(tl.int64)[:, None] * columns + column[None, :], mask=is_inside, other=0.0)
    return tl.sum(total, 0)


@triton.jit(do_not_specialize=_VARYING)
def _add_up(
    partials,
    out,
    rows,
    columns,
    tokens,
    stride_head,
    stride_query,
    stride_key,
    other_partials,
    other_out,
    other_rows,
    other_columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    program, programs = tl.program_id(0), tl.cdiv(columns, COLUMNS)
    if program < programs:
        column = program * COLUMNS + tl.arange(0, COLUMNS)
        total = _sum(partials, rows, column, columns, ROWS, COLUMNS)
        head, pair = column // (tokens * tokens), column % (tokens * tokens)
        address = out + head * stride_head + pair // tokens * stride_query + pair % tokens * stride_key
        tl.store(address, cast(total, out.dtype.element_ty), mask=column < columns)
    else:
        column = (program - programs) * COLUMNS + tl.arange(0, COLUMNS)
        total = _sum(other_partials, other_rows, column, other_columns, ROWS, COLUMNS)
        tl.store(other_out + column, cast(total, other_out.dtype.element_ty), mask=column < other_columns)


def add_up(partials: Tensor, out: Tensor, other_partials: Tensor, other_out: Tensor) -> None:
    """Write the sums of two tensors over their first axes, in one launch.

    Args:
        partials: (n, A, T, T), contiguous, float32.
        out: (A, T, T), any strides and dtype.
        other_partials: (m, k), contiguous, float32.
        other_out: (k,), contiguous, any dtype.
    """
    grid = triton.cdiv(out.numel(), _COLUMNS) + triton.cdiv(other_out.numel(), _COLUMNS)
    with torch.cuda.device_of(partials):
        _add_up[(grid,)](
            partials,
            out,
            len(partials),
            out.numel(),
            out.shape[-1],
            *out.stride(),
            other_partials,
            other_out,
            len(other_partials),
            other_out.numel(),
            ROWS=_ROWS,
            COLUMNS=_COLUMNS,
        )

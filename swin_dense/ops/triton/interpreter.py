"""Kernel operations with workarounds for differences between triton's interpreter and a GPU."""

from __future__ import annotations

import triton
import triton.language as tl

from swin_dense.ops.triton import gpu

_IS_INTERPRETED = tl.constexpr(gpu.IS_INTERPRETED)


@triton.jit
def dot(a, b):
    """Multiply matrices; float32 in full precision, not in TF32."""
    if _IS_INTERPRETED:  # the interpreter would multiply the bit patterns of bfloat16
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision='ieee')


@triton.jit
def cast(value, dtype: tl.constexpr):
    """Convert float32 to another dtype, rounding to nearest."""
    if _IS_INTERPRETED and dtype == tl.bfloat16:  # the interpreter would truncate
        bits = value.to(tl.int32, bitcast=True)
        value = (bits + 0x7FFF + ((bits >> 16) & 1)).to(tl.float32, bitcast=True)
    return value.to(dtype)

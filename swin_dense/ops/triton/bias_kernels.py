"""The Triton kernels of the relative position bias; :mod:`swin_dense.ops.triton.bias` launches them.

The row of the table for a pair of tokens q and k is (qy - ky + HEIGHT - 1) * (2 * WIDTH - 1) + qx - kx + WIDTH - 1. The
table, (rows, A), and the bias, (A, T, T), are contiguous.
"""

from __future__ import annotations

import triton
import triton.language as tl

from swin_dense.ops.triton.interpreter import cast


@triton.jit(do_not_specialize=['numbers', 'heads'])
def forward(table, bias, numbers, heads, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Write the bias, ``BLOCK`` elements per program."""
    TOKENS: tl.constexpr = HEIGHT * WIDTH
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    head, query, key = number // (TOKENS * TOKENS), number // TOKENS % TOKENS, number % TOKENS
    down, right = query // WIDTH - key // WIDTH + HEIGHT - 1, query % WIDTH - key % WIDTH + WIDTH - 1
    place = down * (2 * WIDTH - 1) + right
    tl.store(bias + number, tl.load(table + place * heads + head, mask=number < numbers), mask=number < numbers)


@triton.jit(do_not_specialize=['numbers', 'heads'])
def backward(grad, grad_table, numbers, heads, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Write the gradient of the table; each element is the sum over its pairs, key by key."""
    TOKENS: tl.constexpr = HEIGHT * WIDTH
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place, head = number // heads, number % heads
    down, right = place // (2 * WIDTH - 1) - (HEIGHT - 1), place % (2 * WIDTH - 1) - (WIDTH - 1)
    total = tl.zeros((BLOCK,), tl.float32)
    for key in range(TOKENS):
        y, x = key // WIDTH + down, key % WIDTH + right
        is_pair = (number < numbers) & (y >= 0) & (y < HEIGHT) & (x >= 0) & (x < WIDTH)
        address = grad + (head * TOKENS + y * WIDTH + x) * TOKENS + key
        total += tl.load(address, mask=is_pair, other=0.0).to(tl.float32)
    tl.store(grad_table + number, cast(total, grad_table.dtype.element_ty), mask=number < numbers)

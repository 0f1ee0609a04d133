"""The Triton kernels of shifted-window attention; :mod:`swin_dense.ops.triton.attention` launches them.

Each program handles one head, one tile of queries or keys, and every ``strips``-th window. If a window fits into one
tile (64 tokens, or 32 for float32 with a head dimension of 64), the program reads the bias once and keeps it in
registers. Roll and partition are index arithmetic.

Tensors are contiguous and in raster order: qkv (B, H, W, 3C), whose sides are multiples of the window, and out, whose
sides are those of the map before it was padded at the right and bottom.
If a window is one tile, the position bias is read from its table, (P, A) of any strides. Otherwise each window reads it
again, and it is that of all pairs of tokens, (A, T, T). The log-sum-exp of the scores of each query and ``delta`` are
(windows, A, T) in float32. Scores are in units of log 2, because the hardware has an instruction for ``exp2``. Offsets
into maps are 64-bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from swin_dense.ops.triton.attention_tiles import (
    load,
    load_bias,
    load_keys,
    padded_token,
    put_tile,
    scores_of,
    store,
    token_of,
)
from swin_dense.ops.triton.interpreter import cast, dot

# Triton must not recompile a kernel for other values of these arguments, which vary with image size and stage.
_VARYING = ['windows', 'height', 'width', 'shift_y', 'shift_x', 'out_height', 'out_width', 'heads', 'strips']
_VARYING += ['table_offset', 'table_head']


@triton.jit(do_not_specialize=_VARYING)
def forward(
    qkv,
    bias,
    out,
    lse,
    scale,
    windows,
    height,
    width,
    shift_y,
    shift_x,
    out_height,
    out_width,
    heads,
    strips,
    table_offset,
    table_head,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    PENALTY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write ``out`` and ``lse`` of one tile of queries. Grid: strips * tiles * heads."""
    TOKENS: tl.constexpr = WINDOW[0] * WINDOW[1]
    TILES: tl.constexpr = (TOKENS + BLOCK - 1) // BLOCK
    canvas = (height, width, shift_y, shift_x)
    out_size = (out_height, out_width)
    strides = (table_offset, table_head)
    channels = heads * HEAD_DIM
    head = tl.program_id(0) % heads
    part = tl.program_id(0) // heads
    q_start = part % TILES * BLOCK
    query = q_start + tl.arange(0, BLOCK)
    channel = head * HEAD_DIM + tl.arange(0, HEAD_DIM)
    if TILES == 1:
        bias_tile = load_bias(bias, strides, head, 0, 0, WINDOW, BLOCK)

    for window in range(part // TILES, windows, strips):
        token, is_inside = padded_token(window, query, canvas, WINDOW)
        q = load(qkv, token, is_inside, 3 * channels, channel)
        top = tl.full((BLOCK,), float('-inf'), tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        result = tl.zeros((BLOCK, HEAD_DIM), tl.float32)
        for k_start in range(0, TOKENS, BLOCK):
            if TILES > 1:
                bias_tile = load_bias(bias, strides, head, q_start, k_start, WINDOW, BLOCK)
            key = k_start + tl.arange(0, BLOCK)
            k, v = load_keys(qkv, window, key, canvas, channels, channel, WINDOW)
            scores = scores_of(
                q,
                k,
                bias_tile,
                scale,
                window,
                query,
                key,
                canvas,
                WINDOW,
                PENALTY,
            )
            new_top = tl.maximum(top, tl.max(scores, 1))
            weights = tl.exp2(scores - new_top[:, None])
            fade = tl.exp2(top - new_top)
            total = total * fade + tl.sum(weights, 1)
            result = result * fade[:, None] + dot(cast(weights, v.dtype), v)
            top = new_top
        out_token, is_of_map = token_of(window, query, canvas, out_size, WINDOW)
        store(out, out_token, is_of_map, channels, channel, result / total[:, None])
        first = (window * heads + head).to(tl.int64) * TOKENS
        tl.store(lse + first + query, top + tl.log2(total), mask=query < TOKENS)


@triton.jit(do_not_specialize=_VARYING)
def backward_queries(
    grad_out,
    qkv,
    bias,
    out,
    lse,
    delta,
    grad_qkv,
    scale,
    windows,
    height,
    width,
    shift_y,
    shift_x,
    out_height,
    out_width,
    heads,
    strips,
    table_offset,
    table_head,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    PENALTY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the gradient of q and ``delta`` for one tile of queries; only for windows of several tiles.

    ``delta`` is the sum over all keys of the attention weight times its gradient, or the product of the output and its
    gradient, which is at hand before the keys. But the output is rounded, and that error is the same for all keys of a
    query, so it would add up in the gradient of the bias. Here it serves only the gradient of q.
    Grid: strips * tiles * heads.
    """
    TOKENS: tl.constexpr = WINDOW[0] * WINDOW[1]
    TILES: tl.constexpr = (TOKENS + BLOCK - 1) // BLOCK
    canvas = (height, width, shift_y, shift_x)
    out_size = (out_height, out_width)
    strides = (table_offset, table_head)
    channels = heads * HEAD_DIM
    head = tl.program_id(0) % heads
    part = tl.program_id(0) // heads
    q_start = part % TILES * BLOCK
    query = q_start + tl.arange(0, BLOCK)
    channel = head * HEAD_DIM + tl.arange(0, HEAD_DIM)

    for window in range(part // TILES, windows, strips):
        token, is_inside = padded_token(window, query, canvas, WINDOW)
        out_token, is_of_map = token_of(window, query, canvas, out_size, WINDOW)
        first = (window * heads + head).to(tl.int64) * TOKENS
        q = load(qkv, token, is_inside, 3 * channels, channel)
        d_out = load(grad_out, out_token, is_of_map, channels, channel)
        q_out = load(out, out_token, is_of_map, channels, channel)
        q_lse = tl.load(lse + first + query, mask=is_inside, other=float('inf'))
        rounded_delta = tl.sum(d_out.to(tl.float32) * q_out.to(tl.float32), 1)
        q_delta = tl.zeros((BLOCK,), tl.float32)
        d_q = tl.zeros((BLOCK, HEAD_DIM), tl.float32)
        for k_start in range(0, TOKENS, BLOCK):
            bias_tile = load_bias(bias, strides, head, q_start, k_start, WINDOW, BLOCK)
            key = k_start + tl.arange(0, BLOCK)
            k, v = load_keys(qkv, window, key, canvas, channels, channel, WINDOW)
            scores = scores_of(
                q,
                k,
                bias_tile,
                scale,
                window,
                query,
                key,
                canvas,
                WINDOW,
                PENALTY,
            )
            weights = tl.exp2(scores - q_lse[:, None])
            d_weights = dot(d_out, tl.trans(v))
            q_delta += tl.sum(weights * d_weights, 1)
            d_scores = weights * (d_weights - rounded_delta[:, None])
            d_q += dot(cast(d_scores, k.dtype), k)
        tl.store(delta + first + query, q_delta, mask=is_inside)
        store(grad_qkv, token, is_inside, 3 * channels, channel, d_q * scale)


@triton.jit(do_not_specialize=_VARYING)
def backward_keys(
    grad_out,
    qkv,
    bias,
    lse,
    delta,
    grad_qkv,
    partials,
    scale,
    windows,
    height,
    width,
    shift_y,
    shift_x,
    out_height,
    out_width,
    heads,
    strips,
    table_offset,
    table_head,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    PENALTY: tl.constexpr,
    BLOCK: tl.constexpr,
    TRAINS_BIAS: tl.constexpr,
):
    """Write the gradients of k and v for one tile of keys, and, if ``TRAINS_BIAS``, a partial gradient of the bias.

    If the window is one tile, also write the gradient of q. ``partials`` is (strips, A, T, T) in float32, which must be
    zero initially if there are several tiles; :func:`table_gradient` sums it. No two programs write to the same
    element. Grid: strips * tiles * heads.
    """
    TOKENS: tl.constexpr = WINDOW[0] * WINDOW[1]
    TILES: tl.constexpr = (TOKENS + BLOCK - 1) // BLOCK
    canvas = (height, width, shift_y, shift_x)
    out_size = (out_height, out_width)
    strides = (table_offset, table_head)
    channels = heads * HEAD_DIM
    head = tl.program_id(0) % heads
    part = tl.program_id(0) // heads
    k_start = part % TILES * BLOCK
    key = k_start + tl.arange(0, BLOCK)
    channel = head * HEAD_DIM + tl.arange(0, HEAD_DIM)
    if TRAINS_BIAS:
        partials += (part // TILES).to(tl.int64) * heads * TOKENS * TOKENS
        grad_bias = partials + head * TOKENS * TOKENS
    if TILES == 1:
        bias_tile = load_bias(bias, strides, head, 0, 0, WINDOW, BLOCK)
        d_bias = tl.zeros((BLOCK, BLOCK), tl.float32)

    for window in range(part // TILES, windows, strips):
        first = (window * heads + head).to(tl.int64) * TOKENS
        k, v = load_keys(qkv, window, key, canvas, channels, channel, WINDOW)
        d_k = tl.zeros((BLOCK, HEAD_DIM), tl.float32)
        d_v = tl.zeros((BLOCK, HEAD_DIM), tl.float32)
        for q_start in range(0, TOKENS, BLOCK):
            if TILES > 1:
                bias_tile = load_bias(bias, strides, head, q_start, k_start, WINDOW, BLOCK)
            query = q_start + tl.arange(0, BLOCK)
            token, is_inside = padded_token(window, query, canvas, WINDOW)
            out_token, is_of_map = token_of(window, query, canvas, out_size, WINDOW)
            q = load(qkv, token, is_inside, 3 * channels, channel)
            d_out = load(grad_out, out_token, is_of_map, channels, channel)
            # Infinity gives zero weights to queries outside of the window.
            q_lse = tl.load(lse + first + query, mask=is_inside, other=float('inf'))
            scores = scores_of(
                q,
                k,
                bias_tile,
                scale,
                window,
                query,
                key,
                canvas,
                WINDOW,
                PENALTY,
            )
            weights = tl.exp2(scores - q_lse[:, None])
            d_weights = dot(d_out, tl.trans(v))
            if TILES == 1:
                q_delta = tl.sum(weights * d_weights, 1)
            else:
                q_delta = tl.load(delta + first + query, mask=is_inside, other=0.0)
            d_scores = weights * (d_weights - q_delta[:, None])
            if TRAINS_BIAS:
                if TILES == 1:
                    d_bias += d_scores
                else:
                    put_tile(grad_bias, d_scores, q_start, k_start, True, TOKENS, BLOCK)
            d_v += dot(tl.trans(cast(weights, d_out.dtype)), d_out)
            d_scores = cast(d_scores, q.dtype)
            d_k += dot(tl.trans(d_scores), q)
            if TILES == 1:
                d_q = dot(d_scores, k)
                store(grad_qkv, token, is_inside, 3 * channels, channel, d_q * scale)
        d_k *= scale
        token, is_inside = padded_token(window, key, canvas, WINDOW)
        store(grad_qkv + channels, token, is_inside, 3 * channels, channel, d_k)
        store(grad_qkv + 2 * channels, token, is_inside, 3 * channels, channel, d_v)

    if TRAINS_BIAS and TILES == 1:
        put_tile(grad_bias, d_bias, 0, 0, False, TOKENS, BLOCK)


@triton.jit(do_not_specialize=['heads', 'strips'])
def table_gradient(
    partials,
    grad_table,
    heads,
    strips,
    WINDOW: tl.constexpr,
    PAIRS: tl.constexpr,
    STRIPS: tl.constexpr,
):
    """Sum the partial gradients of the bias, (strips, A, T, T), over the pairs of tokens with the same offset, (P, A).

    ``PAIRS`` is a power of two and at least T, because a query has at most one key at an offset. Grid: P * A.
    """
    TOKENS: tl.constexpr = WINDOW[0] * WINDOW[1]
    head = tl.program_id(0) % heads
    row = tl.program_id(0) // heads
    down = row // (2 * WINDOW[1] - 1) - (WINDOW[0] - 1)
    right = row % (2 * WINDOW[1] - 1) - (WINDOW[1] - 1)
    query = tl.arange(0, PAIRS)
    key_y = query // WINDOW[1] - down
    key_x = query % WINDOW[1] - right
    has_key = (query < TOKENS) & (key_y >= 0) & (key_y < WINDOW[0]) & (key_x >= 0) & (key_x < WINDOW[1])
    pair = query * TOKENS + key_y * WINDOW[1] + key_x
    total = tl.zeros((STRIPS, PAIRS), tl.float32)
    for first in range(0, strips, STRIPS):
        strip = first + tl.arange(0, STRIPS)
        address = partials + (strip.to(tl.int64) * heads + head)[:, None] * (TOKENS * TOKENS) + pair[None, :]
        total += tl.load(address, mask=(strip < strips)[:, None] & has_key[None, :], other=0.0)
    value = tl.sum(tl.sum(total, 1), 0)
    tl.store(grad_table + tl.program_id(0), cast(value, grad_table.dtype.element_ty))

"""The Triton kernels of shifted-window attention; :mod:`swin_dense.ops.triton.attention` launches them.

Each program handles one head, one tile of queries or keys, and every ``strips``-th window. If a window fits into one
tile (64 tokens, or 32 for float32 with a head dimension of 64), the program reads the bias once and keeps it in
registers. Roll and partition are index arithmetic.

Tensors are contiguous and in raster order: qkv (B, H, W, 3C), whose sides are multiples of the window, and out, whose
sides are those of the map before it was padded at the right and bottom.
The bias (A, T, T) may have any strides if a window is one tile. The log-sum-exp of the scores of each query and
``delta`` are (windows, A, T) in float32. Scores are in units of log 2, because the hardware has an instruction for
``exp2``. Offsets into maps are 64-bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from swin_dense.ops.triton.interpreter import cast, dot

_LOG2E = tl.constexpr(1.4426950408889634)

# Triton must not recompile a kernel for other values of these arguments, which vary with image size and stage.
_VARYING = ['windows', 'height', 'width', 'shift_y', 'shift_x', 'out_height', 'out_width', 'heads', 'strips']
_VARYING += ['bias_head', 'bias_query', 'bias_key']


@triton.jit
def _place(window, canvas, WINDOW: tl.constexpr):
    """Return the image of a window, its row and column in the grid of windows, and the size of the grid.

    ``canvas`` is (height, width, vertical shift, horizontal shift) of the map in tokens.
    """
    rows = canvas[0] // WINDOW[0]
    columns = canvas[1] // WINDOW[1]
    image = window // (rows * columns)
    row = window // columns % rows
    column = window % columns
    return image, row, column, rows, columns


@triton.jit
def _locate(window, slot, canvas, WINDOW: tl.constexpr):
    """Return the image of a window, the row and column of the token at each slot, and whether the slot is inside."""
    image, row, column, _, _ = _place(window, canvas, WINDOW)
    height, width, shift_y, shift_x = canvas
    y = row * WINDOW[0] + shift_y + slot // WINDOW[1]
    x = column * WINDOW[1] + shift_x + slot % WINDOW[1]
    y = tl.where(y >= height, y - height, y)
    x = tl.where(x >= width, x - width, x)
    return image.to(tl.int64), y, x, slot < WINDOW[0] * WINDOW[1]


@triton.jit
def _padded_token(window, slot, canvas, WINDOW: tl.constexpr):
    """Return the raster index in qkv of the token at each slot of a window, and whether the slot is inside."""
    image, y, x, is_inside = _locate(window, slot, canvas, WINDOW)
    return (image * canvas[0] + y) * canvas[1] + x, is_inside


@triton.jit
def _token(window, slot, canvas, out_size, WINDOW: tl.constexpr):
    """Return the raster index in out of the token at each slot of a window, and whether it is one of the map."""
    image, y, x, is_inside = _locate(window, slot, canvas, WINDOW)
    is_of_map = is_inside & (y < out_size[0]) & (x < out_size[1])
    return (image * out_size[0] + y) * out_size[1] + x, is_of_map


@triton.jit
def _region(slot, wrapped_y, wrapped_x, WINDOW: tl.constexpr):
    """Return the region of each slot of a window; slots in the same region were neighbours before the roll.

    The last ``wrapped_y`` rows and ``wrapped_x`` columns of the window come from the opposite edge of the map.
    """
    is_wrapped_y = slot >= (WINDOW[0] - wrapped_y) * WINDOW[1]
    # Equivalent to comparing the column with WINDOW[1] - wrapped_x. The column is the same for all windows, so the
    # compiler would hoist it out of the loop and keep it in registers, although few windows need it.
    is_wrapped_x = (slot + wrapped_x) % WINDOW[1] < wrapped_x
    return 2 * is_wrapped_y.to(tl.int32) + is_wrapped_x.to(tl.int32)


@triton.jit
def _load(pointer, token, is_inside, stride, channel):
    """Load the rows of the tokens, with zeros outside of the window."""
    address = pointer + token[:, None] * stride + channel[None, :]
    return tl.load(address, mask=is_inside[:, None], other=0.0)


@triton.jit
def _store(pointer, token, is_inside, stride, channel, value):
    address = pointer + token[:, None] * stride + channel[None, :]
    tl.store(address, cast(value, pointer.dtype.element_ty), mask=is_inside[:, None])


@triton.jit
def _load_keys(
    qkv,
    window,
    key,
    canvas,
    channels,
    channel,
    WINDOW: tl.constexpr,
):
    """Load k and v of a tile of keys, with zeros outside of the window."""
    token, is_inside = _padded_token(window, key, canvas, WINDOW)
    k = _load(qkv + channels, token, is_inside, 3 * channels, channel)
    v = _load(qkv + 2 * channels, token, is_inside, 3 * channels, channel)
    return k, v


@triton.jit
def _load_bias(
    bias,
    strides,
    head,
    q_start,
    k_start,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Load the bias of a tile in units of log 2, with minus infinity for keys outside of the window."""
    query = q_start + tl.arange(0, BLOCK)
    key = k_start + tl.arange(0, BLOCK)
    is_key = (key < TOKENS)[None, :]
    is_query = (query < TOKENS)[:, None]
    bias += head * strides[0]
    address = bias + query[:, None] * strides[1] + key[None, :] * strides[2]
    tile = tl.load(address, mask=is_query & is_key, other=0.0)
    return tl.where(is_key, tile.to(tl.float32) * _LOG2E, float('-inf'))


@triton.jit
def _put_tile(
    matrix,
    tile,
    q_start,
    k_start,
    ADDS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write a tile of a (T, T) matrix, or add to it; no other program may access this tile.

    Additions are atomic even though only one program writes: the loads and stores of an element in different iterations
    may belong to different threads, without any ordering. Each element has one writing program, so the order of
    additions is fixed.
    """
    query = q_start + tl.arange(0, BLOCK)
    key = k_start + tl.arange(0, BLOCK)
    in_window = (query < TOKENS)[:, None] & (key < TOKENS)[None, :]
    address = matrix + query[:, None] * TOKENS + key[None, :]
    if ADDS:
        tl.atomic_add(address, tile, mask=in_window, sem='relaxed')
    else:
        tl.store(address, tile, mask=in_window)


@triton.jit
def _scores(
    q,
    k,
    bias,
    scale,
    window,
    query,
    key,
    canvas,
    WINDOW: tl.constexpr,
    PENALTY: tl.constexpr,
):
    """Return the scores of a tile of queries and keys in units of log 2."""
    scores = dot(q, tl.trans(k)) * (scale * _LOG2E) + bias
    _, row, column, rows, columns = _place(window, canvas, WINDOW)
    wrapped_y = tl.where(row == rows - 1, canvas[2], 0)
    wrapped_x = tl.where(column == columns - 1, canvas[3], 0)
    if (wrapped_y > 0) | (wrapped_x > 0):
        q_region = _region(query, wrapped_y, wrapped_x, WINDOW)
        k_region = _region(key, wrapped_y, wrapped_x, WINDOW)
        scores += tl.where(q_region[:, None] != k_region[None, :], PENALTY * _LOG2E, 0.0)
    return scores


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
    bias_head,
    bias_query,
    bias_key,
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
    strides = (bias_head, bias_query, bias_key)
    if TILES > 1:  # every window reads the bias again, so it is contiguous
        strides = (TOKENS * TOKENS, TOKENS, 1)
    channels = heads * HEAD_DIM
    head = tl.program_id(0) % heads
    part = tl.program_id(0) // heads
    q_start = part % TILES * BLOCK
    query = q_start + tl.arange(0, BLOCK)
    channel = head * HEAD_DIM + tl.arange(0, HEAD_DIM)
    if TILES == 1:
        bias_tile = _load_bias(bias, strides, head, 0, 0, TOKENS, BLOCK)

    for window in range(part // TILES, windows, strips):
        token, is_inside = _padded_token(window, query, canvas, WINDOW)
        q = _load(qkv, token, is_inside, 3 * channels, channel)
        top = tl.full((BLOCK,), float('-inf'), tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        result = tl.zeros((BLOCK, HEAD_DIM), tl.float32)
        for k_start in range(0, TOKENS, BLOCK):
            if TILES > 1:
                bias_tile = _load_bias(bias, strides, head, q_start, k_start, TOKENS, BLOCK)
            key = k_start + tl.arange(0, BLOCK)
            k, v = _load_keys(qkv, window, key, canvas, channels, channel, WINDOW)
            scores = _scores(
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
        out_token, is_of_map = _token(window, query, canvas, out_size, WINDOW)
        _store(out, out_token, is_of_map, channels, channel, result / total[:, None])
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
    bias_head,
    bias_query,
    bias_key,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    PENALTY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the gradient of q and ``delta`` for one tile of queries; only for windows of several tiles.

    ``delta`` is the sum over all keys of the attention weight times its gradient. Grid: strips * tiles * heads.
    """
    TOKENS: tl.constexpr = WINDOW[0] * WINDOW[1]
    TILES: tl.constexpr = (TOKENS + BLOCK - 1) // BLOCK
    canvas = (height, width, shift_y, shift_x)
    out_size = (out_height, out_width)
    strides = (bias_head, bias_query, bias_key)
    if TILES > 1:  # every window reads the bias again, so it is contiguous
        strides = (TOKENS * TOKENS, TOKENS, 1)
    channels = heads * HEAD_DIM
    head = tl.program_id(0) % heads
    part = tl.program_id(0) // heads
    q_start = part % TILES * BLOCK
    query = q_start + tl.arange(0, BLOCK)
    channel = head * HEAD_DIM + tl.arange(0, HEAD_DIM)

    for window in range(part // TILES, windows, strips):
        token, is_inside = _padded_token(window, query, canvas, WINDOW)
        out_token, is_of_map = _token(window, query, canvas, out_size, WINDOW)
        first = (window * heads + head).to(tl.int64) * TOKENS
        q = _load(qkv, token, is_inside, 3 * channels, channel)
        d_out = _load(grad_out, out_token, is_of_map, channels, channel)
        q_out = _load(out, out_token, is_of_map, channels, channel)
        q_lse = tl.load(lse + first + query, mask=is_inside, other=float('inf'))
        q_delta = tl.sum(d_out.to(tl.float32) * q_out.to(tl.float32), 1)
        tl.store(delta + first + query, q_delta, mask=is_inside)
        d_q = tl.zeros((BLOCK, HEAD_DIM), tl.float32)
        for k_start in range(0, TOKENS, BLOCK):
            bias_tile = _load_bias(bias, strides, head, q_start, k_start, TOKENS, BLOCK)
            key = k_start + tl.arange(0, BLOCK)
            k, v = _load_keys(qkv, window, key, canvas, channels, channel, WINDOW)
            scores = _scores(
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
            d_scores = weights * (d_weights - q_delta[:, None])
            d_q += dot(cast(d_scores, k.dtype), k)
        _store(grad_qkv, token, is_inside, 3 * channels, channel, d_q * scale)


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
    bias_head,
    bias_query,
    bias_key,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    PENALTY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the gradients of k and v for one tile of keys, and a partial gradient of the bias.

    If the window is one tile, also write the gradient of q. ``partials`` is (strips, A, T, T) in float32, which must be
    zero initially if there are several tiles; its sum over the strips is the gradient of the bias. No two programs
    write to the same element. Grid: strips * tiles * heads.
    """
    TOKENS: tl.constexpr = WINDOW[0] * WINDOW[1]
    TILES: tl.constexpr = (TOKENS + BLOCK - 1) // BLOCK
    canvas = (height, width, shift_y, shift_x)
    out_size = (out_height, out_width)
    strides = (bias_head, bias_query, bias_key)
    if TILES > 1:  # every window reads the bias again, so it is contiguous
        strides = (TOKENS * TOKENS, TOKENS, 1)
    channels = heads * HEAD_DIM
    head = tl.program_id(0) % heads
    part = tl.program_id(0) // heads
    k_start = part % TILES * BLOCK
    key = k_start + tl.arange(0, BLOCK)
    channel = head * HEAD_DIM + tl.arange(0, HEAD_DIM)
    partials += (part // TILES).to(tl.int64) * heads * TOKENS * TOKENS
    grad_bias = partials + head * TOKENS * TOKENS
    if TILES == 1:
        bias_tile = _load_bias(bias, strides, head, 0, 0, TOKENS, BLOCK)
        d_bias = tl.zeros((BLOCK, BLOCK), tl.float32)

    for window in range(part // TILES, windows, strips):
        first = (window * heads + head).to(tl.int64) * TOKENS
        k, v = _load_keys(qkv, window, key, canvas, channels, channel, WINDOW)
        d_k = tl.zeros((BLOCK, HEAD_DIM), tl.float32)
        d_v = tl.zeros((BLOCK, HEAD_DIM), tl.float32)
        for q_start in range(0, TOKENS, BLOCK):
            if TILES > 1:
                bias_tile = _load_bias(bias, strides, head, q_start, k_start, TOKENS, BLOCK)
            query = q_start + tl.arange(0, BLOCK)
            token, is_inside = _padded_token(window, query, canvas, WINDOW)
            out_token, is_of_map = _token(window, query, canvas, out_size, WINDOW)
            q = _load(qkv, token, is_inside, 3 * channels, channel)
            d_out = _load(grad_out, out_token, is_of_map, channels, channel)
            # Infinity gives zero weights to queries outside of the window.
            q_lse = tl.load(lse + first + query, mask=is_inside, other=float('inf'))
            scores = _scores(
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
            if TILES == 1:
                d_bias += d_scores
            else:
                _put_tile(grad_bias, d_scores, q_start, k_start, True, TOKENS, BLOCK)
            d_v += dot(tl.trans(cast(weights, d_out.dtype)), d_out)
            d_scores = cast(d_scores, q.dtype)
            d_k += dot(tl.trans(d_scores), q)
            if TILES == 1:
                d_q = dot(d_scores, k)
                _store(grad_qkv, token, is_inside, 3 * channels, channel, d_q * scale)
        d_k *= scale
        token, is_inside = _padded_token(window, key, canvas, WINDOW)
        _store(grad_qkv + channels, token, is_inside, 3 * channels, channel, d_k)
        _store(grad_qkv + 2 * channels, token, is_inside, 3 * channels, channel, d_v)

    if TILES == 1:
        _put_tile(grad_bias, d_bias, 0, 0, False, TOKENS, BLOCK)

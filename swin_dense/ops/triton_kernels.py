"""The Triton kernels of shifted-window attention; :mod:`swin_dense.ops.triton` launches them.

One program serves one head and every ``strips``-th window, so for windows of up to 64 tokens the bias is read once
and stays in registers. Larger windows are cut into tiles of queries and of keys. Padding, roll and partition are
index arithmetic, and nothing of the size of the scores ever reaches memory.

Tensors are contiguous: qkv (B, H, W, 3C) and out (B, H, W, C) in raster order, bias (A, T, T), pad_kv (2C,). The
log-sum-exp of the scores and the backward pass's ``delta`` are (windows, A, T) in float32. Scores are kept in units of
log 2 because ``exp2`` is what the hardware has. Offsets into maps are 64 bits wide.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LOG2E = tl.constexpr(1.4426950408889634)

# Values that differ from one image size or stage to the next must not each compile a kernel of their own.
_VARYING = ['windows', 'height', 'width', 'shift_y', 'shift_x', 'heads', 'strips']


@triton.jit
def _locate(window, slot, height, width, shift_y, shift_x, WINDOW_H: tl.constexpr, WINDOW_W: tl.constexpr):
    """Return per slot of a window its token in raster order and whether that exists.

    A token that does not exist is padding where ``slot < T`` and nothing at all beyond.
    """
    rows, columns = tl.cdiv(height, WINDOW_H), tl.cdiv(width, WINDOW_W)
    y = window // columns % rows * WINDOW_H + shift_y + slot // WINDOW_W
    x = window % columns * WINDOW_W + shift_x + slot % WINDOW_W
    y = tl.where(y >= rows * WINDOW_H, y - rows * WINDOW_H, y)
    x = tl.where(x >= columns * WINDOW_W, x - columns * WINDOW_W, x)
    is_real = (slot < WINDOW_H * WINDOW_W) & (y < height) & (x < width)
    image = (window // (rows * columns)).to(tl.int64)
    return (image * height + y) * width + x, is_real


@triton.jit
def _wrapped(window, height, width, shift_y, shift_x, WINDOW_H: tl.constexpr, WINDOW_W: tl.constexpr):
    """Return how many of a window's last rows and columns come from the opposite edge of the map."""
    rows, columns = tl.cdiv(height, WINDOW_H), tl.cdiv(width, WINDOW_W)
    in_last_row = window // columns % rows == rows - 1
    in_last_column = window % columns == columns - 1
    return tl.where(in_last_row, shift_y, 0), tl.where(in_last_column, shift_x, 0)


@triton.jit
def _region(slot, wrapped_y, wrapped_x, WINDOW_H: tl.constexpr, WINDOW_W: tl.constexpr):
    """Return a code that two slots of a window share where they were neighbours before the roll."""
    is_wrapped_y = slot >= (WINDOW_H - wrapped_y) * WINDOW_W
    # The column compared with W - wrapped_x, written so that nothing here is the same for all windows: a column number
    # would be kept in registers throughout the loop over windows, of which only the last few need it.
    is_wrapped_x = (slot + wrapped_x) % WINDOW_W < wrapped_x
    return 2 * is_wrapped_y.to(tl.int32) + is_wrapped_x.to(tl.int32)


@triton.jit
def _has_padding(window, height, width, shift_y, shift_x, WINDOW_H: tl.constexpr, WINDOW_W: tl.constexpr):
    rows, columns = tl.cdiv(height, WINDOW_H), tl.cdiv(width, WINDOW_W)
    bottom = (window // columns % rows + 1) * WINDOW_H + shift_y
    right = (window % columns + 1) * WINDOW_W + shift_x
    return ((bottom > height) & (rows * WINDOW_H > height)) | ((right > width) & (columns * WINDOW_W > width))


@triton.jit
def _load(pointer, token, is_real, stride, channel):
    """Return the rows of real tokens, zeros elsewhere."""
    return tl.load(pointer + token[:, None] * stride + channel[None, :], mask=is_real[:, None], other=0.0)


@triton.jit
def _load_or_pad(pointer, pad, token, is_real, in_window, has_padding, stride, channel):
    """Return the rows of real tokens, the row ``pad`` in padding slots, zeros beyond the window."""
    rows = _load(pointer, token, is_real, stride, channel)
    if has_padding:
        is_pad = in_window & ~is_real
        rows = tl.where(is_pad[:, None], tl.load(pad + channel).to(rows.dtype)[None, :], rows)
    return rows


@triton.jit
def _store(pointer, token, is_real, stride, channel, value):
    address = pointer + token[:, None] * stride + channel[None, :]
    tl.store(address, value.to(pointer.dtype.element_ty), mask=is_real[:, None])


@triton.jit
def _load_bias(bias, head, q_start, k_start, TOKENS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the bias of a tile in units of log 2, minus infinity for keys beyond the window."""
    slot = tl.arange(0, BLOCK)
    query_exists, key_exists = q_start + slot < TOKENS, k_start + slot < TOKENS
    # The offsets within a tile are the same for all tiles, so they take registers once.
    address = bias + (head * TOKENS + q_start) * TOKENS + k_start + (slot[:, None] * TOKENS + slot[None, :])
    tile = tl.load(address, mask=query_exists[:, None] & key_exists[None, :], other=0.0)
    return tl.where(key_exists[None, :], tile.to(tl.float32) * _LOG2E, float('-inf'))


@triton.jit
def _add_to_tile(matrix, tile, q_start, k_start, TOKENS: tl.constexpr, BLOCK: tl.constexpr):
    """Add a tile to a (T, T) matrix that no other program touches."""
    query, key = q_start + tl.arange(0, BLOCK), k_start + tl.arange(0, BLOCK)
    in_window = (query < TOKENS)[:, None] & (key < TOKENS)[None, :]
    address = matrix + query[:, None] * TOKENS + key[None, :]
    tl.store(address, tl.load(address, mask=in_window, other=0.0) + tile, mask=in_window)


@triton.jit
def _scores(
    q,
    k,
    bias,
    scale,
    query,
    key,
    wrapped_y,
    wrapped_x,
    WINDOW_H: tl.constexpr,
    WINDOW_W: tl.constexpr,
    PENALTY: tl.constexpr,
):
    """Return the scores of a tile of queries and keys, in units of log 2."""
    scores = tl.dot(q, tl.trans(k), input_precision='ieee') * (scale * _LOG2E) + bias
    if (wrapped_y > 0) | (wrapped_x > 0):
        q_region = _region(query, wrapped_y, wrapped_x, WINDOW_H, WINDOW_W)
        k_region = _region(key, wrapped_y, wrapped_x, WINDOW_H, WINDOW_W)
        scores += tl.where(q_region[:, None] != k_region[None, :], PENALTY * _LOG2E, 0.0)
    return scores


@triton.jit(do_not_specialize=_VARYING)
def forward(
    qkv,
    bias,
    pad_kv,
    out,
    lse,
    scale,
    windows,
    height,
    width,
    shift_y,
    shift_x,
    heads,
    strips,
    HEAD_DIM: tl.constexpr,
    WINDOW_H: tl.constexpr,
    WINDOW_W: tl.constexpr,
    PENALTY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write ``out`` and ``lse`` of one head and one tile of queries; grid: strips * tiles * heads."""
    TOKENS: tl.constexpr = WINDOW_H * WINDOW_W
    TILES: tl.constexpr = (TOKENS + BLOCK - 1) // BLOCK
    channels = heads * HEAD_DIM
    head = tl.program_id(0) % heads
    q_start = tl.program_id(0) // heads % TILES * BLOCK
    query = q_start + tl.arange(0, BLOCK)
    channel = head * HEAD_DIM + tl.arange(0, HEAD_DIM)
    if TILES == 1:
        bias_tile = _load_bias(bias, head, 0, 0, TOKENS, BLOCK)

    for window in range(tl.program_id(0) // heads // TILES, windows, strips):
        q_token, q_is_real = _locate(window, query, height, width, shift_y, shift_x, WINDOW_H, WINDOW_W)
        has_padding = _has_padding(window, height, width, shift_y, shift_x, WINDOW_H, WINDOW_W)
        wrapped_y, wrapped_x = _wrapped(window, height, width, shift_y, shift_x, WINDOW_H, WINDOW_W)
        q = _load(qkv, q_token, q_is_real, 3 * channels, channel)
        top = tl.full((BLOCK,), float('-inf'), tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        result = tl.zeros((BLOCK, HEAD_DIM), tl.float32)
        for k_start in range(0, TOKENS, BLOCK):
            key = k_start + tl.arange(0, BLOCK)
            if TILES > 1:
                bias_tile = _load_bias(bias, head, q_start, k_start, TOKENS, BLOCK)
            k_token, k_is_real = _locate(window, key, height, width, shift_y, shift_x, WINDOW_H, WINDOW_W)
            k = _load_or_pad(
                qkv + channels, pad_kv, k_token, k_is_real, key < TOKENS, has_padding, 3 * channels, channel
            )
            v = _load_or_pad(
                qkv + 2 * channels,
                pad_kv + channels,
                k_token,
                k_is_real,
                key < TOKENS,
                has_padding,
                3 * channels,
                channel,
            )
            scores = _scores(q, k, bias_tile, scale, query, key, wrapped_y, wrapped_x, WINDOW_H, WINDOW_W, PENALTY)
            new_top = tl.maximum(top, tl.max(scores, 1))
            weights = tl.exp2(scores - new_top[:, None])
            fade = tl.exp2(top - new_top)
            total = total * fade + tl.sum(weights, 1)
            result = result * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision='ieee')
            top = new_top
        _store(out, q_token, q_is_real, channels, channel, result / total[:, None])
        row = (window * heads + head).to(tl.int64) * TOKENS
        tl.store(lse + row + query, top + tl.log2(total), mask=q_is_real)


@triton.jit(do_not_specialize=_VARYING)
def backward_queries(
    grad_out,
    qkv,
    bias,
    pad_kv,
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
    heads,
    strips,
    HEAD_DIM: tl.constexpr,
    WINDOW_H: tl.constexpr,
    WINDOW_W: tl.constexpr,
    PENALTY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the gradient of q, and ``delta`` for :func:`backward_keys`; only for windows of more than one tile.

    ``delta`` is the sum over the keys of weight times gradient of the weight. Grid: strips * tiles * heads.
    """
    TOKENS: tl.constexpr = WINDOW_H * WINDOW_W
    TILES: tl.constexpr = (TOKENS + BLOCK - 1) // BLOCK
    channels = heads * HEAD_DIM
    head = tl.program_id(0) % heads
    q_start = tl.program_id(0) // heads % TILES * BLOCK
    query = q_start + tl.arange(0, BLOCK)
    channel = head * HEAD_DIM + tl.arange(0, HEAD_DIM)

    for window in range(tl.program_id(0) // heads // TILES, windows, strips):
        q_token, q_is_real = _locate(window, query, height, width, shift_y, shift_x, WINDOW_H, WINDOW_W)
        has_padding = _has_padding(window, height, width, shift_y, shift_x, WINDOW_H, WINDOW_W)
        wrapped_y, wrapped_x = _wrapped(window, height, width, shift_y, shift_x, WINDOW_H, WINDOW_W)
        row = (window * heads + head).to(tl.int64) * TOKENS
        q = _load(qkv, q_token, q_is_real, 3 * channels, channel)
        d_out = _load(grad_out, q_token, q_is_real, channels, channel)
        o = _load(out, q_token, q_is_real, channels, channel)
        q_lse = tl.load(lse + row + query, mask=q_is_real, other=float('inf'))
        q_delta = tl.sum(d_out.to(tl.float32) * o.to(tl.float32), 1)
        tl.store(delta + row + query, q_delta, mask=q_is_real)
        d_q = tl.zeros((BLOCK, HEAD_DIM), tl.float32)
        for k_start in range(0, TOKENS, BLOCK):
            key = k_start + tl.arange(0, BLOCK)
            bias_tile = _load_bias(bias, head, q_start, k_start, TOKENS, BLOCK)
            k_token, k_is_real = _locate(window, key, height, width, shift_y, shift_x, WINDOW_H, WINDOW_W)
            k = _load_or_pad(
                qkv + channels, pad_kv, k_token, k_is_real, key < TOKENS, has_padding, 3 * channels, channel
            )
            v = _load_or_pad(
                qkv + 2 * channels,
                pad_kv + channels,
                k_token,
                k_is_real,
                key < TOKENS,
                has_padding,
                3 * channels,
                channel,
            )
            scores = _scores(q, k, bias_tile, scale, query, key, wrapped_y, wrapped_x, WINDOW_H, WINDOW_W, PENALTY)
            weights = tl.exp2(scores - q_lse[:, None])
            d_weights = tl.dot(d_out, tl.trans(v), input_precision='ieee')
            d_scores = weights * (d_weights - q_delta[:, None])
            d_q += tl.dot(d_scores.to(k.dtype), k, input_precision='ieee')
        _store(grad_qkv, q_token, q_is_real, 3 * channels, channel, d_q * scale)


@triton.jit(do_not_specialize=_VARYING)
def backward_keys(
    grad_out,
    qkv,
    bias,
    pad_kv,
    lse,
    delta,
    grad_qkv,
    grad_bias,
    grad_pad,
    scale,
    windows,
    height,
    width,
    shift_y,
    shift_x,
    heads,
    strips,
    HEAD_DIM: tl.constexpr,
    WINDOW_H: tl.constexpr,
    WINDOW_W: tl.constexpr,
    PENALTY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the gradients of k and v, of q too where one tile holds a window, and this strip's share of the others.

    ``grad_bias`` (strips, A, T, T) and ``grad_pad`` (strips * tiles, 2C) are float32 and wait to be summed over their
    first axis: no two programs add to the same number, so the sums come out the same every time.
    Grid: strips * tiles * heads.
    """
    TOKENS: tl.constexpr = WINDOW_H * WINDOW_W
    TILES: tl.constexpr = (TOKENS + BLOCK - 1) // BLOCK
    channels = heads * HEAD_DIM
    head = tl.program_id(0) % heads
    part = tl.program_id(0) // heads
    strip = part // TILES
    k_start = part % TILES * BLOCK
    key = k_start + tl.arange(0, BLOCK)
    channel = head * HEAD_DIM + tl.arange(0, HEAD_DIM)
    d_pad_k = tl.zeros((HEAD_DIM,), tl.float32)
    d_pad_v = tl.zeros((HEAD_DIM,), tl.float32)
    grad_bias += (strip * heads + head).to(tl.int64) * TOKENS * TOKENS
    if TILES == 1:
        bias_tile = _load_bias(bias, head, 0, 0, TOKENS, BLOCK)
        d_bias = tl.zeros((BLOCK, BLOCK), tl.float32)

    for window in range(strip, windows, strips):
        k_token, k_is_real = _locate(window, key, height, width, shift_y, shift_x, WINDOW_H, WINDOW_W)
        has_padding = _has_padding(window, height, width, shift_y, shift_x, WINDOW_H, WINDOW_W)
        wrapped_y, wrapped_x = _wrapped(window, height, width, shift_y, shift_x, WINDOW_H, WINDOW_W)
        row = (window * heads + head).to(tl.int64) * TOKENS
        k = _load_or_pad(qkv + channels, pad_kv, k_token, k_is_real, key < TOKENS, has_padding, 3 * channels, channel)
        v = _load_or_pad(
            qkv + 2 * channels, pad_kv + channels, k_token, k_is_real, key < TOKENS, has_padding, 3 * channels, channel
        )
        d_k = tl.zeros((BLOCK, HEAD_DIM), tl.float32)
        d_v = tl.zeros((BLOCK, HEAD_DIM), tl.float32)
        for q_start in range(0, TOKENS, BLOCK):
            query = q_start + tl.arange(0, BLOCK)
            q_token, q_is_real = _locate(window, query, height, width, shift_y, shift_x, WINDOW_H, WINDOW_W)
            if TILES > 1:
                bias_tile = _load_bias(bias, head, q_start, k_start, TOKENS, BLOCK)
            q = _load(qkv, q_token, q_is_real, 3 * channels, channel)
            d_out = _load(grad_out, q_token, q_is_real, channels, channel)
            q_lse = tl.load(lse + row + query, mask=q_is_real, other=float('inf'))
            scores = _scores(q, k, bias_tile, scale, query, key, wrapped_y, wrapped_x, WINDOW_H, WINDOW_W, PENALTY)
            weights = tl.exp2(scores - q_lse[:, None])
            d_weights = tl.dot(d_out, tl.trans(v), input_precision='ieee')
            if TILES == 1:
                q_delta = tl.sum(weights * d_weights, 1)
            else:
                q_delta = tl.load(delta + row + query, mask=q_is_real, other=0.0)
            d_scores = weights * (d_weights - q_delta[:, None])
            if TILES == 1:
                d_bias += d_scores
            else:
                _add_to_tile(grad_bias, d_scores, q_start, k_start, TOKENS, BLOCK)
            d_v += tl.dot(tl.trans(weights.to(d_out.dtype)), d_out, input_precision='ieee')
            d_scores = d_scores.to(q.dtype)
            d_k += tl.dot(tl.trans(d_scores), q, input_precision='ieee')
            if TILES == 1:
                d_q = tl.dot(d_scores, k, input_precision='ieee') * scale
                _store(grad_qkv, q_token, q_is_real, 3 * channels, channel, d_q)
        d_k *= scale
        _store(grad_qkv + channels, k_token, k_is_real, 3 * channels, channel, d_k)
        _store(grad_qkv + 2 * channels, k_token, k_is_real, 3 * channels, channel, d_v)
        if has_padding:
            is_pad = (key < TOKENS) & ~k_is_real
            d_pad_k += tl.sum(tl.where(is_pad[:, None], d_k, 0.0), 0)
            d_pad_v += tl.sum(tl.where(is_pad[:, None], d_v, 0.0), 0)

    if TILES == 1:
        _add_to_tile(grad_bias, d_bias, 0, 0, TOKENS, BLOCK)
    grad_pad += part.to(tl.int64) * 2 * channels + channel
    tl.store(grad_pad, d_pad_k)
    tl.store(grad_pad + channels, d_pad_v)

"""Parts of the kernels of window attention: where tokens are, and how tiles of maps, bias and scores are read.

``canvas`` is (height, width, vertical shift, horizontal shift) of the padded map in tokens. Tiles are square, with a
side of ``BLOCK`` tokens, of which those beyond the window do not count.
"""

from __future__ import annotations

import triton
import triton.language as tl

from swin_dense.ops.triton.interpreter import cast, dot

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _window_position(window, canvas, WINDOW: tl.constexpr):
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
    image, row, column, _, _ = _window_position(window, canvas, WINDOW)
    height, width, shift_y, shift_x = canvas
    y = row * WINDOW[0] + shift_y + slot // WINDOW[1]
    x = column * WINDOW[1] + shift_x + slot % WINDOW[1]
    y = tl.where(y >= height, y - height, y)
    x = tl.where(x >= width, x - width, x)
    return image.to(tl.int64), y, x, slot < WINDOW[0] * WINDOW[1]


@triton.jit
def padded_token(window, slot, canvas, WINDOW: tl.constexpr):
    """Return the raster index in qkv of the token at each slot of a window, and whether the slot is inside."""
    image, y, x, is_inside = _locate(window, slot, canvas, WINDOW)
    return (image * canvas[0] + y) * canvas[1] + x, is_inside


@triton.jit
def token_of(window, slot, canvas, out_size, WINDOW: tl.constexpr):
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
def load(pointer, token, is_inside, stride, channel):
    """Load the rows of the tokens, with zeros outside of the window."""
    address = pointer + token[:, None] * stride + channel[None, :]
    return tl.load(address, mask=is_inside[:, None], other=0.0)


@triton.jit
def store(pointer, token, is_inside, stride, channel, value):
    address = pointer + token[:, None] * stride + channel[None, :]
    tl.store(address, cast(value, pointer.dtype.element_ty), mask=is_inside[:, None])


@triton.jit
def load_keys(
    qkv,
    window,
    key,
    canvas,
    channels,
    channel,
    WINDOW: tl.constexpr,
):
    """Load k and v of a tile of keys, with zeros outside of the window."""
    token, is_inside = padded_token(window, key, canvas, WINDOW)
    k = load(qkv + channels, token, is_inside, 3 * channels, channel)
    v = load(qkv + 2 * channels, token, is_inside, 3 * channels, channel)
    return k, v


@triton.jit
def _row(slot, WINDOW: tl.constexpr):
    """Return how many rows of the table lie between the offset zero and that of a slot from the first slot."""
    return slot // WINDOW[1] * (2 * WINDOW[1] - 1) + slot % WINDOW[1]


@triton.jit
def load_bias(
    bias,
    strides,
    head,
    q_start,
    k_start,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Load the bias of a tile in units of log 2, with minus infinity for keys outside of the window.

    If a window is one tile, ``bias`` is a table with a row for each offset of a query from a key, ordered by vertical
    and then by horizontal offset, and ``strides`` are those of its rows and heads. Otherwise it is (A, T, T).
    """
    TOKENS: tl.constexpr = WINDOW[0] * WINDOW[1]
    query = q_start + tl.arange(0, BLOCK)
    key = k_start + tl.arange(0, BLOCK)
    if TOKENS > BLOCK:
        address = bias + (head * TOKENS + query[:, None]) * TOKENS + key[None, :]
    else:
        first = bias + head * strides[1] + _row(TOKENS - 1, WINDOW) * strides[0]  # of the offset zero
        address = first + (_row(query, WINDOW) * strides[0])[:, None] - (_row(key, WINDOW) * strides[0])[None, :]
    is_key = (key < TOKENS)[None, :]
    tile = tl.load(address, mask=(query < TOKENS)[:, None] & is_key, other=0.0)
    return tl.where(is_key, tile.to(tl.float32) * LOG2E, float('-inf'))


@triton.jit
def put_tile(
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
def scores_of(
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
    scores = dot(q, tl.trans(k)) * (scale * LOG2E) + bias
    _, row, column, rows, columns = _window_position(window, canvas, WINDOW)
    wrapped_y = tl.where(row == rows - 1, canvas[2], 0)
    wrapped_x = tl.where(column == columns - 1, canvas[3], 0)
    if (wrapped_y > 0) | (wrapped_x > 0):
        q_region = _region(query, wrapped_y, wrapped_x, WINDOW)
        k_region = _region(key, wrapped_y, wrapped_x, WINDOW)
        scores += tl.where(q_region[:, None] != k_region[None, :], PENALTY * LOG2E, 0.0)
    return scores

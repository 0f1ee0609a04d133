"""The Triton kernels of LayerNorm over the last axis; :mod:`swin_dense.ops.triton.norm` launches them.

A program handles tiles of whole rows, ``ROWS`` at a time. Maps are contiguous, (rows, C); all sums are in float32. What
a tile holds beyond its C channels or beyond the last row is zero. Offsets into maps are 64-bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from swin_dense.ops.triton.interpreter import cast


@triton.jit
def _tile_offsets(tile, rows, CHANNELS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Return the offsets of the numbers of a tile, (ROWS, BLOCK), and which of them are of the map."""
    row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    return row[:, None] * CHANNELS + channel[None, :], (row < rows)[:, None] & (channel < CHANNELS)[None, :]


@triton.jit
def _load_channels(pointer, CHANNELS: tl.constexpr, BLOCK: tl.constexpr):
    channel = tl.arange(0, BLOCK)
    return tl.load(pointer + channel, mask=channel < CHANNELS, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _normalised(x, is_of_map, eps, CHANNELS: tl.constexpr):
    """Return the rows of a tile with mean 0 and variance 1, and the factor that each was multiplied by."""
    mean = tl.sum(x, 1) / CHANNELS
    centred = tl.where(is_of_map, x - mean[:, None], 0.0)
    factor = tl.rsqrt(tl.sum(centred * centred, 1) / CHANNELS + eps)[:, None]
    return centred * factor, factor


@triton.jit(do_not_specialize=['rows', 'eps'])
def forward(
    x,
    weight,
    bias,
    out,
    rows,
    eps,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write ``out``, of any dtype. Grid: one program per tile."""
    place, is_of_map = _tile_offsets(tl.program_id(0), rows, CHANNELS, BLOCK, ROWS)
    values = tl.load(x + place, mask=is_of_map, other=0.0).to(tl.float32)
    normalised, _ = _normalised(values, is_of_map, eps, CHANNELS)
    result = normalised * _load_channels(weight, CHANNELS, BLOCK) + _load_channels(bias, CHANNELS, BLOCK)
    tl.store(out + place, cast(result, out.dtype.element_ty), mask=is_of_map)


@triton.jit(do_not_specialize=['rows', 'eps'])
def backward(
    grad_out,
    x,
    weight,
    grad_x,
    partials,
    rows,
    eps,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write the gradient of x, and partial gradients of weight and bias, (programs, 2, C) in float32.

    Mean and variance are computed again: the rows are read anyway. Grid: any number of programs, which share the tiles.
    """
    weights = _load_channels(weight, CHANNELS, BLOCK)
    # Sums over rows wait for each other's warps, so each row of a tile has sums of its own until the end.
    grad_weight = tl.zeros((ROWS, BLOCK), tl.float32)
    grad_bias = tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        place, is_of_map = _tile_offsets(tile, rows, CHANNELS, BLOCK, ROWS)
        values = tl.load(x + place, mask=is_of_map, other=0.0).to(tl.float32)
        grad = tl.load(grad_out + place, mask=is_of_map, other=0.0).to(tl.float32)
        normalised, factor = _normalised(values, is_of_map, eps, CHANNELS)
        grad_weight += grad * normalised
        grad_bias += grad
        grad *= weights
        # Without the parts that the mean and the variance take away.
        along = tl.sum(grad * normalised, 1) / CHANNELS
        mean = tl.sum(grad, 1) / CHANNELS
        result = (grad - normalised * along[:, None] - mean[:, None]) * factor
        tl.store(grad_x + place, cast(result, grad_x.dtype.element_ty), mask=is_of_map)
    channel = tl.arange(0, BLOCK)
    partials += tl.program_id(0) * 2 * CHANNELS
    tl.store(partials + channel, tl.sum(grad_weight, 0), mask=channel < CHANNELS)
    tl.store(partials + CHANNELS + channel, tl.sum(grad_bias, 0), mask=channel < CHANNELS)

"""The Triton kernels of LayerNorm; :mod:`swin_dense.ops.triton.norm` launches them.

A program normalises ``ROWS`` tokens of ``CHANNELS`` elements at a time, all in float32. Tokens are contiguous rows in
memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from swin_dense.ops.triton.interpreter import cast


@triton.jit
def _normalise(values, is_inside, eps, CHANNELS: tl.constexpr):
    """Normalise the rows to mean 0 and variance 1, with zeros outside; also return the inverse standard deviations."""
    mean = tl.sum(values, 1) / CHANNELS
    centred = tl.where(is_inside, values - mean[:, None], 0.0)
    variance = tl.sum(centred * centred, 1) / CHANNELS
    factor = 1 / tl.sqrt(variance + eps)
    return centred * factor[:, None], factor


@triton.jit(do_not_specialize=['rows'])
def forward(
    x,
    weight,
    bias,
    y,
    eps,
    rows,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write y. Grid: one program per ``ROWS`` rows."""
    row, channel = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    is_inside = (row < rows)[:, None] & (channel < CHANNELS)[None, :]
    address = row[:, None].to(tl.int64) * CHANNELS + channel[None, :]
    values = tl.load(x + address, mask=is_inside, other=0.0).to(tl.float32)
    normed, _ = _normalise(values, is_inside, eps, CHANNELS)
    scale = tl.load(weight + channel, mask=channel < CHANNELS, other=0.0).to(tl.float32)
    offset = tl.load(bias + channel, mask=channel < CHANNELS, other=0.0).to(tl.float32)
    result = normed * scale[None, :] + offset[None, :]
    tl.store(y + address, cast(result, y.dtype.element_ty), mask=is_inside)


@triton.jit(do_not_specialize=['rows', 'programs'])
def backward(
    grad_y,
    x,
    weight,
    grad_x,
    partials,
    eps,
    rows,
    programs,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write the gradient of x, and partial gradients of weight and bias to a row of ``partials``.

    ``partials`` is (programs, 2 * CHANNELS); the sums over its rows are the gradients.
    """
    program, channel = tl.program_id(0), tl.arange(0, BLOCK)
    scale = tl.load(weight + channel, mask=channel < CHANNELS, other=0.0).to(tl.float32)
    d_weight = tl.zeros((ROWS, BLOCK), tl.float32)
    d_bias = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(program * ROWS, rows, programs * ROWS):
        row = start + tl.arange(0, ROWS)
        is_inside = (row < rows)[:, None] & (channel < CHANNELS)[None, :]
        address = row[:, None].to(tl.int64) * CHANNELS + channel[None, :]
        values = tl.load(x + address, mask=is_inside, other=0.0).to(tl.float32)
        normed, factor = _normalise(values, is_inside, eps, CHANNELS)
        d_y = tl.load(grad_y + address, mask=is_inside, other=0.0).to(tl.float32)
        d_weight += d_y * normed
        d_bias += d_y
        d_normed = d_y * scale[None, :]
        mean = tl.sum(d_normed, 1) / CHANNELS
        along = tl.sum(d_normed * normed, 1) / CHANNELS
        d_x = (d_normed - mean[:, None] - normed * along[:, None]) * factor[:, None]
        tl.store(grad_x + address, cast(d_x, grad_x.dtype.element_ty), mask=is_inside)
    partials += program.to(tl.int64) * 2 * CHANNELS
    tl.store(partials + channel, tl.sum(d_weight, 0), mask=channel < CHANNELS)
    tl.store(partials + CHANNELS + channel, tl.sum(d_bias, 0), mask=channel < CHANNELS)

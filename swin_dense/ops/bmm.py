"""Window attention by batched matrix products, for training on CPUs on which torch's attention is slower.

One gather does padding, roll and partition, and brings together the tokens of each head, so that the products read
contiguous memory. Another gather undoes it. Each is the inverse of the other, so their backward passes are gathers too.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from swin_dense.ops import context, cpu
from swin_dense.ops.plan import plan_windows
from swin_dense.ops.windows import Pair, WindowSpec
from swin_dense.utils import compat

# Larger windows were timed without gradients only, where they gained nothing.
MAX_TOKENS = 64
# Enough for the maps of two to four image sizes. The tables take a quarter of the memory of their map.
MAX_TABLES = 32
_CPU = torch.device('cpu')


def unsupported_reason(qkv: Tensor, spec: WindowSpec) -> str | None:
    if qkv.device.type != 'cpu' or qkv.dtype not in (torch.float32, torch.float64):
        return f'the map is {qkv.dtype} on {qkv.device.type}, not float32 or float64 on a CPU'
    if compat.is_autocast_enabled('cpu'):
        return 'autocast is enabled'
    return context.plain_reason(qkv)


def is_faster(qkv: Tensor, spec: WindowSpec) -> bool:
    """Return whether this is faster than torch's attention: on AMD processors with gradients, in small windows."""
    if context.is_tracing():  # compilers cannot trace the question about the processor
        return False
    is_small = qkv.dtype == torch.float32 and spec.tokens <= MAX_TOKENS
    return is_small and torch.is_grad_enabled() and qkv.device.type == 'cpu' and cpu.is_amd()


def window_attention(qkv: Tensor, relative_bias: Tensor | None, pad_kv: Tensor | None, spec: WindowSpec) -> Tensor:
    """See :func:`swin_dense.ops.window_attention`."""
    batch, height, width, channels = qkv.shape[0], qkv.shape[1], qkv.shape[2], qkv.shape[3] // 3
    heads, tokens, head_dim = spec.num_heads, spec.tokens, channels // spec.num_heads
    tables = _tables(batch, (height, width), spec.window, spec.shift, heads)
    padding = qkv.new_zeros(channels) if pad_kv is None else pad_kv.to(qkv.dtype)
    padding = F.pad(padding, (3 * channels - len(padding), 0)).view(3 * heads, head_dim)
    qkv = _ToHeads.apply(qkv.reshape(-1, head_dim), padding, tables.qkv)
    q, k, v = qkv.view(3, -1, tokens, head_dim)
    scores = torch.bmm(q, k.transpose(1, 2)).view(-1, tables.windows, heads, tokens, tokens)
    if relative_bias is None:
        scores = scores * spec.scale
    else:
        scores = torch.add(relative_bias.to(qkv.dtype), scores, alpha=spec.scale)
    with torch.no_grad():  # masks are constants; autograd would copy all gradients for each
        for windows, mask in tables.masks:
            scores[:, windows] += mask.to(qkv.dtype)
    weights = F.dropout(scores.softmax(-1), spec.dropout)
    out = torch.bmm(weights.view(-1, tokens, tokens), v)
    return _ToRaster.apply(out.view(-1, head_dim), tables.out).view(batch, height, width, channels)


@dataclass(frozen=True)
class Table:
    """Index tables between rows of one head of one token each, in raster order and in window order.

    Rows in raster order are (B, H * W, K, A), where K is 3 for queries, keys and values; rows in window order are
    (K, B, N, A, T).

    Attributes:
        tokens: row in raster order of each row in window order; any in padding slots.
        slots: row in window order of each row in raster order.
        padding: rows in window order of padding slots.
        heads: index among (K, A) of each of these rows.
    """

    tokens: Tensor
    slots: Tensor
    padding: Tensor
    heads: Tensor


@dataclass(frozen=True)
class Tables:
    """The tables of a map.

    Attributes:
        qkv: of queries, keys and values.
        out: of the results.
        windows: N, the number of windows of an image.
        masks: ranges of windows, and the (T, T) that is added to their scores.
    """

    qkv: Table
    out: Table
    windows: int
    masks: tuple[tuple[slice, Tensor], ...]


@functools.lru_cache(MAX_TABLES)
@torch.inference_mode(False)  # an inference tensor could not be used in training later
def _tables(batch: int, size: Pair, window: Pair, shift: Pair, heads: int) -> Tables:
    plan = plan_windows(*size, window, shift, _CPU)
    tokens = torch.cat([group.tokens for group in plan.groups])
    is_padding = torch.ones_like(tokens, dtype=torch.bool)
    is_padding[plan.slots] = False
    shape = (-1, 1, window[0] * window[1])
    images = torch.arange(batch, device=_CPU).view(-1, 1, 1, 1) * (size[0] * size[1])
    qkv, out = (_table(images + tokens.view(shape), is_padding.view(shape), kinds, heads) for kinds in (3, 1))
    masks, start = [], 0
    for group in plan.groups:
        stop = start + len(group.tokens) // shape[2]
        if group.mask is not None:
            masks.append((slice(start, stop), group.mask))
        start = stop
    return Tables(qkv, out, start, tuple(masks))


def _table(tokens: Tensor, is_padding: Tensor, kinds: int, heads: int) -> Table:
    """Build a table from the tokens of a batch, (B, N, 1, T), of which some are padding, (N, 1, T)."""
    head = torch.arange(kinds * heads, device=_CPU).view(kinds, 1, 1, heads, 1)
    rows = tokens * (kinds * heads) + head
    is_padding = is_padding.expand_as(rows).flatten()
    slots = rows.new_empty(rows.numel() - int(is_padding.sum()))
    in_window_order = (~is_padding).nonzero().flatten()
    slots[rows.flatten()[in_window_order]] = in_window_order
    padding = is_padding.nonzero().flatten()
    return Table(rows.flatten().int(), slots.int(), padding, head.expand_as(rows).flatten()[padding])


class _ToHeads(torch.autograd.Function):
    """Gather rows in window order, (rows, D), with those of ``padding``, (K * A, D), in padding slots."""

    @staticmethod
    def forward(ctx, x, padding, table: Table):
        ctx.table, ctx.heads = table, len(padding)
        return _in_window_order(x, padding, table)

    @staticmethod
    def backward(ctx, grad):
        table = ctx.table
        grad_x = grad.index_select(0, table.slots) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return grad_x, None, None
        in_padding = grad.index_select(0, table.padding)
        return grad_x, grad.new_zeros(ctx.heads, grad.shape[1]).index_add(0, table.heads, in_padding), None


class _ToRaster(torch.autograd.Function):
    """Gather rows in raster order, (rows, D)."""

    @staticmethod
    def forward(ctx, x, table: Table):
        ctx.table = table
        return x.index_select(0, table.slots)

    @staticmethod
    def backward(ctx, grad):
        return _in_window_order(grad, None, ctx.table), None


def _in_window_order(x: Tensor, padding: Tensor | None, table: Table) -> Tensor:
    rows = x.index_select(0, table.tokens)
    if not len(table.padding):
        return rows
    if padding is None:
        return rows.index_fill_(0, table.padding, 0)
    return rows.index_copy_(0, table.padding, padding.index_select(0, table.heads))

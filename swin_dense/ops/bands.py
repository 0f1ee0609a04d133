"""Working through a map in bands of window rows.

A Swin block is local to its windows, so the windows of a few rows can pass through the whole block before the next
rows begin. Temporaries, the largest four times as wide as the map, then stay in the cache and in memory that the
allocator hands out again, instead of being written to fresh pages. Every band is a map by itself, so the block runs on
it unchanged, and the results are the same.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from swin_dense.windows import Pair

# At 96 to 384 channels the widest temporary of a band takes 3 to 12 MB; half and twice as many tokens do as well.
BAND_TOKENS = 2048

Block = Callable[[Tensor, Pair, Tensor | None], Tensor]


def in_bands(block: Block, x: Tensor, window: Pair, shift: Pair, per_image: Tensor | None = None) -> Tensor:
    """Return ``block(x, shift, per_image)``, computed band by band where that is faster.

    That is on a CPU. A graph that is being recorded gets the whole map, so that it holds for any size and batch.

    Args:
        block: maps (B, H, W, C), a shift and ``per_image`` to (B, H, W, C), each window by itself.
        x: (B, H, W, C).
        window: (height, width) in tokens.
        shift: (height, width) in tokens by which the block displaces its windows.
        per_image: (B, ...) whatever else the block needs to know about each image.
    """
    if x.device.type != 'cpu' or torch.compiler.is_compiling() or torch.jit.is_tracing() or x.numel() == 0:
        return block(x, shift, per_image)
    images = max(1, BAND_TOKENS // (x.shape[1] * x.shape[2]))
    if images >= x.shape[0]:
        return _bands_of_group(block, x, window, shift, per_image)
    groups = x.split(images)
    extras = [None] * len(groups) if per_image is None else per_image.split(images)
    pairs = zip(groups, extras, strict=True)
    return torch.cat([_bands_of_group(block, group, window, shift, extra) for group, extra in pairs])


def _bands_of_group(block: Block, x: Tensor, window: Pair, shift: Pair, per_image: Tensor | None) -> Tensor:
    height, width = x.shape[1], x.shape[2]
    rows = max(1, round(BAND_TOKENS / (width * window[0]))) * window[0]
    full = (height - shift[0]) // rows
    if full < 1 or rows == height:
        return block(x, shift, per_image)
    # The roll brings the first rows to the last windows, so these rows make up the last band with the rows that
    # the full bands leave over. Only there do the windows of a shifted map cross its edge.
    first, *bands, last = x.split([shift[0]] + [rows] * full + [height - shift[0] - full * rows], 1)
    outs = [block(band, (0, shift[1]), per_image) for band in bands]
    if shift[0]:
        out = block(torch.cat([first, last], 1), shift, per_image)
        return torch.cat([out[:, : shift[0]], *outs, out[:, shift[0] :]], 1)
    return torch.cat([*outs, block(last, shift, per_image)] if last.shape[1] else outs, 1)

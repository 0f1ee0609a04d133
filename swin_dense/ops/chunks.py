"""Running a block on a few rows of windows at a time.

A Swin block is local to its windows: the windows of a few rows can pass through the whole block before the next rows
begin. Temporaries, the largest four times as wide as the map, then stay in the cache, and in memory that the allocator
hands out again, instead of being written to fresh pages. Every chunk is a map by itself, so the block's own modules run
on it, and the results are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from swin_dense.ops.windows import Pair

# With these the widest temporary of a chunk takes 13 to 25 MB in float32; above 32 MB, malloc asks for new pages each
# time. A quarter and twice as many tokens do nearly as well.
CHUNK_TOKENS = 8192
CHUNK_VALUES = 192 * CHUNK_TOKENS

# The images of a chunk, its rows, one range after the other, and the shift of its windows. There are two ranges where
# windows cross the edge of the map.
Chunk = tuple[slice, tuple[slice, ...], Pair]


def run(function: Callable[[Tensor, Pair], Tensor], x: Tensor, window: Pair, shift: Pair) -> Tensor | None:
    """Run a block on chunks of a map.

    Args:
        function: takes a map, (b, h, W, C), and the shift of its windows, and returns a map of the same shape.
        x: (B, H, W, C).
        window: (height, width) in tokens.
        shift: (height, width) in tokens.

    Returns:
        What ``function(x, shift)`` is, (B, H, W, C), or None where one chunk holds the whole map.
    """
    chunks = list(cut(x, window, shift))
    if len(chunks) < 2:
        return None
    out: Tensor | None = None
    for images, rows, chunk_shift in chunks:
        parts = [x[images, part] for part in rows]
        result = function(parts[0] if len(parts) == 1 else torch.cat(parts, 1), chunk_shift)
        if out is None:  # autocast may have chosen another dtype than that of x
            out = result.new_empty(x.shape)
        for part, values in zip(rows, result.split([part.shape[1] for part in parts], 1), strict=True):
            out[images, part] = values
    return out


def cut(x: Tensor, window: Pair, shift: Pair) -> Iterator[Chunk]:
    """Cut x, (B, H, W, C), into chunks."""
    batch, height, width, channels = x.shape
    tokens = max(1, min(CHUNK_TOKENS, CHUNK_VALUES // channels))
    images_at_once = max(1, tokens // (height * width))
    rows = max(1, round(tokens / (width * window[0]))) * window[0]
    full = (height - shift[0]) // rows
    for first in range(0, batch, images_at_once):
        images = slice(first, min(first + images_at_once, batch))
        if full < 1 or rows == height:
            yield images, (slice(0, height),), shift
            continue
        # The roll brings the first rows to the last windows, so these rows make up the last chunk together with the
        # rows that the others leave over. Only there do the windows of a shifted map cross its edge.
        for start in range(shift[0], shift[0] + full * rows, rows):
            yield images, (slice(start, start + rows),), (0, shift[1])
        ends = (slice(0, shift[0]), slice(shift[0] + full * rows, height))
        left_over = tuple(part for part in ends if part.start < part.stop)
        if left_over:
            yield images, left_over, shift

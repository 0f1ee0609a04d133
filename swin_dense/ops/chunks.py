"""Run a block on chunks of a map, a few rows of windows at a time.

A Swin block is local to its windows, so a few rows of windows can pass through the whole block before the next rows.
Temporaries, of which the largest has four times the channels of the map, then stay in the CPU cache and in memory that
the allocator reuses, instead of going to new pages. Each chunk is a map itself, so the modules of the block run on it
unchanged, and the results are the same.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from swin_dense.ops.windows import Pair

# With these values the largest temporary of a chunk takes 13 to 25 MB in float32; above 32 MB, malloc requests new
# pages each time. A quarter and twice as many tokens are nearly as fast.
CHUNK_TOKENS = 8192
CHUNK_VALUES = 192 * CHUNK_TOKENS

# In bytes, with malloc's header just below 32 MiB, beyond which glibc does not learn from a block.
_LARGEST_BLOCK = (1 << 25) - (1 << 16)

# The images of a chunk, its row ranges, and the shift of its windows. A chunk has two row ranges if its windows cross
# the edge of the map.
Chunk = tuple[slice, tuple[slice, ...], Pair]


@functools.cache
def keep_freed_memory() -> None:
    """Let glibc keep the memory that a pass frees, up to 64 MiB, for the next pass of this process.

    glibc returns what is free at the end of its heap to the system if it is more than twice the largest mapped block
    that was freed so far. Without this, each pass over a small map would get its memory anew, page by page. The block
    is never touched, so it takes no memory. Other allocators, and settings of the user, are not affected.

    Source: M_MMAP_THRESHOLD in https://man7.org/linux/man-pages/man3/mallopt.3.html
    """
    torch.empty(_LARGEST_BLOCK, dtype=torch.uint8, device='cpu')


def are_faster(x: Tensor) -> bool:
    """Return whether x, (B, H, W, C), has more tokens than one chunk."""
    return math.prod(x.shape[:3]) > _tokens_per_chunk(x)


def run(function: Callable[[Tensor, Pair, Pair], Tensor], x: Tensor, window: Pair, shift: Pair) -> Tensor:
    """Run a block on chunks of a map.

    Args:
        function: the block; takes a map, (b, h, W, C), its window and its shift, and returns the same shape.
        x: (B, H, W, C).
        window: (height, width) in tokens.
        shift: (height, width) in tokens.

    Returns:
        The same as ``function(x, window, shift)``, (B, H, W, C).
    """
    out: Tensor | None = None
    for images, rows, chunk_shift in cut(x, window, shift):
        parts = [x[images, part] for part in rows]
        result = function(parts[0] if len(parts) == 1 else torch.cat(parts, 1), window, chunk_shift)
        if out is None:  # under autocast the dtype may differ from that of x
            out = result.new_empty(x.shape)
        for part, values in zip(rows, result.split([part.shape[1] for part in parts], 1), strict=True):
            out[images, part] = values
    return function(x, window, shift) if out is None else out


def _tokens_per_chunk(x: Tensor) -> int:
    return max(1, min(CHUNK_TOKENS, CHUNK_VALUES // x.shape[3]))


def cut(x: Tensor, window: Pair, shift: Pair) -> Iterator[Chunk]:
    """Yield the chunks of x, (B, H, W, C)."""
    batch, height, width, _ = x.shape
    tokens = _tokens_per_chunk(x)
    images_at_once = max(1, tokens // (height * width))
    rows = max(1, round(tokens / (width * window[0]))) * window[0]
    full = (height - shift[0]) // rows
    for first in range(0, batch, images_at_once):
        images = slice(first, min(first + images_at_once, batch))
        if full < 1 or rows == height:
            yield images, (slice(0, height),), shift
            continue
        # The roll moves the first rows into the last windows. These rows and the remaining rows at the end form the
        # last chunk, the only one whose windows cross the upper and lower edge of the map.
        for start in range(shift[0], shift[0] + full * rows, rows):
            yield images, (slice(start, start + rows),), (0, shift[1])
        ends = (slice(0, shift[0]), slice(shift[0] + full * rows, height))
        remaining = tuple(part for part in ends if part.start < part.stop)
        if remaining:
            yield images, remaining, shift

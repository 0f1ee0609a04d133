"""Cutting a map into bands of window rows.

A Swin block is local to its windows, so the windows of a few rows can pass through the whole block before the next
rows begin. Temporaries, the largest four times as wide as the map, then stay in the cache and in memory that the
allocator hands out again, instead of being written to fresh pages. Every band is a map by itself, so the block runs on
it unchanged, and the results are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from swin_dense.windows import Pair

# With these the widest temporary of a band takes 3 to 6 MB; half and twice as many tokens do nearly as well.
BAND_TOKENS = 2048
BAND_VALUES = 192 * BAND_TOKENS


@dataclass(frozen=True)
class Band:
    """Part of a batch of maps, (B, H, W, C), that is a batch of maps by itself.

    Attributes:
        images: which images.
        rows: which rows, one range after the other; there are two where the windows wrap around the edge of the map.
        shift: (height, width) in tokens by which windows are displaced within the band.
    """

    images: slice
    rows: tuple[slice, ...]
    shift: Pair

    @property
    def is_view(self) -> bool:
        """Whether the band is in one piece, and of a contiguous map contiguous itself."""
        return len(self.rows) == 1

    def of(self, x: Tensor) -> Tensor:
        """Return the band of x, (b, h, W, C), a view or a copy."""
        parts = [x[self.images, rows] for rows in self.rows]
        return parts[0] if self.is_view else torch.cat(parts, 1)

    def put(self, x: Tensor, values: Tensor) -> None:
        """Write values, (b, h, W, C), to where the band lies in x."""
        start = 0
        for rows in self.rows:
            target = x[self.images, rows]
            target.copy_(values[:, start : start + target.shape[1]])
            start += target.shape[1]


def band_tokens(channels: int) -> int:
    """Return how many tokens make a good band."""
    return max(1, min(BAND_TOKENS, BAND_VALUES // channels))


def cut(images: slice, x: Tensor, window: Pair, shift: Pair) -> Iterator[Band]:
    """Cut some images of x, (B, H, W, C), into bands."""
    height, width, channels = x.shape[1:]
    tokens = band_tokens(channels)
    at_once = max(1, tokens // (height * width))
    for first in range(images.start, images.stop, at_once):
        group = slice(first, min(first + at_once, images.stop))
        rows = max(1, round(tokens / (width * window[0]))) * window[0]
        full = (height - shift[0]) // rows
        if full < 1 or rows == height:
            yield Band(group, (slice(0, height),), shift)
            continue
        # The roll brings the first rows to the last windows, so these rows make up the last band with the rows that
        # the full bands leave over. Only there do the windows of a shifted map cross its edge.
        for start in range(shift[0], shift[0] + full * rows, rows):
            yield Band(group, (slice(start, start + rows),), (0, shift[1]))
        ends = (slice(0, shift[0]), slice(shift[0] + full * rows, height))
        left_over = tuple(rows for rows in ends if rows.start < rows.stop)
        if left_over:
            yield Band(group, left_over, shift)

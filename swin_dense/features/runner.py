"""Compute the features of many images: read them ahead, batch those of equal size, split a batch if memory is short."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from swin_dense.features.extraction import Extraction, Maps
from swin_dense.features.sinks import MapSink, PooledSink, in_memory, pooled
from swin_dense.images.pixels import ImageError, name_of
from swin_dense.images.reading import decoded_bytes
from swin_dense.images.regions import open_large_image
from swin_dense.ops.windows import Size
from swin_dense.utils import memory
from swin_dense.utils.errors import is_out_of_memory

# Larger batches use more memory and are not faster on any device: 16 images of 1024 x 1024, or one camera photograph.
BATCH_PIXELS = 1 << 24
# Limits on the images that wait for others of equal size: a number of batches, and a number of bytes.
_WAITING_BATCHES = 8
_WAITING_BYTES = 1 << 28
# Limit on the memory of all prefetched images. A single image may exceed it.
_AHEAD_BYTES = 1 << 30
_logger = logging.getLogger(__package__)
Key = TypeVar('Key')
Value = TypeVar('Value')
Other = TypeVar('Other')


class Item(NamedTuple):
    """One image by its name."""

    name: str
    source: Any  # for read_image; None without an image


# An image with its (height, width) and its maps or vectors by stride, or with (0, 0) and an error.
Result = tuple[Item, Size, Maps | str]


@dataclass(eq=False)
class Runner:
    """Compute the maps of images, or one vector per image and level.

    When the device runs out of memory, the batch is split, and the reduced size is kept for later batches.
    """

    extraction: Extraction  # its backbone is in evaluation mode, on its device, without a wrapper
    pool: str | None = None  # how to pool each level to a vector, a key of ``POOLINGS``; None for maps
    batch_size: int = 8  # largest number of images of equal size in a batch
    workers: int = 2  # threads that read images ahead
    pixels: int = BATCH_PIXELS  # most in a batch

    def run(self, items: Iterator[Item]) -> Generator[Result, None, None]:
        """Yield the features of each image; closing the generator ends the threads that read ahead."""
        if self.extraction.tiling is not None:
            for item in items:
                yield item, *self._in_tiles(item.source)
            return
        with contextlib.closing(read_ahead(items, self._read, self.workers)) as images:
            for members, batch in batches(images, self.batch_size):
                if not isinstance(batch, Tensor):
                    yield members[0], (0, 0), str(batch)
                    continue
                if batch[0, 0].numel() > BATCH_PIXELS:
                    _note_size(members[0], batch)
                for item, result in zip(members, self._run_batch(batch), strict=True):
                    if isinstance(result, str):
                        yield item, (0, 0), f'{name_of(item.source)}: {result}'
                    else:
                        vectors = result if self.pool is None else pooled(result, self.pool)
                        yield item, (batch.shape[2], batch.shape[3]), vectors

    def _read(self, item: Item) -> Tensor | str:
        if item.source is None:
            return 'there is no image'
        try:
            return self.extraction.read(item.source)
        except (ImageError, TypeError, OSError) as error:
            return str(error)

    def _run_batch(self, images: Tensor) -> list[Maps | str]:
        """Return the maps of each image, or an error."""
        most = max(1, self.pixels // images[0, 0].numel())
        if len(images) > most:
            return [maps for part in images.split(most) for maps in self._run_batch(part)]
        try:
            return list(self.extraction.run(images))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        # After the `except` block, because the exception references the tensors of the failed attempt.
        device = next(self.extraction.backbone.parameters()).device
        if device.type == 'cuda':
            torch.cuda.empty_cache()
        else:
            memory.give_back()
        size = _size_of(images)
        if len(images) == 1:
            smaller = 'tile= or max_side='
            return [f'{device} has too little memory for {size}; use {smaller}']
        half = (len(images) + 1) // 2
        self.pixels = half * images[0, 0].numel()
        found = f'{device} has too little memory for {len(images)} images of {size} at once'
        _logger.warning('%s; continuing with %d', found, half)
        return self._run_batch(images)

    def _in_tiles(self, source: Any) -> tuple[Size, Maps | str]:
        try:
            with open_large_image(source, page=self.extraction.page) as image:
                sink = MapSink(image.size, in_memory) if self.pool is None else PooledSink(self.pool)
                for blocks in self.extraction.run_tiles(image):
                    sink.write(blocks)
                return image.size, sink.levels()
        except (ImageError, FileNotFoundError) as error:
            return (0, 0), str(error)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return (0, 0), f'{name_of(source)}: too little memory for one tile; use smaller tiles: {error}'


def _note_size(item: Item, image: Tensor) -> None:
    smaller = 'tile= takes less memory, and max_side= less time'
    _logger.warning('%s has %s and is computed whole; %s', name_of(item.source), _size_of(image), smaller)


def _size_of(images: Tensor) -> str:
    return f'{images.shape[2]} x {images.shape[3]} pixels'


def batches(
    images: Iterable[tuple[Key, Tensor | Other]], batch_size: int
) -> Iterator[tuple[list[Key], Tensor | Other]]:
    """Group images (C, H, W) by shape and dtype into batches (B, C, H, W), and yield each batch with its keys.

    Items that are no tensors are yielded at once, singly. If too many images wait, they are yielded as smaller batches.
    """
    waiting: dict[Any, list[tuple[Key, Tensor]]] = {}
    for key, image in images:
        if not isinstance(image, Tensor):
            yield [key], image
            continue
        kind, largest = (image.shape, image.dtype), min(batch_size, max(1, BATCH_PIXELS // image[0].numel()))
        waiting.setdefault(kind, []).append((key, image))
        del image  # so that only the batch holds it
        held = [image.nbytes for group in waiting.values() for _, image in group]
        if len(waiting[kind]) == largest:
            yield _stacked(waiting.pop(kind))
        elif len(held) == _WAITING_BATCHES * batch_size or sum(held) > _WAITING_BYTES:
            while waiting:
                yield _stacked(waiting.popitem()[1])
    while waiting:
        yield _stacked(waiting.popitem()[1])


def _stacked(group: list[tuple[Key, Tensor]]) -> tuple[list[Key], Tensor]:
    keys, images = zip(*group, strict=True)
    return list(keys), torch.stack(images) if len(images) > 1 else images[0][None]  # without a copy if it is large


def read_ahead(
    items: Iterator[Item], read: Callable[[Item], Value], workers: int
) -> Generator[tuple[Item, Value], None, None]:
    """Yield each item with what ``read`` returns for it, in order, while threads read the next ones.

    Threads are sufficient because image decoders release the GIL. With 0 workers, each image is read on demand.
    """
    if workers == 0:
        yield from ((item, read(item)) for item in items)
        return

    known = ((item, decoded_bytes(item.source)) for item in items)
    following = next(known, None)
    taken = 0
    costs: deque[tuple[Item, int]] = deque()
    images: deque[Future[Value]] = deque()
    readers = ThreadPoolExecutor(workers)
    try:
        while following or images:
            while following and len(images) < 4 * workers:
                if images and taken + following[1] > _AHEAD_BYTES:
                    break
                costs.append(following)
                images.append(readers.submit(read, following[0]))
                taken += following[1]
                following = next(known, None)
            item, cost = costs.popleft()
            yield item, images.popleft().result()  # no local name, so that only the caller references the image
            taken -= cost
    finally:
        readers.shutdown(cancel_futures=True)

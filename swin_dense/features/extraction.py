"""The extraction loop: prefetch images, batch them, run the backbone and store the features in a folder."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from swin_dense.features.folder import FeatureFolder
from swin_dense.features.images import decoded_bytes
from swin_dense.features.inference import BATCH_PIXELS, Inference, batches, run_batch
from swin_dense.features.listing import Item
from swin_dense.features.regions import open_large_image
from swin_dense.features.sinks import whole_image
from swin_dense.features.tiling import run_tiles
from swin_dense.ops.windows import Pair
from swin_dense.utils.memory import is_out_of_memory
from swin_dense.utils.pixels import ImageError, name_of
from swin_dense.utils.tiles import plan_tiles

# Limit on the memory of all prefetched images. A single image may exceed it.
_AHEAD_BYTES = 1 << 30
_logger = logging.getLogger(__package__)
Value = TypeVar('Value')


class Step(NamedTuple):
    """One step of an extraction: a finished image, or a tile of an unfinished one.

    Attributes:
        item: the image.
        error: the reason why a finished image has no features.
        tile: the number of the finished tile and of all tiles, while the image is unfinished.
    """

    item: Item
    error: str | None = None
    tile: tuple[int, int] | None = None


def extract(
    backbone: Any,
    items: Iterator[Item],
    folder: FeatureFolder,
    inference: Inference,
    batch_size: int = 8,
    workers: int = 0,
) -> Generator[Step, None, None]:
    """Extract the features of images into a folder, and yield each step; closing the generator ends the extraction.

    Images of equal size are batched. With tiling, images are processed one by one.

    Args:
        backbone: the backbone, on its device and without a data-parallel wrapper.
        items: the images; an item without a source is already finished.
        folder: the output folder.
        inference: the options of preprocessing and computation.
        batch_size: the maximum number of images per batch; large images, or a device with too little memory, reduce it.
        workers: the number of threads that prefetch images.

    Raises:
        OSError: the folder cannot be written. Features that are already written are kept.
    """
    if inference.tiling is not None:
        yield from _in_tiles(backbone, items, folder, inference)
        return
    with contextlib.closing(Runner(backbone, inference).run(items, batch_size, workers)) as results:
        for item, image_size, maps in results:
            if isinstance(maps, dict):
                with folder.receive(item, image_size) as sink:
                    sink.write(whole_image(maps))
                yield Step(item)
            elif maps is None:
                folder.confirm(item)
                yield Step(item)
            else:
                folder.fail(item, maps)
                yield Step(item, maps)


def _in_tiles(
    backbone: Any, items: Iterator[Item], folder: FeatureFolder, inference: Inference
) -> Generator[Step, None, None]:
    tiling: Any = inference.tiling
    for item in items:
        error = item.error
        if item.source is not None:
            try:
                with (
                    open_large_image(item.source, page=inference.page) as image,
                    folder.receive(item, image.size, tiling.tile) as sink,
                ):
                    count = len(plan_tiles(image.size, *tiling))
                    for number, blocks in enumerate(run_tiles(backbone, image, inference), 1):
                        sink.write(blocks)
                        if number < count:
                            yield Step(item, tile=(number, count))
            except (ImageError, FileNotFoundError) as reason:
                error = str(reason)
            except (RuntimeError, MemoryError) as reason:
                if not is_out_of_memory(reason):
                    raise
                error = f'{name_of(item.source)}: too little memory for one tile; use smaller tiles: {reason}'
        if error is not None:
            folder.fail(item, error)
        elif item.source is None:
            folder.confirm(item)
        yield Step(item, error)


def read_ahead(
    items: Iterator[Item], read: Callable[[Item], Value], workers: int
) -> Generator[tuple[Item, Value], None, None]:
    """Yield each item with its image, in order, while threads prefetch the next images.

    Threads are sufficient because image decoders release the GIL.

    Args:
        items: the images; another thread iterates over them.
        read: returns the image of an item.
        workers: the number of threads; 0 reads each image on demand.
    """
    if workers == 0:
        yield from ((item, read(item)) for item in items)
        return

    def following() -> tuple[Item, int] | None:
        item = next(items, None)
        return item and (item, decoded_bytes(item.source))

    taken = 0
    costs: deque[tuple[Item, int]] = deque()
    images: deque[Future[Value]] = deque()
    lister, readers = ThreadPoolExecutor(1), ThreadPoolExecutor(workers)
    listed = deque(lister.submit(following) for _ in range(4 * workers))
    try:
        while listed or images:
            while listed and len(images) < 4 * workers and (not images or listed[0].done()):
                found = listed[0].result()
                if found is None:
                    listed.clear()
                    break
                if images and taken + found[1] > _AHEAD_BYTES:
                    break
                listed.popleft()
                listed.append(lister.submit(following))
                costs.append(found)
                images.append(readers.submit(read, found[0]))
                taken += found[1]
            if images:
                item, cost = costs.popleft()
                yield item, images.popleft().result()  # no local name, so that only the caller references the image
                taken -= cost
    finally:
        lister.shutdown(cancel_futures=True)
        readers.shutdown(cancel_futures=True)


class Runner:
    """Run batches, and split them when the device runs out of memory; the reduced size is kept for later batches."""

    def __init__(self, backbone: Any, inference: Inference) -> None:
        self._backbone = backbone
        self._inference = inference
        self._pixels = BATCH_PIXELS

    def run(
        self, items: Iterator[Item], batch_size: int, workers: int
    ) -> Generator[tuple[Item, Pair, dict[int, Tensor] | str | None], None, None]:
        """Yield each image with its (height, width) and its maps, or with (0, 0) and an error, None without a source.

        Images are read ahead by threads, see :func:`read_ahead`; closing the generator ends them.
        """
        with contextlib.closing(read_ahead(items, self._read, workers)) as images:
            for members, batch in batches(images, batch_size):
                if not isinstance(batch, Tensor):
                    yield members[0], (0, 0), batch
                    continue
                try:
                    results: Sequence[Any] = self._run_batch(batch)
                except ImageError as error:
                    results = [f'{name_of(item.source)}: {error}' for item in members]
                for item, result in zip(members, results, strict=True):
                    yield item, (batch.shape[2], batch.shape[3]), result

    def _read(self, item: Item) -> Tensor | str | None:
        if item.source is None:
            return item.error
        try:
            return self._inference.read(item.source, self._backbone.in_channels)
        except (ImageError, TypeError, OSError) as error:
            return str(error)

    def _run_batch(self, images: Tensor) -> list[dict[int, Tensor]]:
        most = max(1, self._pixels // images[0, 0].numel())
        if len(images) > most:
            return [maps for part in images.split(most) for maps in self._run_batch(part)]
        try:
            return run_batch(self._backbone, images, self._inference)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        # After the `except` block, because the exception references the tensors of the failed attempt.
        return self._run_halves(images)

    def _run_halves(self, images: Tensor) -> list[dict[int, Tensor]]:
        device = next(self._backbone.parameters()).device
        if device.type == 'cuda':
            torch.cuda.empty_cache()
        size = f'{images.shape[2]} x {images.shape[3]} pixels'
        if len(images) == 1:
            raise ImageError(f'{device} has too little memory for {size}; use tile= (--tile) or max_side= (--max-side)')
        half = (len(images) + 1) // 2
        self._pixels = half * images[0, 0].numel()
        found = f'{device} has too little memory for {len(images)} images of {size} at once'
        _logger.warning('%s; continuing with %d', found, half)
        return self._run_batch(images)

"""The extraction loop: prefetch images, batch them, run the backbone and write the maps to a sink."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from swin_dense.features.decode import ImageError, decoded_bytes, name_of
from swin_dense.features.folder import FeatureFolder
from swin_dense.features.inference import Inference, run_batch
from swin_dense.features.regions import open_large_image
from swin_dense.features.sources import Item
from swin_dense.features.tiling import run_tiles, whole_image
from swin_dense.utils.memory import is_out_of_memory

# Limit on the memory of all prefetched images. A single image may exceed it.
_AHEAD_BYTES = 1 << 30
# Limits on the images that wait for others of equal size: a number of batches, and a number of bytes.
_WAITING_BATCHES = 8
_WAITING_BYTES = 1 << 28
# Larger batches use more memory and are not faster on any device: 16 images of 1024 x 1024, or one camera photograph.
_BATCH_PIXELS = 1 << 24
_logger = logging.getLogger(__package__)
Key = TypeVar('Key')
Value = TypeVar('Value')
Outcomes = Generator[tuple[Item, str | None], None, None]  # a finished image, and its error or None


def extract(
    backbone: Any,
    items: Iterator[Item],
    folder: FeatureFolder,
    inference: Inference,
    batch_size: int = 8,
    workers: int = 0,
    on_image: Callable[[str, str | None], None] = lambda name, error: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> None:
    """Extract the features of images into a folder.

    Images of equal size are batched. With tiling, images are processed one by one.

    Args:
        backbone: the backbone, on its device and without a data-parallel wrapper.
        items: the images; an item without a source is already finished.
        folder: the output folder.
        inference: the options of preprocessing and computation.
        batch_size: the maximum number of images per batch; large images, or a device with too little memory, reduce it.
        workers: the number of threads that prefetch images.
        on_image: called for each finished image with its name, and its error or None.
        should_stop: polled between images and between tiles; True ends the extraction.

    Raises:
        OSError: the folder cannot be written. Features that are already written are kept.
    """
    if inference.tiling is None:
        outcomes = _in_batches(backbone, items, folder, inference, batch_size, workers)
    else:
        outcomes = _in_tiles(backbone, items, folder, inference, should_stop)
    with contextlib.closing(outcomes):
        for item, error in outcomes:
            if error is not None:
                folder.fail(item.name, item.version, error)
            elif item.source is None:
                folder.confirm(item.name, item.version)
            on_image(item.name, error)
            if should_stop():
                return


def _in_batches(
    backbone: Any, items: Iterator[Item], folder: FeatureFolder, inference: Inference, batch_size: int, workers: int
) -> Outcomes:
    def read(item: Item) -> Tensor | str | None:
        return item.error if item.source is None else try_to_read(item.source, inference, backbone.in_channels)

    run = Runner(backbone, inference)
    with contextlib.closing(read_ahead(items, read, workers)) as samples:
        for members, images in batches(samples, batch_size):
            if not isinstance(images, Tensor):
                yield members[0], images
                continue
            try:
                all_maps = run(images)
            except ImageError as error:
                yield from ((item, f'{name_of(item.source)}: {error}') for item in members)
                continue
            for item, maps in zip(members, all_maps, strict=True):
                with folder.receive(item.name, item.version, (images.shape[2], images.shape[3])) as sink:
                    sink.write(whole_image(maps))
                yield item, None


def _in_tiles(
    backbone: Any, items: Iterator[Item], folder: FeatureFolder, inference: Inference, should_stop: Callable[[], bool]
) -> Outcomes:
    tiling: Any = inference.tiling
    for item in items:
        error = item.error
        if item.source is not None:
            try:
                with (
                    open_large_image(item.source, page=inference.page) as image,
                    folder.receive(item.name, item.version, image.size, tiling.tile) as sink,
                ):
                    for blocks in run_tiles(backbone, image, inference):
                        sink.write(blocks)
                        if should_stop():
                            raise _StopError
            except _StopError:
                return
            except (ImageError, FileNotFoundError) as reason:
                error = str(reason)
            except (RuntimeError, MemoryError) as reason:
                if not is_out_of_memory(reason):
                    raise
                error = f'{name_of(item.source)}: too little memory for one tile; use smaller tiles: {reason}'
        yield item, error


class _StopError(Exception):
    """Abort the current image, so that its temporary file is removed."""


def try_to_read(source: Any, inference: Inference, channels: int) -> Tensor | str:
    """Return the output of :meth:`Inference.read`, (channels, H, W), or the error message if reading fails."""
    try:
        return inference.read(source, channels)
    except (ImageError, TypeError, OSError, MemoryError) as error:
        return str(error) or type(error).__name__


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


def batches(
    samples: Iterable[tuple[Key, Tensor | Value]], batch_size: int
) -> Iterator[tuple[list[Key], Tensor | Value]]:
    """Group images by shape and dtype into batches (B, C, H, W), and yield each batch with its keys.

    A sample that is not a tensor is yielded by itself at once. If too many images wait for others of equal size, all
    waiting groups are yielded as smaller batches.
    """
    waiting: dict[Any, list[tuple[Key, Tensor]]] = {}
    count = held = 0
    for key, image in samples:
        if not isinstance(image, Tensor):
            yield [key], image
            continue
        kind = image.shape, image.dtype
        waiting.setdefault(kind, []).append((key, image))
        count, held = count + 1, held + image.nbytes
        if count == _WAITING_BATCHES * batch_size or held > _WAITING_BYTES:
            ready = list(waiting)
        elif len(waiting[kind]) == min(batch_size, max(1, _BATCH_PIXELS // image[0].numel())):
            ready = [kind]
        else:
            continue
        del image
        for kind in ready:
            group = waiting.pop(kind)
            count, held = count - len(group), held - sum(image.nbytes for _, image in group)
            yield _stacked(group)
    while waiting:
        yield _stacked(waiting.popitem()[1])


def _stacked(group: list[tuple[Key, Tensor]]) -> tuple[list[Key], Tensor]:
    images = [image for _, image in group]
    # `stack` copies, which is costly for a single large image.
    return [key for key, _ in group], images[0][None] if len(images) == 1 else torch.stack(images)


class Runner:
    """Run batches, and split them when the device runs out of memory; the reduced size is kept for later batches."""

    def __init__(self, backbone: Any, inference: Inference) -> None:
        self._backbone = backbone
        self._inference = inference
        self._pixels = _BATCH_PIXELS

    def __call__(self, images: Tensor) -> list[dict[int, Tensor]]:
        """Return the maps of each image of a batch of :func:`batches`, (B, C, H, W).

        Raises:
            ImageError: a single image does not fit into memory.
        """
        pixels = images[0, 0].numel()
        most = max(1, self._pixels // pixels)
        if len(images) > most:
            return [maps for part in images.split(most) for maps in self(part)]
        device = next(self._backbone.parameters()).device
        try:
            return run_batch(self._backbone, self._inference.prepare(images.to(device)), self._inference)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        # After the `except` block, because the exception references the tensors of the failed attempt.
        if device.type == 'cuda':
            torch.cuda.empty_cache()
        size = f'{images.shape[2]} x {images.shape[3]} pixels'
        if len(images) == 1:
            raise ImageError(f'{device} has too little memory for {size}; use tile= (--tile) or max_side= (--max-side)')
        half = (len(images) + 1) // 2
        self._pixels = half * pixels
        _logger.warning(
            '%s has too little memory for %d images of %s at once; continuing with %d',
            device,
            len(images),
            size,
            half,
        )
        return self(images)

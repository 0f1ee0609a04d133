"""Run a backbone on many images: read them ahead, batch those of equal size, split a batch if memory is short, pool."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from swin_dense.images.normalization import Inference
from swin_dense.images.pixels import ImageError, name_of
from swin_dense.images.reading import decoded_bytes
from swin_dense.ops.windows import Pair
from swin_dense.utils import checks, memory
from swin_dense.utils.choices import POOLINGS
from swin_dense.utils.errors import is_out_of_memory

# Larger batches use more memory and are not faster on any device: 16 images of 1024 x 1024, or one camera photograph.
BATCH_PIXELS = 1 << 24
# Limits on the images that wait for others of equal size: a number of batches, and a number of bytes.
_WAITING_BATCHES = 8
_WAITING_BYTES = 1 << 28
# Limit on the memory of all prefetched images. A single image may exceed it.
_AHEAD_BYTES = 1 << 30
_GEM_FLOOR = 1e-6
# Per stride, the rows and columns of the level that a tile covers, and their values (C, rows, columns).
Blocks = dict[int, tuple[slice, slice, Tensor]]
_logger = logging.getLogger(__package__)
Key = TypeVar('Key')
Value = TypeVar('Value')
Other = TypeVar('Other')


class Item(NamedTuple):
    """One image by its name."""

    name: str
    source: Any  # for read_image; None if there is none


Results = Generator[tuple[Item, Pair, Any], None, None]


def check_dtype(name: str, value: Any, allowed: Sequence[str]) -> torch.dtype | None:
    """Return a torch dtype, given as a torch or numpy dtype or by name; None stays None."""
    if value is None:
        return None
    word = getattr(value, '__name__', str(value)).removeprefix('torch.')
    checks.one_of(name, word, allowed)
    return getattr(torch, word)


def on_device(module: nn.Module | Tensor, device: torch.device | str) -> Any:
    """Move a module or a tensor to a device; raise ValueError if it is not available, TypeError if it is none."""
    try:
        return module.to(device=device)  # by keyword, because `to` would accept a dtype in its place
    except (RuntimeError, AssertionError) as error:  # AssertionError if torch was built without CUDA
        reason = str(error).partition('\n')[0]
        raise ValueError(f'{checks.argument("device", str(device))} cannot be used: {reason}') from error
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{checks.argument('device')} must be a torch.device or a name such as 'cuda:0', got {device!r}"
        ) from error


def check_levels(backbone: Any, levels: Sequence[int] | None) -> tuple[int, ...]:
    """Validate ``levels`` and return the strides to extract, in the backbone's order."""
    strides = tuple(backbone.out_strides)
    chosen = strides if levels is None else checks.integers('levels', levels)
    stride, count = Counter(strides).most_common(1)[0]
    if count > 1:
        raise ValueError(
            f'{count} of the maps have stride {stride}, but strides must be unique; '
            'select one of them with out_indices when building the backbone'
        )
    for stride in chosen:
        checks.one_of(f'every entry of {checks.argument("levels")}', stride, strides)
    return tuple(stride for stride in strides if stride in chosen)


def batches(
    images: Iterable[tuple[Key, Tensor | Other]], batch_size: int
) -> Iterator[tuple[list[Key], Tensor | Other]]:
    """Group images (C, H, W) by shape and dtype into batches (B, C, H, W), and yield each batch with its keys.

    What is not a tensor is yielded by itself at once. If too many images wait, they are yielded as smaller batches.
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


def run_batch(backbone: Any, images: Tensor, inference: Inference, gradients: bool = False) -> list[dict[int, Tensor]]:
    """Compute the maps of a batch (B, C, H, W) of images of :meth:`Inference.read`, in evaluation mode, on any device.

    Return, per image, {stride: (C, ceil(H / stride), ceil(W / stride))}; with ``gradients``, in the autograd graph.
    """
    autocast, dtype = inference.autocast, inference.dtype
    with contextlib.nullcontext() if gradients else torch.inference_mode():
        batch = inference.input_for(backbone, images)
        with contextlib.nullcontext() if autocast is None else torch.autocast(batch.device.type, autocast):
            outs = backbone(batch)
    maps = dict(zip(backbone.out_strides, outs, strict=True))
    found: list[dict[int, Tensor]] = [{} for _ in range(len(images))]
    for stride in inference.levels or maps:
        for own, level in zip(found, maps[stride], strict=True):
            # Copied outside inference mode, so that a head can be trained on it; a view would keep the batch in memory.
            own[stride] = level.to(dtype or level.dtype, copy=True)
    return found


def read_ahead(
    items: Iterator[Item], read: Callable[[Item], Value], workers: int
) -> Generator[tuple[Item, Value], None, None]:
    """Yield each item with what ``read`` returns for it, in order, while threads list and read the next ones.

    Threads are sufficient because image decoders release the GIL. With 0 workers, each image is read on demand.
    """
    if workers == 0:
        yield from ((item, read(item)) for item in items)
        return

    def following() -> tuple[Item, int] | None:
        item = next(items, None)
        return item and (item, decoded_bytes(item.source))

    most, taken = 4 * workers, 0
    costs: deque[tuple[Item, int]] = deque()
    images: deque[Future[Value]] = deque()
    lister, readers = ThreadPoolExecutor(1), ThreadPoolExecutor(workers)
    listed = deque(lister.submit(following) for _ in range(most))
    try:
        while True:
            while len(images) < most and (listed[0].done() or not images):
                found = listed[0].result()
                if found is None or (images and taken + found[1] > _AHEAD_BYTES):
                    break
                listed.popleft()
                listed.append(lister.submit(following))
                costs.append(found)
                images.append(readers.submit(read, found[0]))
                taken += found[1]
            if not images:
                return
            item, cost = costs.popleft()
            yield item, images.popleft().result()  # no local name, so that only the caller references the image
            taken -= cost
    finally:
        lister.shutdown(cancel_futures=True)
        readers.shutdown(cancel_futures=True)


@dataclass(eq=False)
class Runner:
    """Run batches, and split them when the device runs out of memory; the reduced size is kept for later batches.

    The backbone is in evaluation mode, on its device, without a wrapper. A batch has at most this many pixels.
    """

    backbone: Any
    inference: Inference
    pixels: int = BATCH_PIXELS

    def run(self, items: Iterator[Item], batch_size: int, workers: int) -> Results:
        """Yield each image with its (height, width) and its maps, or with (0, 0) and an error.

        Closing the generator ends the ``workers``, threads that read ahead.
        """
        with contextlib.closing(read_ahead(items, self._read, workers)) as images:
            for members, batch in batches(images, batch_size):
                if not isinstance(batch, Tensor):
                    yield members[0], (0, 0), batch
                    continue
                for item, result in zip(members, self._run_batch(batch), strict=True):
                    maps = result if isinstance(result, dict) else f'{name_of(item.source)}: {result}'
                    yield item, (batch.shape[2], batch.shape[3]), maps

    def _read(self, item: Item) -> Tensor | str | None:
        if item.source is None:
            return 'there is no image'
        try:
            return self.inference.read(item.source, self.backbone.in_channels)
        except (ImageError, TypeError, OSError) as error:
            return str(error)

    def _run_batch(self, images: Tensor) -> list[Any]:
        """Return the maps of each image, or an error."""
        most = max(1, self.pixels // images[0, 0].numel())
        if len(images) > most:
            return [maps for part in images.split(most) for maps in self._run_batch(part)]
        try:
            return run_batch(self.backbone, images, self.inference)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        # After the `except` block, because the exception references the tensors of the failed attempt.
        device = next(self.backbone.parameters()).device
        if device.type == 'cuda':
            torch.cuda.empty_cache()
        else:
            memory.give_back()
        size = f'{images.shape[2]} x {images.shape[3]} pixels'
        if len(images) == 1:
            smaller = f'{checks.argument("tile", ...)} or {checks.argument("max_side", ...)}'
            return [f'{device} has too little memory for {size}; use {smaller}']
        half = (len(images) + 1) // 2
        self.pixels = half * images[0, 0].numel()
        found = f'{device} has too little memory for {len(images)} images of {size} at once'
        _logger.warning('%s; continuing with %d', found, half)
        return self._run_batch(images)


def whole_image(maps: Mapping[int, Tensor]) -> Blocks:
    """Return the maps of an image, {stride: (C, rows, columns)}, as the blocks of a single tile."""
    return {stride: (slice(None), slice(None), level) for stride, level in maps.items()}


class PooledSink:
    """Pool each level of an image to one vector; ``pool`` is a key of ``POOLINGS``.

    Like :class:`MapSink`, it is given the blocks of one tile, or of the whole image, at a time; those of all calls
    cover every level exactly once.
    """

    def __init__(self, pool: str) -> None:
        self._power = POOLINGS[pool]
        self._totals: dict[int, Tensor] = {}
        self._cells: Counter[int] = Counter()

    def write(self, blocks: Blocks) -> None:
        for stride, (_, _, values) in blocks.items():
            cells = values.double() if self._power == 1 else values.double().clamp(min=_GEM_FLOOR) ** self._power
            self._totals[stride] = self._totals.get(stride, 0) + cells.sum((1, 2))
            self._cells[stride] += values[0].numel()

    def levels(self) -> dict[int, Tensor]:
        """Return the vectors by stride, {stride: (C,)}, in float64 on the CPU."""
        return {s: ((total / self._cells[s]) ** (1 / self._power)).cpu() for s, total in self._totals.items()}


@contextlib.contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Set evaluation mode inside the block, and restore each submodule's mode after it.

    Threads may share a module that is in evaluation mode already, as those of ``create_backbone`` are.
    """
    trained = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in trained:
            part.training = True

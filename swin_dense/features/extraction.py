"""From many image files to a folder of feature files: what ``swin-dense features`` does."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from swin_dense import checks
from swin_dense.features.dataset import Sample, chunk_shares, read_ahead
from swin_dense.features.decode import ImageError
from swin_dense.features.inference import Inference, bare_backbone, run_batch
from swin_dense.features.regions import LargeImage, open_large_image
from swin_dense.features.storage import FeatureFolder, note_failure, source_of
from swin_dense.features.tiling import run_tiles
from swin_dense.memory import is_out_of_memory
from swin_dense.windows import Pair

_BATCHES_PER_CHUNK = 4
# More pixels in one batch make no device faster and take memory: 16 images of 1024 x 1024, or one camera photograph.
_BATCH_PIXELS = 1 << 24
_WAITING_BYTES = 1 << 28  # of images that wait for others of their size
_logger = logging.getLogger(__package__)
_GEM_POWER = 3.0
_GEM_FLOOR = 1e-6


@dataclass(frozen=True)
class Pooling:
    """A mean over the cells of a level: each value goes through ``before``, their mean through ``after``."""

    before: Callable[[Tensor], Tensor]
    after: Callable[[Tensor], Tensor]

    def total(self, level: Tensor) -> Tensor:
        """Return the sum over the cells, (C, H, W) to (C,), in float64."""
        return self.before(level.double()).sum((1, 2))

    def __call__(self, level: Tensor, dtype: torch.dtype) -> Tensor:
        """Pool a level, (C, H, W) to (C,)."""
        return self.after(self.total(level) / level[0].numel()).to(dtype)


POOLINGS = {
    'avg': Pooling(lambda x: x, lambda mean: mean),
    # Generalised mean: between the average and the maximum, on the positive part.
    'gem': Pooling(lambda x: x.clamp(min=_GEM_FLOOR) ** _GEM_POWER, lambda mean: mean ** (1 / _GEM_POWER)),
}


@dataclass(frozen=True)
class Extraction:
    """How features are made.

    Attributes:
        inference: how the maps are computed. With ``tiling``, large images are read one after the other in place of
            batches.
        pool: 'none' for maps, or a key of ``POOLINGS`` for one vector per level.
        dtype: of what is written.
        batch_size: how many images of equal size run at once; fewer where they have many pixels together, or the
            device has too little memory.
        workers: threads that read images ahead.
    """

    inference: Inference
    pool: str = 'none'
    dtype: torch.dtype = torch.float32
    batch_size: int = 8
    workers: int = 0

    def __post_init__(self) -> None:
        checks.one_of('pool', self.pool, ('none', *POOLINGS))
        checks.integer('batch_size', self.batch_size)
        checks.integer('workers', self.workers, minimum=0)

    @property
    def chunk_size(self) -> int:
        """How many consecutive images are looked through for equal sizes; a large image is on its own."""
        return 1 if self.inference.tiling else _BATCHES_PER_CHUNK * self.batch_size


def extract_files(
    backbone: Any,
    paths: Sequence[str],
    folder: FeatureFolder,
    extraction: Extraction,
    rank: int = 0,
    world_size: int = 1,
    on_start: Callable[[int, int], None] = lambda images, finished: None,
    on_image: Callable[[str, str | None], None] = lambda path, error: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> dict[str, str]:
    """Write the features of this rank's share of the images; those already in the folder are passed over.

    Args:
        backbone: on the device on which it shall run, bare or in a wrapper for data parallelism.
        paths: all images, the same in every rank.
        folder: where the features go.
        extraction: how they are made.
        rank: of this process.
        world_size: number of processes.
        on_start: called with how many images the share has, and how many of them are finished.
        on_image: called with every image that is done, and why it failed or None.
        should_stop: asked between batches and tiles.

    Returns:
        By path, why an image failed. The folder holds this too, for ``collect_failures``.

    Raises:
        OSError: the folder cannot be written. What has been written stays.
    """
    share = _Share(bare_backbone(backbone), paths, folder, extraction, rank, on_image, should_stop)
    chunks = chunk_shares(len(paths), extraction.chunk_size, rank, world_size)
    for index in (index for chunk in chunks for index in chunk):
        if not folder.is_finished(paths[index]):
            share.pending[index] = source_of(paths[index])
    images = sum(map(len, chunks))
    on_start(images, images - len(share.pending))
    chunks = [chunk for chunk in chunks if any(index in share.pending for index in chunk)]
    if extraction.inference.tiling is None:
        _extract_in_batches(share, chunks)
    else:
        _extract_one_by_one(share, chunks)
    return share.failures


@dataclass
class _Share:
    """What one rank does.

    Attributes:
        pending: by index of the paths that are still to be done, what :func:`source_of` says of them.
        failures: by path, why an image failed.
        batch_pixels: how many pixels run at once.
    """

    backbone: Any
    paths: Sequence[str]
    folder: FeatureFolder
    extraction: Extraction
    rank: int
    on_image: Callable[[str, str | None], None]
    should_stop: Callable[[], bool]
    pending: dict[int, Pair | None] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    batch_pixels: int = _BATCH_PIXELS

    def report(self, path: str, error: str | None = None) -> None:
        if error is not None:
            self.failures[path] = error
            note_failure(self.folder, self.rank, path, error)
        self.on_image(path, error)


def _extract_in_batches(share: _Share, chunks: Sequence[Sequence[int]]) -> None:
    for members, images in _batches(share, chunks):
        if share.should_stop():
            return
        if not any(index in share.pending for index in members):
            continue
        try:
            all_maps = _run(share, images)
        except ImageError as error:
            for index in share.pending.keys() & members:
                share.report(share.paths[index], f'image {share.paths[index]!r}: {error}')
            continue
        size = (images.shape[2], images.shape[3])
        for index, maps in zip(members, all_maps, strict=True):
            if index in share.pending:
                path = share.paths[index]
                share.folder.save(path, _finish(maps, share.extraction), size, share.pending[index])
                share.report(path)
        if share.should_stop():
            return


def _batches(share: _Share, chunks: Sequence[Sequence[int]]) -> Iterator[tuple[list[int], Tensor]]:
    """Yield images of equal size and type as they are stored, (B, C, H, W), and which they are."""
    indices = [index for chunk in chunks for index in chunk]
    read = partial(share.extraction.inference.read, channels=share.backbone.in_channels)
    with contextlib.closing(read_ahead(share.paths, indices, read, share.extraction.workers)) as samples:
        for chunk in chunks:
            waiting: dict[Any, list[Sample]] = {}
            held = 0
            for sample in itertools.islice(samples, len(chunk)):
                if sample.image is None:
                    if sample.index in share.pending:
                        share.report(share.paths[sample.index], sample.error)
                    continue
                kind = sample.image.shape, sample.image.dtype
                waiting.setdefault(kind, []).append(sample)
                held += sample.image.nbytes
                most = min(share.extraction.batch_size, max(1, _BATCH_PIXELS // sample.image[0].numel()))
                if held > _WAITING_BYTES:
                    ready, held = list(waiting), 0
                elif len(waiting[kind]) == most:
                    ready = [kind]
                    held -= most * sample.image.nbytes
                else:
                    ready = []
                del sample
                for kind in ready:
                    yield _stack(waiting.pop(kind))
            while waiting:
                yield _stack(waiting.popitem()[1])


def _stack(samples: list[Sample]) -> tuple[list[int], Tensor]:
    images = [sample.image for sample in samples if sample.image is not None]
    # A single image may be so large that a copy counts.
    return [sample.index for sample in samples], images[0][None] if len(images) == 1 else torch.stack(images)


def _run(share: _Share, images: Tensor) -> list[dict[int, Tensor]]:
    """Compute the maps of a batch, in as many parts as the memory of the device demands.

    Raises:
        ImageError: there is too little memory for a single image.
    """
    pixels = images[0, 0].numel()
    most = max(1, share.batch_pixels // pixels)
    if len(images) > most:
        return [maps for part in images.split(most) for maps in _run(share, part)]
    device = next(share.backbone.parameters()).device
    inference = share.extraction.inference
    try:
        return run_batch(share.backbone, inference.prepare(images.to(device)), inference)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    # Out of the handler, which holds on to everything that the attempt computed.
    if device.type == 'cuda':
        torch.cuda.empty_cache()
    size = f'{images.shape[2]} x {images.shape[3]} pixels'
    if len(images) == 1:
        raise ImageError(f'{device} has too little memory for its {size}; use tile= (--tile) or max_side= (--max-side)')
    half = (len(images) + 1) // 2
    share.batch_pixels = half * pixels
    _logger.warning(
        '%s has too little memory for %d images of %s at once; going on with %d', device, len(images), size, half
    )
    return _run(share, images)


def _extract_one_by_one(share: _Share, chunks: Sequence[Sequence[int]]) -> None:
    for (index,) in chunks:
        if share.should_stop():
            return
        path = share.paths[index]
        try:
            with open_large_image(path, page=share.extraction.inference.page) as image:
                if share.extraction.pool == 'none':
                    _save_tiles(share, index, image)
                else:
                    _save_pooled_tiles(share, index, image)
        except _StopError:
            return
        except (ImageError, FileNotFoundError) as error:
            share.report(path, str(error))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            share.report(path, f'image {path!r}: too little memory for one tile; use a smaller one: {error}')
        else:
            share.report(path)


class _StopError(Exception):
    """Leaves an unfinished image; its temporary file goes with it."""


def _save_tiles(share: _Share, index: int, image: LargeImage) -> None:
    inference = replace(share.extraction.inference, dtype=share.extraction.dtype)
    channels = dict(zip(share.backbone.out_strides, share.backbone.out_channels, strict=True))
    channels = {stride: channels[stride] for stride in inference.levels or channels}
    tile = inference.tiling.tile if inference.tiling else image.size
    path, source, dtype = share.paths[index], share.pending[index], share.extraction.dtype
    with share.folder.save_in_pieces(path, channels, image.size, dtype, tile, source) as write:
        for blocks in run_tiles(share.backbone, image, inference):
            write(blocks)
            if share.should_stop():
                raise _StopError


def _save_pooled_tiles(share: _Share, index: int, image: LargeImage) -> None:
    pooling = POOLINGS[share.extraction.pool]
    totals: dict[int, Tensor] = {}
    cells: Counter[int] = Counter()
    for blocks in run_tiles(share.backbone, image, share.extraction.inference):
        for stride, (_, _, values) in blocks.items():
            totals[stride] = totals.get(stride, 0) + pooling.total(values)
            cells[stride] += values[0].numel()
        if share.should_stop():
            raise _StopError
    dtype = share.extraction.dtype
    pooled = {stride: pooling.after(total / cells[stride]).to(dtype) for stride, total in totals.items()}
    share.folder.save(share.paths[index], pooled, image.size, share.pending[index])


def _finish(maps: Mapping[int, Tensor], extraction: Extraction) -> dict[int, Tensor]:
    if extraction.pool == 'none':
        return {stride: level.to(extraction.dtype) for stride, level in maps.items()}
    return {stride: POOLINGS[extraction.pool](level, extraction.dtype) for stride, level in maps.items()}

"""From many image files to a folder of feature files: what ``swin-dense features`` does."""

from __future__ import annotations

import glob
import hashlib
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from swin_dense import checks
from swin_dense.features.dataset import ChunkSampler, Collate, ImageDataset
from swin_dense.features.decode import ImageError
from swin_dense.features.inference import Inference, run_batch
from swin_dense.features.regions import LargeImage, open_large_image
from swin_dense.features.storage import FeatureFolder
from swin_dense.features.tiling import run_tiles

IMAGE_SUFFIXES = frozenset(
    {'.bmp', '.gif', '.jpeg', '.jpg', '.jp2', '.pgm', '.png', '.pnm', '.ppm', '.tif', '.tiff', '.webp', '.zarr'}
)
_BATCHES_PER_CHUNK = 4
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
        batch_size: how many images of equal size run at once.
        workers: processes that read images.
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


def list_images(sources: Sequence[str | os.PathLike]) -> list[str]:
    """Return the image files that files, folders, glob patterns and lists name, each once, in a fixed order.

    A folder stands for the images anywhere below it, by suffix; a ``.txt`` file for one path per line.

    Raises:
        FileNotFoundError: a source does not exist and is no pattern that matches something.
    """
    found: dict[str, str] = {}
    for source in sources:
        for path in _expand(os.fspath(source)):
            found.setdefault(os.path.abspath(path), path)
    return list(found.values())


def extract_files(
    backbone: Any,
    paths: Sequence[str],
    folder: FeatureFolder,
    extraction: Extraction,
    rank: int = 0,
    world_size: int = 1,
    on_image: Callable[[str, str | None], None] = lambda path, error: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> dict[str, str]:
    """Write the features of this rank's share of the images; those already in the folder are passed over.

    Args:
        backbone: on the device on which it shall run.
        paths: all images, the same in every rank.
        folder: where the features go.
        extraction: how they are made.
        rank: of this process.
        world_size: number of processes.
        on_image: called with every image that is done, and why it failed or None.
        should_stop: asked between batches and tiles.

    Returns:
        By path, why an image failed.

    Raises:
        OSError: the folder cannot be written. What has been written stays.
    """
    pending = [not folder.is_finished(path) for path in paths]
    chunks = ChunkSampler(pending, extraction.chunk_size, rank, world_size)
    share = _Share(backbone, paths, pending, chunks, folder, extraction, on_image, should_stop)
    if extraction.inference.tiling is None:
        _extract_in_batches(share)
    else:
        _extract_one_by_one(share)
    return share.failures


def weights_digest(module: nn.Module) -> str:
    """Return a short hash of all weights, to tell whether two runs used the same."""
    digest = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Within the block, SIGINT and SIGTERM only append their number to the list that is given."""
    received: list[int] = []
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in previous:
        signal.signal(number, lambda number, frame: received.append(number))
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@dataclass
class _Share:
    """What one rank does.

    Attributes:
        pending: per path, whether it is still to be done.
        chunks: of the indices of the paths that are this rank's.
        failures: by path, why an image failed.
    """

    backbone: Any
    paths: Sequence[str]
    pending: Sequence[bool]
    chunks: ChunkSampler
    folder: FeatureFolder
    extraction: Extraction
    on_image: Callable[[str, str | None], None]
    should_stop: Callable[[], bool]
    failures: dict[str, str] = field(default_factory=dict)

    def report(self, path: str, error: str | None = None) -> None:
        if error is not None:
            self.failures[path] = error
        self.on_image(path, error)


def _extract_in_batches(share: _Share) -> None:
    inference, paths, pending = share.extraction.inference, share.paths, share.pending
    loader = DataLoader(
        ImageDataset(paths, share.backbone.in_channels, inference, skip_broken=True),
        batch_sampler=share.chunks,
        collate_fn=Collate(share.extraction.batch_size),
        num_workers=share.extraction.workers,
        worker_init_fn=_leave_signals_to_parent,
    )
    for batches, broken in loader:
        for sample in broken:
            share.report(paths[sample.index], sample.error)
        for batch in batches:
            if share.should_stop():
                return
            if not any(pending[index] for index in batch.indices):
                continue
            size = (batch.images.shape[2], batch.images.shape[3])
            all_maps = run_batch(share.backbone, batch.images, inference)
            for index, maps in zip(batch.indices, all_maps, strict=True):
                if pending[index]:
                    share.folder.save(paths[index], _finish(maps, share.extraction), size)
                    share.report(paths[index])
        if share.should_stop():
            return


def _extract_one_by_one(share: _Share) -> None:
    for (index,) in share.chunks:
        if share.should_stop():
            return
        path = share.paths[index]
        try:
            with open_large_image(path) as image:
                if share.extraction.pool == 'none':
                    _save_tiles(share, path, image)
                else:
                    _save_pooled_tiles(share, path, image)
        except _StopError:
            return
        except (ImageError, FileNotFoundError) as error:
            share.report(path, str(error))
        else:
            share.report(path)


class _StopError(Exception):
    """Leaves an unfinished image; its temporary file goes with it."""


def _save_tiles(share: _Share, path: str, image: LargeImage) -> None:
    inference = replace(share.extraction.inference, dtype=share.extraction.dtype)
    channels = dict(zip(share.backbone.out_strides, share.backbone.out_channels, strict=True))
    channels = {stride: channels[stride] for stride in inference.levels or channels}
    tile = inference.tiling.tile if inference.tiling else image.size
    with share.folder.save_in_pieces(path, channels, image.size, share.extraction.dtype, tile) as write:
        for blocks in run_tiles(share.backbone, image, inference):
            write(blocks)
            if share.should_stop():
                raise _StopError


def _save_pooled_tiles(share: _Share, path: str, image: LargeImage) -> None:
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
    share.folder.save(path, pooled, image.size)


def _finish(maps: Mapping[int, Tensor], extraction: Extraction) -> dict[int, Tensor]:
    if extraction.pool == 'none':
        return {stride: level.to(extraction.dtype) for stride, level in maps.items()}
    return {stride: POOLINGS[extraction.pool](level, extraction.dtype) for stride, level in maps.items()}


def _expand(source: str) -> list[str]:
    path = Path(source)
    if path.suffix == '.txt' and path.is_file():
        lines = path.read_text(encoding='utf-8', errors='surrogateescape').splitlines()
        return [line for line in lines if line.strip()]
    if path.is_dir() and path.suffix != '.zarr':
        return sorted(_walk(source))
    if path.exists():
        return [source]
    matches = sorted(glob.glob(source, recursive=True))
    if not matches:
        raise FileNotFoundError(f'{source!r} is no file, folder or pattern that matches something')
    return [match for match in matches if not os.path.isdir(match) or match.endswith('.zarr')]


def _walk(folder: str) -> Iterator[str]:
    for parent, folders, files in os.walk(folder):
        arrays = [name for name in folders if name.endswith('.zarr')]
        folders[:] = [name for name in folders if name not in arrays]
        for name in files + arrays:
            if Path(name).suffix.lower() in IMAGE_SUFFIXES:
                yield os.path.join(parent, name)


def _leave_signals_to_parent(worker: int) -> None:
    # Ctrl-C reaches the whole process group; the parent finishes its batch with the workers alive, then ends them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

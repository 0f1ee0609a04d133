"""From many image files to a folder of feature files: what ``tools/extract_features.py`` does."""

from __future__ import annotations

import glob
import hashlib
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from swin_dense import checks
from swin_dense.features.dataset import ChunkSampler, Collate, ImageDataset
from swin_dense.features.decode import ImageError
from swin_dense.features.images import IMAGENET_MEAN, IMAGENET_STD
from swin_dense.features.inference import run_batch
from swin_dense.features.regions import open_large_image
from swin_dense.features.storage import FeatureFolder
from swin_dense.features.tiling import check_tiling, plan_tiles, run_tiles
from swin_dense.windows import Pair

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
        levels: strides of the maps.
        pool: 'none' for maps, or a key of ``POOLINGS`` for one vector per level.
        dtype: of what is written.
        batch_size: how many images of equal size run at once.
        workers: processes that read images.
        tile: (height, width) in pixels for large images, read one after the other in place of batches; or None.
        overlap: (vertical, horizontal) in pixels between tiles.
        autocast: dtype of ``torch.autocast``, None for none.
        mean: see :func:`swin_dense.extract_pyramid`.
        std: likewise.
    """

    levels: tuple[int, ...]
    pool: str = 'none'
    dtype: torch.dtype = torch.float32
    batch_size: int = 8
    workers: int = 0
    tile: Pair | None = None
    overlap: Pair | None = None
    autocast: torch.dtype | None = None
    mean: tuple[float, ...] | None = IMAGENET_MEAN
    std: tuple[float, ...] | None = IMAGENET_STD

    def __post_init__(self) -> None:
        checks.one_of('pool', self.pool, ('none', *POOLINGS))
        checks.integer('batch_size', self.batch_size)
        checks.integer('workers', self.workers, minimum=0)

    @property
    def chunk_size(self) -> int:
        """How many consecutive images are looked through for equal sizes; a large image is on its own."""
        return 1 if self.tile else _BATCHES_PER_CHUNK * self.batch_size


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
    failures: dict[str, str] = {}

    def report(path: str, error: str | None = None) -> None:
        if error is not None:
            failures[path] = error
        on_image(path, error)

    pending = [not folder.is_finished(path) for path in paths]
    if extraction.tile is None:
        _extract_whole(backbone, paths, pending, folder, extraction, rank, world_size, report, should_stop)
    else:
        _extract_tiled(backbone, paths, pending, folder, extraction, rank, world_size, report, should_stop)
    return failures


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


def _extract_whole(
    backbone: Any,
    paths: Sequence[str],
    pending: Sequence[bool],
    folder: FeatureFolder,
    extraction: Extraction,
    rank: int,
    world_size: int,
    report: Callable[..., None],
    should_stop: Callable[[], bool],
) -> None:
    loader = DataLoader(
        ImageDataset(paths, backbone.in_channels, extraction.mean, extraction.std, skip_broken=True),
        batch_sampler=ChunkSampler(pending, extraction.chunk_size, rank, world_size),
        collate_fn=Collate(extraction.batch_size),
        num_workers=extraction.workers,
        worker_init_fn=_leave_signals_to_parent,
    )
    for batches, broken in loader:
        for sample in broken:
            report(paths[sample.index], sample.error)
        for batch in batches:
            if should_stop():
                return
            if not any(pending[index] for index in batch.indices):
                continue
            size = (batch.images.shape[2], batch.images.shape[3])
            all_maps = run_batch(backbone, batch.images, extraction.levels, None, extraction.autocast)
            for index, maps in zip(batch.indices, all_maps, strict=True):
                if pending[index]:
                    folder.save(paths[index], _finish(maps, extraction), size)
                    report(paths[index])
        if should_stop():
            return


def _extract_tiled(
    backbone: Any,
    paths: Sequence[str],
    pending: Sequence[bool],
    folder: FeatureFolder,
    extraction: Extraction,
    rank: int,
    world_size: int,
    report: Callable[..., None],
    should_stop: Callable[[], bool],
) -> None:
    for (index,) in ChunkSampler(pending, extraction.chunk_size, rank, world_size):
        if should_stop():
            return
        try:
            _extract_large(backbone, paths[index], folder, extraction, should_stop)
        except _StopError:
            return
        except (ImageError, FileNotFoundError) as error:
            report(paths[index], str(error))
        else:
            report(paths[index])


class _StopError(Exception):
    """Leaves an unfinished image; its temporary file goes with it."""


def _extract_large(
    backbone: Any, path: str, folder: FeatureFolder, extraction: Extraction, should_stop: Callable[[], bool]
) -> None:
    levels, dtype = extraction.levels, extraction.dtype
    tile, overlap = check_tiling(backbone, extraction.tile, extraction.overlap, levels)
    with open_large_image(path) as image:
        tiles = plan_tiles(image.size, tile, overlap)
        run = partial(run_tiles, backbone, image, tiles, levels, extraction.mean, extraction.std)
        if extraction.pool == 'none':
            channels = {s: c for s, c in zip(backbone.out_strides, backbone.out_channels, strict=True) if s in levels}
            with folder.save_in_pieces(path, channels, image.size, dtype, tile) as write:
                for blocks in run(dtype=dtype, autocast=extraction.autocast):
                    write(blocks)
                    if should_stop():
                        raise _StopError
            return
        pooling = POOLINGS[extraction.pool]
        totals: dict[int, Tensor] = {}
        cells = dict.fromkeys(levels, 0)
        for blocks in run(autocast=extraction.autocast):
            for stride, (_, _, values) in blocks.items():
                totals[stride] = totals.get(stride, 0) + pooling.total(values)
                cells[stride] += values[0].numel()
            if should_stop():
                raise _StopError
        pooled = {stride: pooling.after(total / cells[stride]).to(dtype) for stride, total in totals.items()}
        folder.save(path, pooled, image.size)


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

"""Extract the features of images into a folder, step by step."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from swin_dense.features.folder import FeatureFolder
from swin_dense.features.inference import Runner, whole_image
from swin_dense.features.listing import Item, iterate
from swin_dense.features.normalization import Inference, Tiling
from swin_dense.features.regions import open_large_image
from swin_dense.features.shards import Record, Shard, hash_of_name
from swin_dense.features.tiling import run_tiles
from swin_dense.utils.errors import is_out_of_memory
from swin_dense.utils.pixels import ImageError, name_of
from swin_dense.utils.tiles import plan_tiles


class Step(NamedTuple):
    """One step of an extraction: a finished image, or a tile of an unfinished one."""

    item: Item
    error: str | None = None  # why a finished image has no features
    tile: tuple[int, int] | None = None  # the number of the finished tile, and of all tiles of an unfinished image


class Extraction:
    """The extraction of a shard of images into a folder.

    Args:
        out: the folder.
        shard: the shard of the images.
        images: all images and tar files, as :func:`swin_dense.features.listing.list_images` returns them.
        backbone: a SwinBackbone in evaluation mode.
        inference: how to read the images and to compute the features.
        given: the arguments of :class:`swin_dense.features.Normalization` that the user gave.
        pool: 'none' for maps, or a key of ``POOLINGS``.
        file_format: file format of maps, one of ``MAP_FORMATS``.
        dtype: name of the dtype of the features.

    Attributes:
        record: the settings and the images of the shard.
        total: number of images of the shard; None if some are in tar files.
    """

    def __init__(
        self,
        out: Path,
        shard: Shard,
        images: Mapping[str, str | None],
        backbone: Any,
        inference: Inference,
        given: Mapping[str, Any],
        *,
        pool: str,
        file_format: str,
        dtype: str,
    ) -> None:
        self._backbone, self._inference, self._out, self._shard = backbone, inference, out, shard
        self._folder = {'pool': pool, 'file_format': file_format, 'dtype': getattr(torch, dtype)}
        tile, overlap = inference.tiling or (None, None)
        # The options that determine the features, which all features of a folder must share.
        settings = {
            'arch': dataclasses.asdict(backbone.arch),
            'weights': weights_digest(backbone),
            'window_size': backbone.window_size,
            **({'clamp_window': True} if backbone.clamp_window else {}),  # absent if False, as in older folders
            'levels': inference.levels,
            'pool': pool,
            'format': file_format if pool == 'none' else 'parquet',
            'dtype': dtype,
            'autocast': inference.autocast and str(inference.autocast).removeprefix('torch.'),
            'page': inference.page or 0,
            'max_side': inference.max_side,
            **given,  # absent if not given, as in older folders
            'tile': tile,
            'overlap': overlap,
        }
        self.record = Record(out, shard, settings, images)
        self._mine = {name: version for name, version in images.items() if shard.owns(hash_of_name(name))}
        self.total = None if any(name.endswith('.tar') for name in self._mine) else len(self._mine)

    @contextlib.contextmanager
    def writing(self, rows_per_part: int) -> Iterator[FeatureFolder]:
        """Lock the shard, and give its folder, which is created if it does not exist."""
        levels, options = self._inference.levels or (), {**self._folder, 'rows_per_part': rows_per_part}
        self._out.mkdir(parents=True, exist_ok=True)
        with (
            self.record.writing(),
            contextlib.closing(FeatureFolder(self._out, levels, **options, shard=self._shard)) as folder,
        ):
            yield folder

    def steps(self, folder: FeatureFolder, batch_size: int, workers: int) -> Generator[Step, None, None]:
        """Extract what the folder lacks, and yield each step; closing the generator ends the extraction."""
        missing = iterate(self._mine.items(), lambda name, version: not folder.is_finished(name, version))
        if self._inference.tiling is not None:
            for item in missing:
                yield from self._in_tiles(item, folder, self._inference.tiling)
            return
        runner = Runner(self._backbone, self._inference)
        with contextlib.closing(runner.run(missing, batch_size, workers)) as results:
            for item, image_size, maps in results:
                if not isinstance(maps, dict):
                    folder.without_maps(item, maps)
                    yield Step(item, maps)
                    continue
                with folder.receive(item, image_size) as sink:
                    sink.write(whole_image(maps))
                yield Step(item)

    def _in_tiles(self, item: Item, folder: FeatureFolder, tiling: Tiling) -> Iterator[Step]:
        error = item.error
        if item.source is not None:
            try:
                with (
                    open_large_image(item.source, page=self._inference.page) as image,
                    folder.receive(item, image.size, tiling.tile) as sink,
                ):
                    count = len(plan_tiles(image.size, *tiling))
                    for number, blocks in enumerate(run_tiles(self._backbone, image, self._inference), 1):
                        sink.write(blocks)
                        if number < count:
                            yield Step(item, tile=(number, count))
            except (ImageError, FileNotFoundError) as reason:
                error = str(reason)
            except (RuntimeError, MemoryError) as reason:
                if not is_out_of_memory(reason):
                    raise
                error = f'{name_of(item.source)}: too little memory for one tile; use smaller tiles: {reason}'
        if item.source is None or error is not None:
            folder.without_maps(item, error)
        yield Step(item, error)


def weights_digest(module: torch.nn.Module) -> str:
    """Return a short hash of all weights, to check that two runs use the same weights."""
    digest = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()[:16]

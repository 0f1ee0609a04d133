"""Extract the features of images into a folder, step by step."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Generator, Iterator
from typing import Any, NamedTuple

import torch

from swin_dense.features.folder import FeatureFolder
from swin_dense.features.inference import Runner, whole_image
from swin_dense.features.listing import Item
from swin_dense.features.normalization import Inference
from swin_dense.features.regions import open_large_image
from swin_dense.features.tiling import run_tiles
from swin_dense.utils.errors import is_out_of_memory
from swin_dense.utils.pixels import ImageError, name_of
from swin_dense.utils.tiles import plan_tiles


class Step(NamedTuple):
    """One step of an extraction: a finished image, or a tile of an unfinished one."""

    item: Item
    error: str | None = None  # why a finished image has no features
    tile: tuple[int, int] | None = None  # the number of the finished tile, and of all tiles of an unfinished image


def weights_digest(module: torch.nn.Module) -> str:
    """Return a short hash of all weights, to check that two runs use the same weights."""
    digest = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


def extract(
    backbone: Any, items: Iterator[Item], folder: FeatureFolder, inference: Inference, batch_size: int, workers: int
) -> Generator[Step, None, None]:
    """Extract the features of images into a folder, and yield each step; closing the generator ends the extraction."""
    if inference.tiling is not None:
        yield from _in_tiles(backbone, items, folder, inference)
        return
    with contextlib.closing(Runner(backbone, inference).run(items, batch_size, workers)) as results:
        for item, image_size, maps in results:
            if isinstance(maps, dict):
                with folder.receive(item, image_size) as sink:
                    sink.write(whole_image(maps))
                yield Step(item)
            else:
                yield _without_maps(item, folder, maps)


def _without_maps(item: Item, folder: FeatureFolder, error: str | None) -> Step:
    """Note an image in the folder that failed with an error, or was finished before."""
    if error is None:
        folder.confirm(item)
    else:
        folder.fail(item, error)
    return Step(item, error)


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
        yield Step(item) if item.source is not None and error is None else _without_maps(item, folder, error)

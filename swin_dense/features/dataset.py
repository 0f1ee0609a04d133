"""Image files for a torch DataLoader: ready tensors with their sizes, in batches of equal size, shared among ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from swin_dense import checks
from swin_dense.features.decode import ImageError
from swin_dense.features.inference import Inference, group_by_size


@dataclass(frozen=True)
class Sample:
    """One image of a dataset.

    Attributes:
        index: which one.
        image: (C, H, W) float32, normalised; None where it could not be read.
        error: why not.
    """

    index: int
    image: Tensor | None
    error: str | None = None

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) in pixels."""
        if self.image is None:
            raise ImageError(self.error)
        return self.image.shape[1], self.image.shape[2]


@dataclass(frozen=True)
class Batch:
    """Images of equal size.

    Attributes:
        indices: which ones.
        images: (B, C, H, W) float32, normalised.
    """

    indices: list[int]
    images: Tensor


class ImageDataset(Dataset):
    """Image files as :class:`Sample`.

    Args:
        paths: of the files.
        channels: how many the backbone takes.
        inference: what the images are prepared for.
        skip_broken: give a file that cannot be read as a sample with an error, instead of raising.
    """

    def __init__(
        self,
        paths: Sequence[str | os.PathLike],
        channels: int,
        inference: Inference,
        skip_broken: bool = False,
    ) -> None:
        self.paths = list(paths)
        self.channels = channels
        self.inference = inference
        self.skip_broken = skip_broken

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Sample:
        try:
            return Sample(index, self.inference.read(self.paths[index], self.channels))
        except (ImageError, OSError) as error:
            if not self.skip_broken:
                raise
            return Sample(index, None, str(error))


class Collate:
    """Turns samples into batches of equal size; give it to a DataLoader as ``collate_fn``.

    Args:
        batch_size: the most images in one batch.
    """

    def __init__(self, batch_size: int) -> None:
        self.batch_size = checks.integer('batch_size', batch_size)

    def __call__(self, samples: Sequence[Sample]) -> tuple[list[Batch], list[Sample]]:
        """Return the batches, and the samples that could not be read."""
        broken = [sample for sample in samples if sample.image is None]
        indices = [sample.index for sample in samples if sample.image is not None]
        images = [sample.image for sample in samples if sample.image is not None]
        batches = [
            Batch([indices[member] for member in members], torch.stack([images[member] for member in members]))
            for members in group_by_size(images, self.batch_size)
        ]
        return batches, broken


def chunk_shares(images: int, chunk_size: int, rank: int, world_size: int) -> list[list[int]]:
    """Return the chunks of consecutive images, by index, that one rank of several takes."""
    checks.integer('chunk_size', chunk_size)
    if not 0 <= rank < world_size:
        raise ValueError(f'rank must lie between 0 and world_size - 1 = {world_size - 1}, got {rank}')
    starts = range(rank * chunk_size, images, world_size * chunk_size)
    return [list(range(start, min(start + chunk_size, images))) for start in starts]


class ChunkSampler(Sampler[list[int]]):
    """Cuts a dataset into chunks of consecutive images and gives every chunk to exactly one rank.

    Images meet only images of their own chunk in a batch, so which ones run together, and with it the last bit of
    their features, depends neither on the number of ranks nor on what is finished already.

    Args:
        pending: per image of the dataset, whether it is still to be done; chunks without such an image are left out.
        chunk_size: images per chunk.
        rank: of this process.
        world_size: number of processes.
    """

    def __init__(self, pending: Sequence[bool], chunk_size: int, rank: int = 0, world_size: int = 1) -> None:
        shares = chunk_shares(len(pending), chunk_size, rank, world_size)
        self.chunks = [chunk for chunk in shares if any(pending[index] for index in chunk)]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.chunks)

    def __len__(self) -> int:
        return len(self.chunks)

"""Images in, feature pyramids out: but for rounding, an image has the same features alone and in any batch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swin_dense import checks
from swin_dense.features.decode import name_of
from swin_dense.features.images import IMAGENET_MEAN, IMAGENET_STD
from swin_dense.features.inference import Inference, check_levels, group_by_size, run_batch
from swin_dense.features.regions import open_large_image
from swin_dense.features.tiling import FileStore, MemoryStore, check_tiling, run_tiles


class Pyramid(Mapping[int, Tensor]):
    """The feature maps of one image by stride: {4: (C, ceil(H / 4), ceil(W / 4)), 8: ...}.

    The cell in row r and column c of the map of stride s starts from the pixels [r * s, (r + 1) * s) by
    [c * s, (c + 1) * s). At the right and the bottom a cell may hang over the edge of the image.

    Attributes:
        image_size: (height, width) of the image in pixels.
    """

    def __init__(self, maps: Mapping[int, Tensor], image_size: tuple[int, int]) -> None:
        self._maps = dict(maps)
        self.image_size = image_size

    def __getitem__(self, stride: int) -> Tensor:
        try:
            return self._maps[stride]
        except KeyError:
            raise KeyError(f'no map of stride {stride!r}; the strides are {list(self._maps)}') from None

    def __iter__(self) -> Iterator[int]:
        return iter(self._maps)

    def __len__(self) -> int:
        return len(self._maps)

    def __repr__(self) -> str:
        shapes = ', '.join(f'{stride}: {tuple(level.shape)}' for stride, level in self.items())
        return f'Pyramid({{{shapes}}}, image_size={self.image_size})'

    def cell_box(self, stride: int, row: int, column: int) -> tuple[int, int, int, int]:
        """Return the pixels that a cell starts from, within the image: (top, left, bottom, right), half open."""
        rows, columns = self[stride].shape[-2:]
        if not (0 <= row < rows and 0 <= column < columns):
            raise IndexError(f'the map of stride {stride} has {rows} x {columns} cells, got cell ({row}, {column})')
        height, width = self.image_size
        top, left = row * stride, column * stride
        return top, left, min(top + stride, height), min(left + stride, width)

    def cell_at(self, stride: int, y: int, x: int) -> tuple[int, int]:
        """Return the (row, column) of the cell that starts from the pixel in row y and column x."""
        self[stride]  # is there such a map?
        height, width = self.image_size
        if not (0 <= y < height and 0 <= x < width):
            raise IndexError(f'the image is {height} x {width} pixels, got the pixel ({y}, {x})')
        return y // stride, x // stride


def extract_pyramid(
    backbone: Any,
    images: Any,
    *,
    levels: Sequence[int] | None = None,
    mean: Sequence[float] | None = IMAGENET_MEAN,
    std: Sequence[float] | None = IMAGENET_STD,
    bgr: bool = False,
    batch_size: int = 8,
    tile: int | Sequence[int] | None = None,
    overlap: int | Sequence[int] | None = None,
    out: str | os.PathLike | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    autocast: torch.dtype | None = None,
    gradients: bool = False,
) -> Any:
    """Compute the feature pyramid of one image or of many.

    An image is never padded to another's size: images of equal size run as one batch, others on their own. The
    features are those of evaluation mode, and the maps are ordinary tensors that share no memory with each other.

    Args:
        backbone: a :class:`swin_dense.SwinBackbone`, or anything that wraps one and passes its attributes on.
        images: one image, or a list of them, in any form that :func:`swin_dense.features.images.read_image` takes;
            a tensor (B, C, H, W) is B images. With ``tile`` also zarr arrays, and paths of zarr folders.
        levels: strides of the maps to return, None for all that the backbone has.
        mean: per channel, on the scale 0 to 1. None, with ``std=None``, leaves the images as they are.
        std: per channel, on the scale 0 to 1.
        bgr: arrays and tensors hold blue first, as ``cv2.imread`` returns them.
        batch_size: how many images of equal size run at once.
        tile: read and compute the image in tiles of this many pixels, one integer or (height, width), each a
            multiple of :func:`swin_dense.features.tiling.tile_alignment`. None takes the image as a whole.
        overlap: pixels that a tile sees beyond each of its sides, in the same units. None takes as many as it needs
            for the features of the whole image; fewer are faster and approximate.
        out: with ``tile`` and one image, a folder to which each level is written as ``stride_<s>.npy``; the maps
            that are returned are then views of these files and take no memory.
        device: where to compute; the backbone is moved there. None leaves it where it is.
        dtype: of the maps, None for the dtype that the backbone computes in.
        autocast: a lower-precision dtype to compute in by ``torch.autocast``, None for the backbone's own.
        gradients: record the graph, so that a loss of the maps reaches parameters and, for float tensors given
            as images, the image.

    Returns:
        One :class:`Pyramid` for one image, a list of them in the order given for several.

    Raises:
        FileNotFoundError: a path does not exist.
        ImageError: an image cannot be read or does not fit the backbone.
        ValueError: an option has a value that is not allowed, or options contradict each other.
        TypeError: an image or an option has the wrong type.
    """
    batch_size = checks.integer('batch_size', batch_size)
    strides = check_levels(backbone, levels)
    sources, is_single = _as_list(images)
    map_dtype = dtype or autocast or next(backbone.parameters()).dtype
    _check_tile_options(tile, overlap, out, gradients, is_single, map_dtype)
    if device is not None:
        backbone.to(device)
    inference = Inference(strides, mean, std, bgr, dtype, autocast)
    if tile is not None:
        inference = replace(inference, tiling=check_tiling(backbone, tile, overlap, strides))
        pyramids = [_extract_in_tiles(backbone, source, inference, out) for source in sources]
    else:
        tensors = [_load(source, backbone.in_channels, inference, gradients) for source in sources]
        found: dict[int, Pyramid] = {}
        for members in group_by_size(tensors, batch_size):
            batch = torch.stack([tensors[index] for index in members])
            all_maps = run_batch(backbone, batch, inference, gradients)
            for index, maps in zip(members, all_maps, strict=True):
                found[index] = Pyramid(maps, (batch.shape[2], batch.shape[3]))
        pyramids = [found[index] for index in range(len(sources))]
    return pyramids[0] if is_single else pyramids


def _check_tile_options(
    tile: Any, overlap: Any, out: Any, gradients: bool, is_single: bool, map_dtype: torch.dtype
) -> None:
    if tile is None:
        if overlap is not None or out is not None:
            raise ValueError('overlap= and out= belong to tile=; give tile= too, or leave them out')
        return
    if gradients:
        raise ValueError('gradients=True needs the whole image in memory; leave tile= out, or crop the image')
    if out is not None and not is_single:
        raise ValueError('out= holds the maps of one image; call extract_pyramid once per image')
    if out is not None and map_dtype == torch.bfloat16:
        raise ValueError(
            'out= writes .npy files, which cannot hold bfloat16; give dtype=torch.float32 or torch.float16'
        )


def _extract_in_tiles(backbone: Any, source: Any, inference: Inference, out: str | os.PathLike | None) -> Pyramid:
    with open_large_image(source, inference.bgr) as image:
        store: MemoryStore | FileStore = MemoryStore(image.size) if out is None else FileStore(image.size, Path(out))
        for blocks in run_tiles(backbone, image, inference):
            store.write(blocks)
        return Pyramid(store.maps(), image.size)


def _as_list(images: Any) -> tuple[list[Any], bool]:
    """Return the images one by one, and whether it was a single one that was given."""
    if isinstance(images, Tensor) and images.ndim == 4:
        return list(images), False
    if isinstance(images, (list, tuple, Iterator)):
        return list(images), False
    return [images], True


def _load(source: Any, channels: int, inference: Inference, gradients: bool) -> Tensor:
    if gradients and isinstance(source, Tensor) and source.requires_grad:
        return inference.normalize(_differentiable(source, channels, inference.bgr))
    return inference.read(source, channels)


def _differentiable(image: Tensor, channels: int, bgr: bool) -> Tensor:
    """Return a float tensor (C, H, W) as the backbone takes it, still connected to its graph."""
    if image.ndim != 3 or image.shape[0] != channels:
        raise ValueError(f'{name_of(image)}: to take gradients it must have the shape ({channels}, H, W)')
    return image.flip(0) if bgr else image

"""How the features of an image are computed: read it, normalise it, and run the backbone on it, whole or in tiles."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swin_dense.features.tiling import check_tiling
from swin_dense.images.headers import Header
from swin_dense.images.kinds import Reader, notes_on_reading
from swin_dense.images.normalization import Normalization, resolve_normalization
from swin_dense.images.pixels import ImageError, naming
from swin_dense.images.reading import pixels_of, scale
from swin_dense.images.regions import LargeImage, open_large_image
from swin_dense.images.tiles import plan_tiles
from swin_dense.models.swin import SwinBackbone
from swin_dense.utils import checks

Movable = TypeVar('Movable', nn.Module, Tensor)
Maps = dict[int, Tensor]  # by stride: (C, rows, columns)
# By stride, the rows and columns of the level that a tile covers, and their values (C, rows, columns).
Blocks = dict[int, tuple[slice, slice, Tensor]]


_SAMPLE = 2048  # side in pixels of the middle of an image that is too large to be read whole


def in_python(options: Mapping[str, Any]) -> str:
    """Return the advice to give options of a normalisation. Which bands to read, only the user knows."""
    how = {**options, 'bands': '...'} if 'bands' in options else options
    return f'give normalization=Normalization({", ".join(f"{option}={value}" for option, value in how.items())})'


@dataclass(eq=False)
class Extraction:
    """A backbone, how images are read for it, and which maps are computed.

    The arguments are those of :func:`swin_dense.extract_pyramid`. Afterwards ``levels`` are the strides of the maps, in
    the backbone's order, ``how`` is the normalisation, and ``tiling`` is the size and overlap of tiles, or None.
    """

    backbone: SwinBackbone
    normalization: Normalization | str | None = None
    levels: Sequence[int] | None = None
    bgr: bool = False
    page: int | None = None
    max_side: int | None = None
    tile: int | Sequence[int] | None = None
    overlap: int | Sequence[int] | None = None
    dtype: torch.dtype | str | None = None
    autocast: torch.dtype | str | None = None

    def __post_init__(self) -> None:
        self.map_dtype = check_dtype('dtype', self.dtype, ('float16', 'bfloat16', 'float32', 'float64'))
        self.autocast_dtype = check_dtype('autocast', self.autocast, ('float16', 'bfloat16'))
        self.levels = check_levels(self.backbone, self.levels)
        self.how = resolve_normalization(self.normalization, self.backbone.input_preset)
        self.how.check_for(self.backbone.in_channels, self.backbone.input_preset)
        if self.bgr and self.how.bands is not None:
            raise ValueError('bgr= and bands= both choose an order; leave bgr= out')
        if self.page is not None:
            checks.integer('page', self.page, minimum=0)
        if self.max_side is not None:
            checks.integer('max_side', self.max_side)
        self.tiling = None
        if self.tile is not None:
            if self.max_side is not None:
                raise ValueError('max_side= cannot be used with tile=; leave tile= out')
            self.tiling = check_tiling(self.backbone, self.tile, self.overlap, self.levels)

    def read(self, source: Any) -> Tensor:
        """Read an image from any source of :func:`read_image`, (channels, H, W), of which batches are made.

        uint8 and uint16 are kept: an image waiting for its batch takes a quarter of its memory after normalisation.
        """
        with naming(source):
            pixels = pixels_of(source, self.bgr, self.page)
            image = self.how.stored(pixels, self.backbone.in_channels)
            longer = max(image.shape[1:])
            if self.max_side is None or longer <= self.max_side:
                return image
            height, width = (max(1, round(side * self.max_side / longer)) for side in image.shape[1:])
            # uint8 takes a quarter of the memory, but torch cannot resize it to a single pixel.
            if image.dtype != torch.uint8 or height * width == 1:
                divides = self.how.scale is not None  # then `scale` is still to be applied
                image = scale(image, 1.0 if divides else None)
            return F.interpolate(image[None], (height, width), mode='bilinear', antialias=True)[0]

    def notes_on(
        self,
        sources: Sequence[Any],
        seen: set[Header | None] | None = None,
        cure: Callable[[Mapping[str, Any]], str] = in_python,
    ) -> list[str]:
        """Return notes on images that reading changes, by lost bits or turns; decode an example of each kind.

        Args:
            sources: the images.
            seen: headers, without the size, of images that need no further note; others are added.
            cure: returns the advice to give options of a normalisation.
        """
        reader = Reader('the reader', self._values, cure, self.how.scale is None, self.how.bands is not None, True)
        return notes_on_reading(sources, reader, seen)

    def _values(self, source: Any) -> np.ndarray | None:
        """Return the stored values of an image, (H, W, C), or of the middle of one that is read in tiles."""
        try:
            if self.tiling is None:
                pixels = pixels_of(source, self.bgr, self.page)
            else:
                with open_large_image(source, self.bgr, self.page) as image:
                    (top, height), (left, width) = ((max(0, side - _SAMPLE) // 2, side) for side in image.size)
                    pixels = image.pixels((top, left, min(top + _SAMPLE, height), min(left + _SAMPLE, width)))
            return self.how.stored(pixels, self.backbone.in_channels).permute(1, 2, 0).numpy()
        except (ImageError, TypeError, OSError):  # which :meth:`read` raises again
            return None

    def input_for(self, images: Tensor) -> Tensor:
        """Return images of :meth:`read`, (B, C, H, W), as the backbone's input, on its device and of its dtype."""
        parameter = next(self.backbone.parameters())
        return self.how.prepare(images.to(parameter.device)).to(parameter.dtype)

    def run(self, images: Tensor, gradients: bool = False) -> list[Maps]:
        """Compute the maps of a batch (B, C, H, W) of images of :meth:`read`, on any device.

        Return, per image, {stride: (C, ceil(H / stride), ceil(W / stride))}; with ``gradients``, in the autograd graph.
        """
        with contextlib.nullcontext() if gradients else torch.inference_mode():
            batch = self.input_for(images)
            lower = self.autocast_dtype
            with contextlib.nullcontext() if lower is None else torch.autocast(batch.device.type, lower):
                outs = self.backbone(batch)
        maps = dict(zip(self.backbone.out_strides, outs, strict=True))
        found: list[Maps] = [{} for _ in range(len(images))]
        for stride in self.levels or ():
            for own, level in zip(found, maps[stride], strict=True):
                # Copied outside inference mode, so that a head can be trained on it; a view would keep the whole batch.
                own[stride] = level.to(self.map_dtype or level.dtype, copy=True)
        return found

    def run_tiles(self, image: LargeImage) -> Iterator[Blocks]:
        """Compute the maps of an image tile by tile, in row-major order; without tiling, as one tile."""
        tile, overlap = self.tiling or (image.size, (0, 0))
        for part in plan_tiles(image.size, tile, overlap):
            pixels = image.pixels(part.read)
            with naming(image.source):
                stored = self.how.stored(pixels, self.backbone.in_channels)
            (maps,) = self.run(stored[None])
            blocks: Blocks = {}
            for stride, level in maps.items():
                top, left = part.kept[0] // stride, part.kept[1] // stride
                bottom, right = -(-part.kept[2] // stride), -(-part.kept[3] // stride)
                above, before = part.read[0] // stride, part.read[1] // stride
                values = level[:, top - above : bottom - above, left - before : right - before]
                blocks[stride] = (slice(top, bottom), slice(left, right), values)
            yield blocks


def check_dtype(name: str, value: Any, allowed: Sequence[str]) -> torch.dtype | None:
    """Return a torch dtype, given as a torch or numpy dtype or by name; None stays None."""
    if value is None:
        return None
    word = getattr(value, '__name__', str(value)).removeprefix('torch.')
    checks.one_of(name, word, allowed)
    return getattr(torch, word)


def check_levels(backbone: SwinBackbone, levels: Sequence[int] | None) -> tuple[int, ...]:
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
        checks.one_of('every entry of levels', stride, strides)
    return tuple(stride for stride in strides if stride in chosen)


def on_device(module: Movable, device: torch.device | str) -> Movable:
    """Move a module or a tensor to a device; raise ValueError if it is not available, TypeError if it is no device."""
    try:
        return module.to(device=device)  # by keyword, because `to` would accept a dtype in its place
    except (RuntimeError, AssertionError) as error:  # AssertionError if torch was built without CUDA
        reason = str(error).partition('\n')[0]
        raise ValueError(f'device={str(device)!r} cannot be used: {reason}') from error
    except (TypeError, ValueError) as error:
        raise TypeError(f"device must be a torch.device or a name such as 'cuda:0', got {device!r}") from error


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

"""Images in, feature pyramids out: each image's features are those it has alone, whatever is in the batch."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from swin_dense import checks
from swin_dense.images import IMAGENET_MEAN, IMAGENET_STD, describe, normalize, read_image


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
        images: one image, or a list of them, in any form that :func:`swin_dense.images.read_image` takes; a tensor
            (B, C, H, W) is B images.
        levels: strides of the maps to return, None for all that the backbone has.
        mean: per channel, on the scale 0 to 1. None, with ``std=None``, leaves the images as they are.
        std: per channel, on the scale 0 to 1.
        bgr: arrays and tensors hold blue first, as ``cv2.imread`` returns them.
        batch_size: how many images of equal size run at once.
        device: where to compute; the backbone is moved there. None leaves it where it is.
        dtype: of the maps, None for the dtype that the backbone computes in.
        autocast: a lower-precision dtype to compute in by ``torch.autocast``, None for the backbone's own.
        gradients: record the graph, so that a loss of the maps reaches parameters and, for float tensors given
            as images, the image.

    Returns:
        One :class:`Pyramid` for one image, a list of them in the order given for several.

    Raises:
        ImageError: an image cannot be read or does not fit the backbone.
        ValueError: an option has a value that is not allowed.
        TypeError: an image or an option has the wrong type.
    """
    batch_size = checks.integer('batch_size', batch_size)
    strides = check_levels(backbone, levels)
    if device is not None:
        backbone.to(device)
    sources, is_single = _list_images(images)
    tensors = [normalize(_load(source, backbone.in_channels, bgr, mean, gradients), mean, std) for source in sources]
    pyramids: list[Pyramid | None] = [None] * len(tensors)
    for members in group_by_size(tensors, batch_size):
        batch = torch.stack([tensors[index] for index in members])
        for index, pyramid in zip(
            members, run_batch(backbone, batch, strides, dtype, autocast, gradients), strict=True
        ):
            pyramids[index] = pyramid
    found = [pyramid for pyramid in pyramids if pyramid is not None]
    return found[0] if is_single else found


def check_levels(backbone: Any, levels: Sequence[int] | None) -> tuple[int, ...]:
    """Return the strides to extract, in the backbone's order."""
    if levels is None:
        return tuple(backbone.out_strides)
    chosen = checks.integers('levels', levels)
    for stride in chosen:
        checks.one_of('every entry of levels', stride, backbone.out_strides)
    return tuple(stride for stride in backbone.out_strides if stride in chosen)


def group_by_size(images: Iterable[Tensor], batch_size: int) -> list[list[int]]:
    """Return the indices of images that run together: of equal size, at most ``batch_size`` of them."""
    by_shape: dict[torch.Size, list[int]] = {}
    for index, image in enumerate(images):
        by_shape.setdefault(image.shape, []).append(index)
    return [
        members[start : start + batch_size]
        for members in by_shape.values()
        for start in range(0, len(members), batch_size)
    ]


def run_batch(
    backbone: Any,
    batch: Tensor,
    strides: Sequence[int],
    dtype: torch.dtype | None = None,
    autocast: torch.dtype | None = None,
    gradients: bool = False,
) -> list[Pyramid]:
    """Compute the pyramids of normalised images of one size, (B, C, H, W); see :func:`extract_pyramid`."""
    parameter = next(backbone.parameters())
    mode = contextlib.nullcontext() if gradients else torch.inference_mode()
    with evaluation_mode(backbone), mode:
        batch = batch.to(parameter.device, parameter.dtype)
        with torch.autocast(parameter.device.type, autocast, enabled=autocast is not None):
            outs = backbone(batch)
    maps = dict(zip(backbone.out_strides, outs, strict=True))
    size = (batch.shape[2], batch.shape[3])
    return [
        # The copy, made outside inference mode, is an ordinary tensor that a head can be trained on, and keeps one
        # image's map from holding the whole batch in memory.
        Pyramid({stride: maps[stride][index].to(dtype or maps[stride].dtype, copy=True) for stride in strides}, size)
        for index in range(len(batch))
    ]


_modes_lock = threading.Lock()
_modes: dict[int, tuple[int, list[tuple[nn.Module, bool]]]] = {}


@contextlib.contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Set evaluation mode inside the block and restore each submodule's mode after it.

    Threads may use one module at the same time: the first to enter switches, the last to leave restores.
    """
    with _modes_lock:
        users, modes = _modes.get(id(module), (0, []))
        if users == 0:
            modes = [(part, part.training) for part in module.modules()]
            for part, is_training in modes:
                if is_training:
                    part.training = False
        _modes[id(module)] = (users + 1, modes)
    try:
        yield
    finally:
        with _modes_lock:
            users, modes = _modes.pop(id(module))
            if users > 1:
                _modes[id(module)] = (users - 1, modes)
            else:
                for part, is_training in modes:
                    part.training = is_training


def _list_images(images: Any) -> tuple[list[Any], bool]:
    """Return the images one by one, and whether it was a single one that was given."""
    if isinstance(images, Tensor) and images.ndim == 4:
        return list(images), False
    if isinstance(images, (list, tuple, Iterator)):
        return list(images), False
    return [images], True


def _load(source: Any, channels: int, bgr: bool, mean: Sequence[float] | None, gradients: bool) -> Tensor:
    if gradients and isinstance(source, Tensor) and source.requires_grad:
        return _differentiable(source, channels, bgr)
    return read_image(source, channels, bgr, check_range=mean is not None)


def _differentiable(image: Tensor, channels: int, bgr: bool) -> Tensor:
    """Return a float tensor (C, H, W) as the backbone takes it, still connected to its graph."""
    if image.ndim != 3 or image.shape[0] != channels:
        raise ValueError(f'{describe(image)}: to take gradients it must have the shape ({channels}, H, W)')
    return image.flip(0) if bgr else image

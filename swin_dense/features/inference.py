"""Running a backbone for its features alone: in evaluation mode, grouped by size, from any thread."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swin_dense.features.images import IMAGENET_MEAN, IMAGENET_STD, Statistic, normalize, read_pixels, scale
from swin_dense.ops.windows import Pair
from swin_dense.utils import checks


class Tiling(NamedTuple):
    """How an image is cut into tiles; made by :func:`swin_dense.features.tiling.check_tiling`.

    Attributes:
        tile: (height, width) in pixels.
        overlap: (vertical, horizontal) in pixels that a tile sees beyond each of its sides.
    """

    tile: Pair
    overlap: Pair


@dataclass(frozen=True)
class Inference:
    """How images become feature maps, whatever holds the images and wherever the maps go.

    Attributes:
        levels: strides of the maps, None for all that the backbone has.
        mean: per channel, on the scale 0 to 1; None, with ``std=None``, leaves the images as they are.
        std: per channel, on the scale 0 to 1.
        bgr: arrays and tensors hold blue first.
        dtype: of the maps, None for the dtype that the backbone computes in.
        autocast: dtype of ``torch.autocast``, None for none.
        tiling: how an image is cut, None for the image as a whole.
        page: of files with several pages, counted from 0.
        max_side: images with a longer side are shrunk until it has so many pixels; None for as they are.

    Raises:
        ValueError: a type of numbers or a size is not allowed, or tiling and ``max_side`` contradict each other.
    """

    levels: tuple[int, ...] | None = None
    mean: Statistic = IMAGENET_MEAN
    std: Statistic = IMAGENET_STD
    bgr: bool = False
    dtype: torch.dtype | None = None
    autocast: torch.dtype | None = None
    tiling: Tiling | None = None
    page: int = 0
    max_side: int | None = None

    def __post_init__(self) -> None:
        checks.integer('page', self.page, minimum=0)
        if self.max_side is not None:
            checks.integer('max_side', self.max_side)
            if self.tiling is not None:
                raise ValueError('max_side= shrinks images as a whole; leave tile= out')

    @property
    def check_range(self) -> bool:
        """Whether floats must lie in [0, 1], as those that are normalised already do not."""
        return self.mean is not None

    def read(self, source: Any, channels: int) -> Tensor:
        """Read an image in any form, see :func:`read_image`, as it will be batched: (channels, H, W).

        It is uint8 or uint16 where the source is, which takes a quarter of the memory of what :meth:`prepare` makes.
        """
        image = read_pixels(source, channels, self.bgr, self.check_range, self.page)
        longer = max(image.shape[1:])
        if self.max_side is None or longer <= self.max_side:
            return image
        height, width = (max(1, round(side * self.max_side / longer)) for side in image.shape[1:])
        # A fourth of the memory, but for a single pixel, which torch refuses so.
        image = image if image.dtype == torch.uint8 and height * width > 1 else scale(image)
        return F.interpolate(image[None], (height, width), mode='bilinear', antialias=True)[0]

    def prepare(self, images: Tensor) -> Tensor:
        """Return what :meth:`read` gives, or a batch of it, as the backbone takes it: float32 and normalised."""
        return self.normalize(scale(images))

    def normalize(self, image: Tensor) -> Tensor:
        """Return an image (C, H, W) with ``mean`` subtracted and divided by ``std``."""
        return normalize(image, self.mean, self.std)


def bare_backbone(backbone: Any) -> Any:
    """Return the backbone inside DataParallel, DistributedDataParallel and the like, which pass no attributes on.

    Raises:
        TypeError: there is none that makes feature maps.
    """
    bare = backbone
    while not hasattr(bare, 'out_strides') and isinstance(getattr(bare, 'module', None), nn.Module):
        bare = bare.module
    if not hasattr(bare, 'out_strides'):
        inside = '; pass its .backbone' if hasattr(bare, 'backbone') else ''
        raise TypeError(f'backbone must be a SwinBackbone, or wrap one, got {type(backbone).__name__}{inside}')
    return bare


def check_dtype(name: str, value: Any, allowed: Sequence[str]) -> torch.dtype | None:
    """Return a type of numbers given as torch or numpy has it, or by its name; None stays None."""
    if value is None:
        return None
    word = getattr(value, '__name__', str(value)).removeprefix('torch.')
    checks.one_of(name, word, allowed)
    return getattr(torch, word)


def on_device(module: nn.Module | Tensor, device: torch.device | str) -> Any:
    """Move a module or a tensor to a device, or say why that cannot be used.

    Raises:
        ValueError: there is no such device here.
        TypeError: it is no device.
    """
    try:
        return module.to(device=device)  # by name, as a number or a dtype would be taken for a type to convert to
    except (RuntimeError, AssertionError) as error:  # an AssertionError where torch was built without CUDA
        reason = str(error).partition('\n')[0]
        raise ValueError(f'device={str(device)!r} cannot be used: {reason}') from error
    except (TypeError, ValueError) as error:
        raise TypeError(f"device must be a torch.device or a name such as 'cuda:0', got {device!r}") from error


def check_levels(backbone: Any, levels: Sequence[int] | None) -> tuple[int, ...]:
    """Return the strides to extract, in the backbone's order."""
    stride, count = Counter(backbone.out_strides).most_common(1)[0]
    if count > 1:
        raise ValueError(
            f'{count} of the maps have stride {stride}, so a stride does not name one; '
            'choose among them with out_indices when building the backbone'
        )
    if levels is None:
        return tuple(backbone.out_strides)
    chosen = checks.integers('levels', levels)
    for stride in chosen:
        checks.one_of('every entry of levels', stride, backbone.out_strides)
    return tuple(stride for stride in backbone.out_strides if stride in chosen)


def run_batch(backbone: Any, batch: Tensor, inference: Inference, gradients: bool = False) -> list[dict[int, Tensor]]:
    """Compute the maps of normalised images of one size.

    Args:
        backbone: what runs.
        batch: (B, C, H, W), on any device and of any floating dtype.
        inference: which maps, and how they are computed.
        gradients: record the graph.

    Returns:
        Per image, {stride: (C, ceil(H / stride), ceil(W / stride))}.
    """
    parameter = next(backbone.parameters())
    autocast, dtype = inference.autocast, inference.dtype
    mode = contextlib.nullcontext() if gradients else torch.inference_mode()
    with evaluation_mode(backbone), mode:
        batch = batch.to(parameter.device, parameter.dtype)
        with contextlib.nullcontext() if autocast is None else torch.autocast(parameter.device.type, autocast):
            outs = backbone(batch)
    maps = dict(zip(backbone.out_strides, outs, strict=True))
    strides = inference.levels or maps
    return [
        # The copy, made outside inference mode, is an ordinary tensor that a head can be trained on, and keeps one
        # image's map from holding the whole batch in memory.
        {stride: maps[stride][index].to(dtype or maps[stride].dtype, copy=True) for stride in strides}
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

"""Run a backbone for feature extraction: preprocessing options, batches of images of equal size, evaluation mode."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swin_dense.features.images import pixels_of, scale
from swin_dense.features.normalization import Normalization
from swin_dense.ops.windows import Pair
from swin_dense.utils import checks
from swin_dense.utils.pixels import naming

# Larger batches use more memory and are not faster on any device: 16 images of 1024 x 1024, or one camera photograph.
BATCH_PIXELS = 1 << 24
# Limits on the images that wait for others of equal size: a number of batches, and a number of bytes.
_WAITING_BATCHES = 8
_WAITING_BYTES = 1 << 28
Key = TypeVar('Key')
Other = TypeVar('Other')


class Tiling(NamedTuple):
    """Tile size and overlap; created by :func:`swin_dense.features.tiling.check_tiling`.

    Attributes:
        tile: (height, width) in pixels.
        overlap: (vertical, horizontal) pixels read beyond each side of a tile.
    """

    tile: Pair
    overlap: Pair


@dataclass(frozen=True)
class Inference(Normalization):
    """Options of preprocessing and computation, independent of the image source and of the sink.

    Attributes:
        levels: strides of the maps; None for all of the backbone.
        bgr: arrays and tensors are in BGR order.
        dtype: dtype of the maps; None for the dtype that the backbone computes in.
        autocast: dtype of ``torch.autocast``; None disables it.
        tiling: tile size and overlap; None runs the whole image at once.
        page: page of multi-page files, counted from 0; None for the only one.
        max_side: images with a longer side are downscaled until it has this many pixels; None keeps their size.

    Raises:
        ValueError: ``page`` or ``max_side`` is too small, ``max_side`` is given with tiling, or ``bgr`` with bands.
    """

    levels: tuple[int, ...] | None = None
    bgr: bool = False
    dtype: torch.dtype | None = None
    autocast: torch.dtype | None = None
    tiling: Tiling | None = None
    page: int | None = None
    max_side: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bgr and self.bands is not None:
            raise ValueError('bgr= and bands= both choose an order; leave bgr= out')
        if self.page is not None:
            checks.integer('page', self.page, minimum=0)
        if self.max_side is not None:
            checks.integer('max_side', self.max_side)
            if self.tiling is not None:
                raise ValueError('max_side= cannot be used with tile=; leave tile= out')

    def read(self, source: Any, channels: int) -> Tensor:
        """Read an image from any source of :func:`read_image`, (channels, H, W), of which batches are made.

        uint8 and uint16 are kept: an image waiting for its batch takes a quarter of its memory after :meth:`prepare`.
        """
        with naming(source):
            image = self.stored(pixels_of(source, self.bgr, self.page), channels)
            too_large = self.max_side is not None and max(image.shape[1:]) > self.max_side
            # What `scale` is to divide stays on its own scale.
            return _shrunk(image, self.max_side, 1.0 if self.scale is not None else None) if too_large else image

    def input_for(self, backbone: Any, images: Tensor) -> Tensor:
        """Return a batch (B, C, H, W) of images of :meth:`read` as input of a backbone, on its device, of its dtype."""
        parameter = next(backbone.parameters())
        return self.prepare(images.to(parameter.device)).to(parameter.dtype)


def _shrunk(image: Tensor, max_side: Any, divisor: float | None) -> Tensor:
    """Downscale an image of :func:`to_tensor` until its longer side has ``max_side`` pixels."""
    height, width = (max(1, round(side * max_side / max(image.shape[1:]))) for side in image.shape[1:])
    # uint8 takes a quarter of the memory, but torch cannot resize it to a single pixel.
    image = image if image.dtype == torch.uint8 and height * width > 1 else scale(image, divisor)
    return F.interpolate(image[None], (height, width), mode='bilinear', antialias=True)[0]


def bare_backbone(backbone: Any) -> Any:
    """Unwrap the backbone from DataParallel, DistributedDataParallel and similar wrappers, which hide its attributes.

    Raises:
        TypeError: the module is not a backbone and does not wrap one.
    """
    bare = backbone
    while not hasattr(bare, 'out_strides') and isinstance(getattr(bare, 'module', None), nn.Module):
        bare = bare.module
    if not hasattr(bare, 'out_strides'):
        inside = '; pass its .backbone' if hasattr(bare, 'backbone') else ''
        raise TypeError(f'backbone must be a SwinBackbone, or wrap one, got {type(backbone).__name__}{inside}')
    return bare


def check_dtype(name: str, value: Any, allowed: Sequence[str]) -> torch.dtype | None:
    """Return a torch dtype, given as a torch or numpy dtype or by name; None stays None."""
    if value is None:
        return None
    word = getattr(value, '__name__', str(value)).removeprefix('torch.')
    checks.one_of(name, word, allowed)
    return getattr(torch, word)


def on_device(module: nn.Module | Tensor, device: torch.device | str) -> Any:
    """Move a module or a tensor to a device.

    Raises:
        ValueError: the device is not available.
        TypeError: ``device`` is not a device.
    """
    try:
        return module.to(device=device)  # by keyword, because `to` would accept a dtype in its place
    except (RuntimeError, AssertionError) as error:  # AssertionError if torch was built without CUDA
        reason = str(error).partition('\n')[0]
        raise ValueError(f'device={str(device)!r} cannot be used: {reason}') from error
    except (TypeError, ValueError) as error:
        raise TypeError(f"device must be a torch.device or a name such as 'cuda:0', got {device!r}") from error


def check_levels(backbone: Any, levels: Sequence[int] | None) -> tuple[int, ...]:
    """Validate ``levels`` and return the strides to extract, in the backbone's order."""
    stride, count = Counter(backbone.out_strides).most_common(1)[0]
    if count > 1:
        raise ValueError(
            f'{count} of the maps have stride {stride}, but strides must be unique; '
            'select one of them with out_indices when building the backbone'
        )
    if levels is None:
        return tuple(backbone.out_strides)
    chosen = checks.integers('levels', levels)
    for stride in chosen:
        checks.one_of('every entry of levels', stride, backbone.out_strides)
    return tuple(stride for stride in backbone.out_strides if stride in chosen)


def batches(
    images: Iterable[tuple[Key, Tensor | Other]], batch_size: int
) -> Iterator[tuple[list[Key], Tensor | Other]]:
    """Group images (C, H, W) by shape and dtype into batches (B, C, H, W), and yield each batch with its keys.

    What is not a tensor is yielded by itself at once. If too many images wait for others of equal size, all waiting
    groups are yielded as smaller batches.
    """
    waiting: dict[Any, list[tuple[Key, Tensor]]] = {}
    for key, image in images:
        if not isinstance(image, Tensor):
            yield [key], image
            continue
        kind, largest = (image.shape, image.dtype), min(batch_size, max(1, BATCH_PIXELS // image[0].numel()))
        waiting.setdefault(kind, []).append((key, image))
        del image  # so that only the batch holds it
        held = [image.nbytes for group in waiting.values() for _, image in group]
        if len(waiting[kind]) == largest:
            yield _stacked(waiting.pop(kind))
        elif len(held) == _WAITING_BATCHES * batch_size or sum(held) > _WAITING_BYTES:
            while waiting:
                yield _stacked(waiting.popitem()[1])
    while waiting:
        yield _stacked(waiting.popitem()[1])


def _stacked(group: list[tuple[Key, Tensor]]) -> tuple[list[Key], Tensor]:
    keys, images = zip(*group, strict=True)
    return list(keys), torch.stack(images) if len(images) > 1 else images[0][None]  # without a copy if it is large


def run_batch(backbone: Any, images: Tensor, inference: Inference, gradients: bool = False) -> list[dict[int, Tensor]]:
    """Compute the maps of a batch (B, C, H, W) of images of :meth:`Inference.read`, on any device.

    Returns:
        Per image, {stride: (C, ceil(H / stride), ceil(W / stride))}; with ``gradients``, in the autograd graph.
    """
    autocast, dtype = inference.autocast, inference.dtype
    with evaluation_mode(backbone), contextlib.nullcontext() if gradients else torch.inference_mode():
        batch = inference.input_for(backbone, images)
        with contextlib.nullcontext() if autocast is None else torch.autocast(batch.device.type, autocast):
            outs = backbone(batch)
    maps = dict(zip(backbone.out_strides, outs, strict=True))
    strides = inference.levels or maps
    return [
        # Copied outside inference mode, so that a head can be trained on it; a view would keep the batch in memory.
        {stride: maps[stride][index].to(dtype or maps[stride].dtype, copy=True) for stride in strides}
        for index in range(len(images))
    ]


_modes_lock = threading.Lock()
_modes: dict[int, tuple[int, list[nn.Module]]] = {}


@contextlib.contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Set evaluation mode inside the block and restore each submodule's mode after it.

    Several threads may use one module at once: the first to enter sets the mode, the last to leave restores it.
    """
    with _modes_lock:
        users, trained = _modes.get(id(module)) or (0, [part for part in module.modules() if part.training])
        _modes[id(module)] = (users + 1, trained)
        for part in trained:
            part.training = False
    try:
        yield
    finally:
        with _modes_lock:
            users, trained = _modes.pop(id(module))
            if users > 1:
                _modes[id(module)] = (users - 1, trained)
            else:
                for part in trained:
                    part.training = True

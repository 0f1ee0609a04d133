"""Feature pyramids of images. Up to rounding, the features of an image do not depend on the rest of its batch."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypedDict, overload

import numpy as np
import PIL.Image
import torch
from torch import Tensor, nn

from swin_dense.features.extraction import Extraction, evaluation_mode, on_device
from swin_dense.features.runner import batches
from swin_dense.features.sinks import MapSink, in_memory, in_npy_files
from swin_dense.images.headers import Header
from swin_dense.images.normalization import Normalization
from swin_dense.images.pixels import ImageError, naming
from swin_dense.images.reading import check_floats
from swin_dense.images.regions import open_large_image
from swin_dense.models.swin import SwinBackbone
from swin_dense.utils import checks
from swin_dense.utils.names import unwrapped_module

_logger = logging.getLogger(__package__)
# Headers, without the size, of images about which this process has logged its notes.
_seen: defaultdict[Normalization, set[Header | None]] = defaultdict(set)

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Pyramid(Mapping[int, Tensor]):
    """The feature maps of one image by stride: {4: (C, ceil(H / 4), ceil(W / 4)), 8: ...}.

    The cell in row r and column c of the map of stride s covers the pixels [r * s, (r + 1) * s) by
    [c * s, (c + 1) * s). The last row and column of cells may extend beyond the image.

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


class PyramidOptions(TypedDict, total=False):
    """The options of :func:`extract_pyramid`, for type checkers and editors."""

    levels: Sequence[int] | None
    normalization: Normalization | str | None
    bgr: bool
    batch_size: int
    tile: int | Sequence[int] | None
    overlap: int | Sequence[int] | None
    out: str | os.PathLike | None
    page: int | None
    max_side: int | None
    device: torch.device | str | None
    dtype: torch.dtype | str | None
    autocast: torch.dtype | str | None
    gradients: bool


@overload
def extract_pyramid(
    backbone: nn.Module,
    images: str | os.PathLike[str] | np.ndarray | PIL.Image.Image | IO[bytes],
    **options: Unpack[PyramidOptions],
) -> Pyramid: ...
@overload
def extract_pyramid(
    backbone: nn.Module, images: list[Any] | tuple[Any, ...] | Iterator[Any], **options: Unpack[PyramidOptions]
) -> list[Pyramid]: ...
@overload  # a tensor is one image or several, by its axes
def extract_pyramid(backbone: nn.Module, images: Any, **options: Unpack[PyramidOptions]) -> Any: ...
def extract_pyramid(
    backbone: nn.Module,
    images: Any,
    *,
    levels: Sequence[int] | None = None,
    normalization: Normalization | str | None = None,
    bgr: bool = False,
    batch_size: int = 8,
    tile: int | Sequence[int] | None = None,
    overlap: int | Sequence[int] | None = None,
    out: str | os.PathLike | None = None,
    page: int | None = None,
    max_side: int | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    autocast: torch.dtype | str | None = None,
    gradients: bool = False,
) -> Any:
    """Compute the feature pyramids of one or more images.

    Images are never padded to a common size: images of equal size run as one batch, others separately. The backbone
    runs in evaluation mode. The maps are ordinary tensors that share no memory with each other.

    Args:
        backbone: a :class:`swin_dense.SwinBackbone`, a compiled one, or one wrapped in DataParallel or
            DistributedDataParallel, whose ``module`` then runs without the wrapper.
        images: one image or a list of images, each any source of :func:`swin_dense.images.reading.read_image`;
            a tensor (B, C, H, W) is B images. With ``tile`` also zarr arrays.
        levels: strides of the maps to return; None for all of the backbone.
        normalization: a :class:`swin_dense.features.Normalization`, or a name for :func:`swin_dense.features.preset`.
            None is that which the loaded weights expect, if their publisher is recognised, else ImageNet's.
        bgr: arrays and tensors are in BGR order, as ``cv2.imread`` returns them.
        batch_size: maximum number of images of equal size per batch.
        tile: side or (height, width) in pixels of tiles in which to read and process an image, multiples of
            :func:`swin_dense.features.tiling.tile_alignment`; None for the whole image at once.
        overlap: pixels read beyond each side of a tile, one integer or (vertical, horizontal). None takes the smallest
            overlap that gives the features of the whole image; a smaller overlap is faster and approximate.
        out: with ``tile`` and one image, a folder for one ``stride_<s>.npy`` per level, of which the returned maps are
            views. Files of an earlier image are replaced only when all new files are complete.
        page: page of a file or frame of an animation, counted from 0; None for the only page or the first frame.
        max_side: downscale images with a longer side until it has this many pixels; not allowed with ``tile``.
        device: device to compute on, to which the backbone is moved; None keeps the backbone's device.
        dtype: dtype of the maps, float16, bfloat16, float32 or float64; None for that of the backbone.
        autocast: dtype of ``torch.autocast``, float16 or bfloat16; None keeps the setting around the call.
        gradients: record the autograd graph, to the parameters and to images given as tensors that require gradients.
            With ``with_cp``, call ``backbone.eval()`` before: the backward pass computes blocks again, in their mode.

    Returns:
        A :class:`Pyramid` for one image, else a list of them in the order of the images.

    Raises:
        FileNotFoundError: a path does not exist.
        ImageError: an image cannot be read, does not fit the backbone, or has several pages and needs ``page``.
        ValueError: an option has an invalid value, or options contradict each other.
        TypeError: an image or an option has the wrong type.

    Examples:
        >>> import numpy as np
        >>> from swin_dense import create_backbone
        >>> photo = np.zeros((90, 120, 3), np.uint8)  # or a path, a PIL image, a tensor, a list of them
        >>> pyramid = extract_pyramid(create_backbone('swin_t'), photo)
        >>> {stride: tuple(level.shape) for stride, level in pyramid.items()}
        {4: (96, 23, 30), 8: (192, 12, 15), 16: (384, 6, 8), 32: (768, 3, 4)}
    """
    batch_size = checks.integer('batch_size', batch_size)
    bare = bare_backbone(backbone)
    if has_random_weights(bare):
        warn_of_random_weights()
    extraction = Extraction(bare, normalization, levels, bgr, page, max_side, tile, overlap, dtype, autocast)
    if isinstance(images, Tensor) and images.ndim == 4:
        is_single = False
    else:  # an open file is one image
        is_single = not isinstance(images, (list, tuple, Iterator)) or hasattr(images, 'read')
    sources = [images] if is_single else list(images)
    if tile is None and not (overlap is None and out is None):
        raise ValueError('overlap= and out= need tile=; give tile= too, or leave them out')
    if tile is not None and gradients:
        raise ValueError('gradients=True needs the whole image in memory; leave tile= out, or crop the image')
    if out is not None:
        if not is_single:
            raise ValueError('out= stores the maps of one image; call extract_pyramid once per image')
        computed = extraction.map_dtype or extraction.autocast_dtype or next(bare.parameters()).dtype
        if computed == torch.bfloat16:
            raise ValueError(
                'out= writes .npy files, which cannot store bfloat16; give dtype=torch.float32 or torch.float16'
            )
    for note in extraction.notes_on(sources, _seen[extraction.how]):
        _logger.warning('%s', note)
    if device is not None:
        on_device(bare, device)
    with evaluation_mode(bare):
        if tile is not None:
            pyramids = [_extract_in_tiles(extraction, source, out) for source in sources]
        else:
            pyramids = _extract_in_batches(extraction, sources, batch_size, gradients)
    return pyramids[0] if is_single else pyramids


def has_random_weights(backbone: SwinBackbone) -> bool:
    """Return whether the last MLP of a backbone is untrained: its biases are 0, which no training leaves."""
    stages: Any = backbone.stages
    biases = [parameter for parameter in stages[-1].blocks[-1].ffn.parameters() if parameter.ndim == 1]
    return bool(biases) and not any(bias.any() for bias in biases)


@functools.cache
def warn_of_random_weights() -> None:
    """Warn, once per process and only in the first of several, that features are those of random weights."""
    if os.environ.get('RANK', '0') == '0':
        _logger.warning(
            'These weights are untrained, so all results are random; give a checkpoint to load trained weights'
        )


def bare_backbone(backbone: nn.Module) -> SwinBackbone:
    """Unwrap the backbone from DataParallel and similar wrappers, which hide its attributes.

    A compiled backbone has them all, and stays as it is.
    """
    bare: Any = backbone if hasattr(backbone, 'out_strides') else unwrapped_module(backbone)
    if not hasattr(bare, 'out_strides'):
        inside = '; pass its .backbone' if hasattr(bare, 'backbone') else ''
        raise TypeError(f'backbone must be a SwinBackbone, or wrap one, got {type(backbone).__name__}{inside}')
    return bare


def _extract_in_batches(extraction: Extraction, sources: list[Any], batch_size: int, gradients: bool) -> list[Pyramid]:
    def read(source: Any) -> Tensor:
        return _read_for_gradients(extraction, source) if gradients else extraction.read(source)

    found: dict[int, Pyramid] = {}
    loaded = ((index, read(source)) for index, source in enumerate(sources))
    for indices, batch in batches(loaded, batch_size):
        for index, maps in zip(indices, extraction.run(batch, gradients), strict=True):
            found[index] = Pyramid(maps, (batch.shape[2], batch.shape[3]))
    return [found[index] for index in range(len(sources))]


def _extract_in_tiles(extraction: Extraction, source: Any, out: str | os.PathLike | None) -> Pyramid:
    with contextlib.ExitStack() as stack:
        image = stack.enter_context(open_large_image(source, extraction.bgr, extraction.page))
        make = in_memory if out is None else stack.enter_context(in_npy_files(Path(out)))
        sink = MapSink(image.size, make)
        for blocks in extraction.run_tiles(image):
            sink.write(blocks)
        return Pyramid(sink.levels(), image.size)


def _read_for_gradients(extraction: Extraction, source: Any) -> Tensor:
    """Read an image, and keep a float tensor (C, H, W) that requires gradients in its graph, as RGB."""
    if not (isinstance(source, Tensor) and source.requires_grad):
        return extraction.read(source)
    how, channels = extraction.how, extraction.backbone.in_channels
    with naming(source):
        if how.bands is not None:
            source = source[list(how.bands)]
        if source.ndim != 3 or source.shape[0] != channels:
            raise ImageError(f'for gradients it must have the shape ({channels}, H, W)')
        if extraction.max_side is not None and max(source.shape[1:]) > extraction.max_side:
            raise ImageError('max_side= cannot be used with gradients=; resize the image first')
        check_floats(source, how.check_range)
    return source.flip(0) if extraction.bgr else source

"""A data set of images without labels, cropped at random, for pretraining."""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from swin_dense.features.images import Statistic, pixels_of, scale
from swin_dense.features.listing import Location, list_images, locate
from swin_dense.features.normalization import Normalization
from swin_dense.features.shards import hash_of_name
from swin_dense.pretraining.teacher_maps import StoredMaps
from swin_dense.utils import checks
from swin_dense.utils.addresses import is_address
from swin_dense.utils.pixels import ImageError, naming

SPLITS = ('train', 'held_out')
_SPLIT_SEED = 0  # the same images are held out in every run
_ASPECT_RATIOS = (3 / 4, 4 / 3)
_TRIES = 10  # as in torchvision's RandomResizedCrop
_NAMED = 3  # images that an error names
_HEADERS, _DECODED = 1000, 50  # images that `check` looks at, evenly spaced
_DAMAGED = 0.01  # share of the images that may be unreadable
_logger = logging.getLogger(__package__)


class UnlabelledImages(Dataset):
    """Random crops of images, resized and flipped, or one fixed crop of each image that is held out.

    An item is {'inputs': (in_channels, crop_size, crop_size) float32 in [0, 1], 'index': number of the image}. With
    ``maps``, 'maps' is a list of the teacher's maps of this crop, (C_i, rows, columns). Another image takes the place
    of one that cannot be read, with a warning, as long as these are at most one in a hundred.

    Args:
        data_root: a folder, a glob pattern, an image, a tar file, a ``.txt`` file with one path or address per line, or
            an address; or a list of them.
        crop_size: side in pixels of a crop.
        split: 'train' for random crops of all images that are not held out: a share of the area within ``area``, with
            an aspect ratio of 3:4 to 4:3, flipped half of the time. 'held_out' for the centre of the others.
        in_channels: number of channels, that of the backbone.
        area: smallest and largest share of an image's area in a crop.
        held_out: share of the images that are held out, chosen at random but always the same; at least one image.
        scale: divides stored values of any type, one number or one per channel, such as 10000 for reflectance; None
            divides integers by the largest value of their type, and accepts floats in [0, 1].
        page: page of TIFF files with several, counted from 0; None for the only one.
        views: number of crops of each image, drawn once and for all, of which one is taken at random each time. None
            draws a new crop each time.
        maps: folder with the maps of a teacher for these crops, as :func:`swin_dense.pretraining.store_maps`
            writes it. It determines ``views``.

    Raises:
        FileNotFoundError: a place does not exist, or is a pattern without matches.
        ValueError: there are no images or too few, an option has a value that is not allowed, or ``maps`` are of other
            crops.
    """

    def __init__(
        self,
        data_root: str | Sequence[str],
        crop_size: int,
        *,
        split: str = 'train',
        in_channels: int = 3,
        area: Sequence[float] = (0.67, 1.0),
        held_out: float = 0.05,
        scale: Statistic = None,
        page: int | None = None,
        views: int | None = None,
        maps: str | None = None,
    ) -> None:
        self.crop_size = checks.integer('crop_size', crop_size)
        self.in_channels = checks.integer('in_channels', in_channels)
        checks.one_of('split', split, SPLITS)
        if not 0 <= checks.number('held_out', held_out) < 1:
            raise ValueError(f'held_out must be a share from 0 to below 1, got {held_out}')
        self.area = tuple(checks.number('area', part) for part in area)
        if len(self.area) != 2 or not 0 < self.area[0] <= self.area[1] <= 1:
            raise ValueError(f'area must be two shares above 0 and at most 1, in ascending order, got {area!r}')
        self.page = None if page is None else checks.integer('page', page, minimum=0)
        self._read_as = Normalization(mean=0.0, std=1.0, scale=scale)
        self.views = None if views is None else checks.integer('views', views)
        self.maps = None if maps is None else self._stored(maps)
        self._unreadable: set[int] = set()
        self.is_training = split == 'train'
        places = [data_root] if isinstance(data_root, str) else list(data_root)
        found = list(locate(list_images(places)))
        if not found:
            raise ValueError(f'there is no image in {", ".join(map(repr, places))}; the suffix tells what is an image')
        held = math.ceil(held_out * len(found))
        order = torch.randperm(len(found), generator=torch.Generator().manual_seed(_SPLIT_SEED)).tolist()
        chosen = order[held:] if self.is_training else order[:held]
        self.images: list[Location] = [found[index] for index in sorted(chosen)]
        if not self.images:
            raise ValueError(
                f'held_out={held_out} of {len(found)} images leaves none for split={split!r}; give more images, or, to '
                'train without held-out images, held_out=0 and val_dataloader=None, val_cfg=None, val_evaluator=None'
            )
        names = [location.name.replace(os.sep, '/') for location in found]
        # Not commonpath, which changes addresses.
        self._root = len(os.path.commonprefix(names).rpartition('/')[0])  # noqa: RUF071

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Any]:
        wanted, image, item = index, None, {}
        while image is None:
            view = self._draw_view()
            try:
                if self.maps is not None and view is not None:
                    with naming(self.images[index].name):
                        item = {'maps': self.maps.read(self.key(index), view)}
                image = self.read(index)
            except (ImageError, FileNotFoundError) as error:
                self._skip(index, error)
                # The random numbers of training must not depend on the held-out images.
                index = int(torch.randint(len(self), ())) if self.is_training else (index + 1) % len(self)
        return {'inputs': self.crop(image, index, view), 'index': wanted, **item}

    @property
    def crops(self) -> dict[str, Any]:
        """The options on which the pixels of a crop depend, as they are stored beside maps; see also ``views``."""
        divisor = self._read_as.scale
        return {
            'crop_size': self.crop_size,
            'area': list(self.area),
            'in_channels': self.in_channels,
            'scale': list(divisor) if isinstance(divisor, Sequence) else divisor,
            'page': self.page,
        }

    @property
    def view_numbers(self) -> Sequence[int]:
        """The numbers of the fixed crops of each image: 0 is the centre, of held-out images."""
        return range(1, 1 + (self.views or 0)) if self.is_training else (0,)

    def key(self, index: int) -> str:
        """Return the path of an image below the folder that contains all images, by which its fixed crops are drawn."""
        return self.images[index].name.replace(os.sep, '/')[self._root :].lstrip('/')

    def read(self, index: int) -> Tensor:
        """Read an image, (in_channels, H, W), as it is stored; raise ImageError if that fails."""
        location = self.images[index]
        with naming(location.name):
            return self._read_as.stored(pixels_of(location.source(), page=self.page), self.in_channels)

    def crop(self, image: Tensor, index: int, view: int | None = None) -> Tensor:
        """Return a crop of an image of :meth:`read`, (in_channels, crop_size, crop_size) in [0, 1].

        Args:
            image: the image.
            index: its number.
            view: 0 for the centre; from 1, a crop that is always the same for this image; None for a new one.
        """
        generator = None
        if view:
            seed = int(hash_of_name(f'{self.key(index)} {view}'), 16)
            generator = torch.Generator().manual_seed(seed % 2**63)
        height, width = image.shape[1:]
        top, left, rows, columns = _centre(height, width) if view == 0 else self._random_box(height, width, generator)
        part = scale(image[:, top : top + rows, left : left + columns], self._read_as.scale)
        size = (self.crop_size, self.crop_size)
        resized = F.interpolate(part[None], size, mode='bilinear', align_corners=False, antialias=True)[0]
        is_flipped = view != 0 and torch.rand((), generator=generator) < 0.5
        return resized.flip(-1) if is_flipped else resized

    def _draw_view(self) -> int | None:
        """Return the number of a crop, see :meth:`crop`."""
        if not self.is_training:
            return 0
        return None if self.views is None else 1 + int(torch.randint(self.views, ()))

    def _stored(self, folder: str) -> StoredMaps:
        """Return the maps of a folder, and take over its ``views``; raise ValueError if they are of other crops."""
        stored = StoredMaps(folder)
        views = stored.crops.pop('views')
        if self.views not in (None, views):
            raise ValueError(
                f'{folder} has maps of views={views} crops of each image, got views={self.views}; leave it out'
            )
        if different := checks.differences(stored.crops, self.crops):
            raise ValueError(
                f'{folder} has maps of other crops: {different}; set what the maps have, or write new ones'
            )
        self.views = views
        return stored

    def check(self, rank: int = 0, processes: int = 1, every_image: bool = False) -> list[str]:
        """Check, before training, that images are not smaller than a crop, and that they can be read.

        The headers of up to 1000 images are read, except for those of images at addresses, and 50 are decoded.

        Args:
            rank: the number of this process; each of ``processes`` checks a share of the images.
            processes: number of processes.
            every_image: read all headers and decode all images.

        Returns:
            What was looked at.

        Raises:
            ImageError: too many images cannot be read, or they have other channels than ``in_channels``.
            ValueError: images are smaller than ``crop_size``.
        """
        mine = range(rank, len(self), processes)
        looked_at = mine if every_image else _evenly(mine, _HEADERS)
        local = [index for index in looked_at if not is_address(self.images[index].tar or self.images[index].name)]
        small = []
        for index in local:
            location = self.images[index]
            try:
                with naming(location.name):
                    side = min(_size(location.source(), self.page))
            except (ImageError, FileNotFoundError) as error:
                self._skip(index, error)
                continue
            if side < self.crop_size:
                small.append(f'{location.name!r} ({side})')
        if small:
            named = ', '.join(small[:_NAMED]) + (', ...' if len(small) > _NAMED else '')
            raise ValueError(
                f'{len(small)} of {len(looked_at)} images are smaller than the crops of {self.crop_size} pixels: '
                f'{named}; leave them out, for example with a .txt file that lists the others, or set a smaller '
                'crop_size for training and validation'
            )
        if self.maps is not None:
            for index in mine:
                for view in self.view_numbers:
                    if not self.maps.has(self.key(index), view):
                        self._skip(
                            index, ImageError(f'{self.images[index].name}: {self.maps.folder} has no maps of it')
                        )
        decoded = looked_at if every_image else _evenly(looked_at, _DECODED)
        errors: list[Exception] = []
        for index in decoded:
            try:
                self.read(index)
            except (ImageError, FileNotFoundError) as error:
                self._skip(index, error)
                errors.append(error)
        if len(errors) > max(1, len(decoded) // 10) or len(errors) == len(decoded) > 0:
            raise errors[0]  # not single files, but a kind of images that the options do not fit
        split = 'training' if self.is_training else 'held-out'
        return [
            f'{len(self)} {split} images: read the headers of {len(local)}, decoded {len(decoded)}, of which '
            f'{len(errors)} cannot be read'
        ]

    def _skip(self, index: int, error: Exception) -> None:
        """Report an image that cannot be read, once in each process; raise ImageError if these are too many."""
        if index in self._unreadable:
            return
        self._unreadable.add(index)
        _logger.warning('%s; another image takes its place', error)
        count = len(self._unreadable)
        if count > max(1, _DAMAGED * len(self)) or count == len(self):
            raise ImageError(
                f'{count} of {len(self)} images cannot be read, more than one in a hundred; the last: {error}'
            ) from error

    def _random_box(
        self, height: int, width: int, generator: torch.Generator | None = None
    ) -> tuple[int, int, int, int]:
        """Draw (top, left, height, width) of a crop as torchvision's RandomResizedCrop does."""
        low, high = (math.log(ratio) for ratio in _ASPECT_RATIOS)
        for _ in range(_TRIES):
            area = height * width * _uniform(self.area[0], self.area[1], generator)
            ratio = math.exp(_uniform(low, high, generator))
            h, w = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
            if 0 < h <= height and 0 < w <= width:
                top, left = (int(torch.randint(free + 1, (), generator=generator)) for free in (height - h, width - w))
                return top, left, h, w
        return _centre(height, width)


def _uniform(low: float, high: float, generator: torch.Generator | None) -> float:
    return low + (high - low) * torch.rand((), generator=generator).item()


def _centre(height: int, width: int) -> tuple[int, int, int, int]:
    """Return (top, left, height, width) of the largest square in the middle."""
    side = min(height, width)
    return (height - side) // 2, (width - side) // 2, side, side


def _evenly(indices: Sequence[int], count: int) -> Sequence[int]:
    """Return up to ``count`` evenly spaced indices."""
    return indices[:: max(1, math.ceil(len(indices) / count))]


def _size(source: Any, page: int | None) -> tuple[int, int]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            with Image.open(source) as image:
                return image.size
    except FileNotFoundError:
        raise
    except Exception:  # PIL opens no image with more bands than four, and it explains less than our own reader
        pixels = pixels_of(source, page=page).values
        return pixels.shape[0], pixels.shape[1]

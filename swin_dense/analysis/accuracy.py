"""Accuracy of a classifier on a folder with one folder of images per class, as for ImageNet's validation set."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from swin_dense.features.images import pixels_of, scale
from swin_dense.features.inference import batches, evaluation_mode, read_ahead
from swin_dense.features.listing import Item, is_image, list_images
from swin_dense.features.normalization import IMAGENET, Normalization
from swin_dense.utils.pixels import ImageError, Pixels, decoding, naming

TOP = 5
# The published accuracies were measured on a centre crop, after the shorter side was resized to 256/224 of the crop; at
# 384 pixels, on whole images. Source: https://github.com/microsoft/Swin-Transformer (TEST.CROP).
RESIZE = 256 / 224
WHOLE_FROM = 384
# Modes of PIL with 8 bits per value.
_MODES = ('1', 'L', 'LA', 'P', 'PA', 'RGB', 'RGBA', 'RGBX', 'CMYK', 'YCbCr', 'HSV', 'LAB')


@dataclass
class Scores:
    """Counts of correctly classified images: of all scored, those whose class is first, or among the first five."""

    images: int = 0
    top1: int = 0
    top5: int = 0
    broken: dict[str, str] = field(default_factory=dict)  # {path: reason} of images that could not be read

    def as_dict(self) -> dict[str, Any]:
        """Return counts and percentages, ready for JSON; without percentages if no image was scored."""
        result: dict[str, Any] = {'images': self.images, 'broken': self.broken}
        if self.images:
            result.update(top1=100 * self.top1 / self.images, top5=100 * self.top5 / self.images)
        return result


def list_labelled(folder: Path, classes: Sequence[str] | None, num_classes: int) -> dict[str, int]:
    """Return {path of an image: index of its class} for a folder that contains one folder of images per class.

    ``classes`` has the names of their folders in order; None takes all folders, sorted by name.
    """
    found = sorted(path.name for path in folder.iterdir() if path.is_dir())
    names = found if classes is None else list(classes)
    if len(names) != num_classes:
        given = f'{folder} has {len(names)} folders' if classes is None else f'{len(names)} classes are listed'
        raise ValueError(
            f'{given}, but the classifier has {num_classes} classes; if only some classes have a folder, list the '
            'folder names of all classes in order, in a file for --classes'
        )
    unknown = set(found) - set(names)
    if unknown or len(set(names)) < len(names):
        raise ValueError(
            f'every folder of {folder} must be listed as a class, each class once; not listed: {sorted(unknown)[:3]}'
        )
    images = {path: names.index(name) for name in found for path in list_images([folder / name]) if is_image(path)}
    if not images:
        raise ValueError(f'there are no images in the folders of {folder}')
    return images


def read_square(
    path: Path, size: int, crop: bool, normalization: Normalization = IMAGENET, channels: int = 3
) -> Tensor:
    """Read an image as in the published evaluations, (channels, size, size), normalised.

    The EXIF orientation is ignored, except with bands, a scale or other than three channels, and of TIFF and images of
    more than 8 bits, which no published evaluation had: they are read as :func:`swin_dense.extract_pyramid` does.
    Without ``crop``, the whole image is resized to the square.
    """
    with naming(path):
        if channels == 3 and normalization.bands is None and normalization.scale is None:
            with path.open('rb') as file, decoding(), Image.open(file) as image:
                # Of others, PIL would lose values or bands.
                if image.mode in _MODES and image.format != 'TIFF':
                    square = np.asarray(_resized(image.convert('RGB'), size, crop))
                    return normalization.prepare(normalization.stored(Pixels(square), 3))
        stored = normalization.stored(pixels_of(path), channels)
        if normalization.scale is None:
            stored = scale(stored)
        bands = stored.float().numpy()
    squares = [np.asarray(_resized(Image.fromarray(band), size, crop)) for band in bands]
    return normalization.prepare(torch.from_numpy(np.stack(squares)))


def _resized(image: Image.Image, size: int, crop: bool) -> Image.Image:
    shorter = int(RESIZE * size)
    width, height = (shorter * side // min(image.size) for side in image.size) if crop else (size, size)
    image = image.resize((width, height), Image.Resampling.BICUBIC)
    left, top = round((width - size) / 2), round((height - size) / 2)
    return image.crop((left, top, left + size, top + size))


def evaluate(
    classifier: nn.Module,
    images: Mapping[str, int],
    size: int,
    *,
    crop: bool,
    normalization: Normalization = IMAGENET,
    channels: int = 3,
    batch_size: int = 32,
    workers: int = 2,
    on_image: Callable[[], Any] = lambda: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Scores:
    """Measure the accuracy of a classifier, (B, channels, size, size) to (B, classes), on labelled images.

    Args:
        classifier: the module.
        images: output of :func:`list_labelled`.
        size: side of its input in pixels.
        crop: crop the centre, else resize the whole image; published accuracies are of crops below ``WHOLE_FROM``.
        normalization: how stored values become the input.
        channels: input channels of the classifier.
        batch_size: number of images per batch.
        workers: number of threads that read images.
        on_image: called after each image.
        should_stop: polled after each batch; True returns the scores so far.
    """
    parameter = next(classifier.parameters())
    scores = Scores()

    def read(item: Item) -> Tensor | str:
        try:
            return read_square(Path(item.name), size, crop, normalization, channels)
        except (ImageError, OSError) as error:
            return str(error)

    items = (Item(path, None, path) for path in images)
    with contextlib.closing(read_ahead(items, read, workers)) as samples, evaluation_mode(classifier):
        for members, squares in batches(samples, batch_size):
            if isinstance(squares, str):
                scores.broken[members[0].name] = squares
                on_image()
                continue
            with torch.inference_mode():
                outs = classifier(squares.to(parameter.device, parameter.dtype))
            rankings = outs.topk(min(TOP, outs.shape[1])).indices.tolist()
            for item, ranking in zip(members, rankings, strict=True):
                label = images[item.name]
                scores.images += 1
                scores.top1 += ranking[0] == label
                scores.top5 += label in ranking
                on_image()
            if should_stop():
                break
    return scores

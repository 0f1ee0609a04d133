"""What a classifier scores on a folder of images, one folder per class, as ImageNet's validation images come."""

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

from swin_dense.features.decode import ImageError, decoding, name_of, reading
from swin_dense.features.extraction import batches, read_ahead
from swin_dense.features.images import IMAGENET_MEAN, IMAGENET_STD, normalize, to_tensor
from swin_dense.features.inference import evaluation_mode
from swin_dense.features.sources import Item, is_image, list_images
from swin_dense.utils import checks

TOP = 5
# How the published accuracies were measured: the shorter side resized to 256/224 of a crop from the middle, but by
# the classifiers fine-tuned at 384 pixels on whole images, https://github.com/microsoft/Swin-Transformer (TEST.CROP).
RESIZE = 256 / 224
WHOLE_FROM = 384


@dataclass
class Scores:
    """What came out, counted up image by image.

    Attributes:
        images: how many were scored.
        top1: of these, how many have their class first.
        top5: of these, how many have their class among the first five.
        broken: path to reason, of images that could not be read.
    """

    images: int = 0
    top1: int = 0
    top5: int = 0
    broken: dict[str, str] = field(default_factory=dict)

    def add(self, label: int, ranking: Sequence[int]) -> None:
        self.images += 1
        self.top1 += ranking[0] == label
        self.top5 += label in ranking

    def as_dict(self) -> dict[str, Any]:
        """Return counts and percentages, ready for JSON; no percentages where no image was scored."""
        result: dict[str, Any] = {'images': self.images, 'broken': self.broken}
        if self.images:
            result.update(top1=100 * self.top1 / self.images, top5=100 * self.top5 / self.images)
        return result


def list_labelled(folder: Path, classes: Sequence[str] | None, num_classes: int) -> dict[str, int]:
    """List the images of a folder with one folder per class, whose names in order are the classes 0, 1 and so on.

    Args:
        folder: the folder.
        classes: names of the folders in the order of the classes; None takes all that are there, sorted.
        num_classes: how many the classifier knows.

    Returns:
        The class of every image, by its path.

    Raises:
        ValueError: the folders are not those of the classes, or there is no image.
        FileNotFoundError: there is no such folder.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f'there is no folder {folder}')
    found = sorted(path.name for path in folder.iterdir() if path.is_dir())
    names = found if classes is None else list(classes)
    if len(names) != num_classes:
        given = f'{folder} has {len(names)} folders' if classes is None else f'{len(names)} classes are listed'
        raise ValueError(
            f'{given} and the classifier {num_classes} classes; where only some classes have a folder, list the folder '
            'names of all of them in order, in a file for --classes'
        )
    unknown = set(found) - set(names)
    if unknown or len(set(names)) < len(names):
        raise ValueError(f'folders of {folder} must be classes, each listed once; not so: {sorted(unknown)[:3]}')
    images = {path: names.index(name) for name in found for path in list_images([folder / name]) if is_image(path)}
    if not images:
        raise ValueError(f'no image in the folders of {folder}')
    return images


def crops_at(size: int) -> bool:
    """Whether accuracies at this size were published for crops, not for whole images."""
    return size < WHOLE_FROM


def read_square(path: Path, size: int, crop: bool) -> Tensor:
    """Read an image as the published accuracies are measured, (3, size, size), normalised.

    As it is stored, that is without regard to its orientation tag.

    Args:
        path: of the image.
        size: side of the square in pixels.
        crop: take the middle of the image, undistorted, else the whole, squeezed to a square.
    """
    with reading(path), decoding(name_of(path)), Image.open(path) as opened:
        image = opened.convert('RGB')
    shorter = int(RESIZE * size)
    width, height = (shorter * side // min(image.size) for side in image.size) if crop else (size, size)
    image = image.resize((width, height), Image.Resampling.BICUBIC)
    left, top = round((width - size) / 2), round((height - size) / 2)
    square = image.crop((left, top, left + size, top + size))
    return normalize(to_tensor(np.asarray(square), 3, str(path)), IMAGENET_MEAN, IMAGENET_STD)


def evaluate(
    classifier: nn.Module,
    images: Mapping[str, int],
    size: int,
    *,
    crop: bool,
    batch_size: int = 32,
    workers: int = 2,
    on_image: Callable[[], Any] = lambda: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Scores:
    """Score a classifier on labelled images.

    Args:
        classifier: from (B, 3, size, size) to (B, classes).
        images: from :func:`list_labelled`.
        size: side of the square that it sees, in pixels.
        crop: whether that is the middle of the image, or the whole; :func:`crops_at` tells what was published.
        batch_size: images at once.
        workers: threads that read.
        on_image: called after each image.
        should_stop: asked between batches; what was scored until then is returned.
    """
    checks.integer('size', size)
    parameter = next(classifier.parameters())
    scores = Scores()

    def read(item: Item) -> Tensor | str:
        try:
            return read_square(Path(item.name), size, crop)
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
            for item, ranking in zip(members, outs.topk(min(TOP, outs.shape[1])).indices.tolist(), strict=True):
                scores.add(images[item.name], ranking)
                on_image()
            if should_stop():
                break
    return scores

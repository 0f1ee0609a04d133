"""What a classifier scores on a folder of images, one folder per class, as ImageNet's validation images come."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from swin_dense import checks
from swin_dense.features.images import IMAGENET_MEAN, IMAGENET_STD, normalize, to_tensor
from swin_dense.features.inference import evaluation_mode

TOP = 5
# How the published accuracies were measured: the shorter side resized to 256/224 of a crop from the middle, but by
# the classifiers fine-tuned at 384 pixels on whole images, https://github.com/microsoft/Swin-Transformer (TEST.CROP).
RESIZE = 256 / 224
WHOLE_FROM = 384
_SUFFIXES = {'.jpg', '.jpeg', '.png', '.webp', '.bmp', '.tif', '.tiff'}


@dataclass(frozen=True)
class Labelled:
    """An image file and its class.

    Attributes:
        name: path below the folder, with '/' on every system.
        label: of its class.
    """

    name: str
    label: int


@dataclass
class Scores:
    """What came out, counted up image by image.

    Attributes:
        images: how many were scored.
        top1: of these, how many have their class first.
        top5: of these, how many have their class among the first five.
        broken: name to reason, of images that could not be read.
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


def list_labelled(folder: Path, classes: Sequence[str] | None, num_classes: int) -> list[Labelled]:
    """List the images of a folder with one folder per class, whose names in order are the classes 0, 1 and so on.

    Args:
        folder: the folder.
        classes: names of the folders in the order of the classes; None takes all that are there, sorted.
        num_classes: how many the classifier knows.

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
    label_of = {name: label for label, name in enumerate(names)}
    images = [
        Labelled(path.relative_to(folder).as_posix(), label_of[name])
        for name in found
        for path in sorted((folder / name).rglob('*'))
        if path.suffix.lower() in _SUFFIXES
    ]
    if not images:
        raise ValueError(f'no image in the folders of {folder}; known are {", ".join(sorted(_SUFFIXES))}')
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
    with Image.open(path) as opened:
        image = opened.convert('RGB')
    shorter = int(RESIZE * size)
    width, height = (shorter * side // min(image.size) for side in image.size) if crop else (size, size)
    image = image.resize((width, height), Image.Resampling.BICUBIC)
    left, top = round((width - size) / 2), round((height - size) / 2)
    square = image.crop((left, top, left + size, top + size))
    return normalize(to_tensor(np.asarray(square), 3, str(path)), IMAGENET_MEAN, IMAGENET_STD)


class _Squares(Dataset):
    """Index, square of the image and, where there is none, the reason."""

    def __init__(self, folder: Path, images: Sequence[Labelled], size: int, crop: bool) -> None:
        self.folder = folder
        self.images = images
        self.size = size
        self.crop = crop

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[int, Tensor | None, str]:
        try:
            return index, read_square(self.folder / self.images[index].name, self.size, self.crop), ''
        except (OSError, ValueError, SyntaxError, UnidentifiedImageError, Image.DecompressionBombError) as error:
            return index, None, str(error)


class Record:
    """The rankings of images in a file, one line of JSON each, so that an interrupted run can go on.

    Args:
        path: of the file.
        settings: what the rankings depend on, which the file says in its first line.

    Raises:
        ValueError: the file was written with other settings, or by something else.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.done: dict[str, list[int]] = {}
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        # The last line of a run that was killed may be cut off; its image is done again.
        whole = [line for line in lines if line.endswith(b'\n')]
        first = json.dumps({'settings': settings}).encode() + b'\n'
        if lines and not first.startswith(lines[0]):  # the first line of a run that was killed may be cut off too
            raise ValueError(
                f'{path} holds what another run found, of {lines[0].decode(errors="replace").strip()[:200]}; '
                'this one has other settings, so give another file'
            )
        for line in whole[1:]:
            entry = json.loads(line)
            self.done[entry['image']] = entry['ranking']
        self._file = path.open('r+b' if path.exists() else 'wb')
        self._file.truncate(sum(map(len, whole)))
        self._file.seek(0, os.SEEK_END)
        if not whole:
            self._file.write(first)

    def add(self, rankings: dict[str, list[int]]) -> None:
        """Write the rankings of a batch."""
        for name, ranking in rankings.items():
            self._file.write(json.dumps({'image': name, 'ranking': ranking}).encode() + b'\n')
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def evaluate(
    classifier: nn.Module,
    folder: Path,
    images: Sequence[Labelled],
    size: int,
    *,
    crop: bool,
    batch_size: int = 32,
    workers: int = 2,
    record: Record | None = None,
    on_image: Callable[[], Any] = lambda: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Scores:
    """Score a classifier on labelled images.

    Args:
        classifier: from (B, 3, size, size) to (B, classes).
        folder: that the names of the images begin at.
        images: from :func:`list_labelled`.
        size: side of the square that it sees, in pixels.
        crop: whether that is the middle of the image, or the whole; :func:`crops_at` tells what was published.
        batch_size: images at once.
        workers: processes that read.
        record: where rankings are kept, and taken from where they are known already.
        on_image: called after each image.
        should_stop: asked between batches; what was scored until then is returned.
    """
    checks.integer('size', size)
    scores = Scores()
    done = record.done if record else {}
    for image in images:
        if image.name in done:
            scores.add(image.label, done[image.name])
            on_image()
    pending = [image for image in images if image.name not in done]
    squares = _Squares(folder, pending, size, crop)
    for indices, batch, broken in _batches(squares, batch_size, workers):
        for index, reason in broken:
            scores.broken[pending[index].name] = reason
            on_image()
        rankings = _rank(classifier, batch) if indices else []
        for index, ranking in zip(indices, rankings, strict=True):
            scores.add(pending[index].label, ranking)
            on_image()
        if record is not None:
            record.add({pending[index].name: ranking for index, ranking in zip(indices, rankings, strict=True)})
        if should_stop():
            break
    return scores


def _batches(
    squares: _Squares, batch_size: int, workers: int
) -> Iterator[tuple[list[int], Tensor, list[tuple[int, str]]]]:
    """Yield indices and pixels of the images that can be read, and index and reason of the others."""
    loader: Any = DataLoader(squares, batch_size=batch_size, num_workers=workers, collate_fn=list)
    for samples in loader:
        read = [(index, square) for index, square, _ in samples if square is not None]
        broken = [(index, reason) for index, square, reason in samples if square is None]
        batch = torch.stack([square for _, square in read]) if read else torch.empty(0)
        yield [index for index, _ in read], batch, broken


def _rank(classifier: nn.Module, batch: Tensor) -> list[list[int]]:
    parameter = next(classifier.parameters())
    with evaluation_mode(classifier), torch.inference_mode():
        scores = classifier(batch.to(parameter.device, parameter.dtype))
    return scores.topk(min(TOP, scores.shape[1])).indices.tolist()

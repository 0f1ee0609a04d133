"""The endings of the names of images and masks, of which mmseg reads one each."""

from __future__ import annotations

import shlex
from collections import Counter
from pathlib import Path

from swin_dense.images.listing import IMAGE_SUFFIXES
from swin_dense.workbench.configs.experiment import Experiment
from swin_dense.workbench.configs.files import endings_in

_COMPARED = 100  # number of images whose masks are searched for, to detect the ending of mask names


def forget_endings(experiment: Experiment) -> None:
    """Remove the endings of the recipe's own data, which :func:`find_endings` then detects anew."""
    for data in experiment.datasets if not experiment.is_detector else ():
        data.entry.pop('img_suffix', None)
        data.entry.pop('seg_map_suffix', None)


def find_endings(experiment: Experiment) -> list[str]:
    """Detect and set the file name endings of a segmentor's own data sets, unless the config sets them.

    Return one message for each folder with images that will not be read, because they have another ending than most.
    """
    messages = []
    for data in experiment.datasets:
        if data.kind != 'BaseSegDataset':
            continue
        dataset = data.entry
        images, masks = Path(data.images), Path(data.masks)
        if images.is_dir() and 'img_suffix' not in dataset:
            (dataset.img_suffix, _), *others = image_endings(images).most_common()
            if others:
                unread = ', '.join(f'{count} {ending}' for ending, count in others)
                messages.append(f'in {images}, only images that end in {dataset.img_suffix} are read, not {unread}')
        if images.is_dir() and masks.is_dir() and 'seg_map_suffix' not in dataset:
            dataset.seg_map_suffix = _mask_ending(images, dataset.img_suffix, masks)
    return list(dict.fromkeys(messages))  # validation and test often have the same data


def image_endings(folder: Path) -> Counter[str]:
    """Count the images in a folder, searched recursively, by their ending; those that differ in case are an error."""
    found: Counter[str] = Counter()
    for path in folder.rglob('*.*'):
        if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file():
            found[path.suffix] += 1
    if not found:
        raise ValueError(f'no images found in {folder}, {endings_in(folder)}')
    _check_case(folder, 'images', found)
    return found


def _check_case(folder: Path, kind: str, endings: Counter[str]) -> None:
    """Raise ValueError if some names of files have the most frequent ending, and some that in another case."""
    (most, count), *others = endings.most_common()
    for ending, other in others:
        if ending.lower() == most.lower():
            files = f"find {shlex.quote(str(folder))} -type f -name '*{ending}'"
            rename = f'mv -n "$1" "${{1%{ending}}}{most}"'
            raise ValueError(
                f'in {folder}, {count} {kind} end in {most} and {other} in {ending}, but mmseg reads one ending; '
                f"rename the others: {files} -exec sh -c '{rename}' - {{}} ';'"
            )


def names_below(folder: Path, ending: str) -> list[str]:
    """Return the paths in a folder, searched recursively, of the files with an ending, without that."""
    names = []
    for path in folder.rglob(f'*{ending}'):
        name = str(path.relative_to(folder))
        names.append(name.removesuffix(ending))
    return sorted(names)


def _mask_ending(images: Path, ending: str, masks: Path) -> str:
    """Return the ending that replaces the image ending in the names of masks, such as '_L.png'."""
    stems = names_below(images, ending)
    names = sorted(str(path.relative_to(masks)) for path in masks.rglob('*.*'))
    found: Counter[str] = Counter()
    for stem in stems[:_COMPARED]:
        # The stem 'image1' also matches the mask of 'image10', but such wrong endings are less frequent.
        found.update(name.removeprefix(stem) for name in names if name.startswith(stem))
    if not found:
        example = f'images such as {stems[0]}{ending}' if stems else f'no images {ending}'
        raise ValueError(
            f'no image in {images} has a mask in {masks}, {endings_in(masks)}: a mask must have the name of its image, '
            f'except for the ending; got {example} and masks such as {", ".join(names[:3])}'
        )
    _check_case(masks, 'masks', found)
    return min(found, key=lambda rest: (-found[rest], len(rest)))

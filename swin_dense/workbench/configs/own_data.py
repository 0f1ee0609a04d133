"""Adapt a recipe to a user's own data: locations of files, classes, and file name endings."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from swin_dense.images.listing import IMAGE_SUFFIXES
from swin_dense.workbench.configs.classes import set_classes
from swin_dense.workbench.configs.experiment import Experiment, dicts

# Each is an option of `swin-dense config`.
PLACES = ('train_ann', 'val_ann', 'train_images', 'val_images', 'train_masks', 'val_masks')
_COMPARED = 100  # number of images whose masks are searched for, to detect the ending of mask names


def own_data(
    experiment: Experiment,
    data_root: str | None,
    classes: Sequence[str] | None,
    places: Mapping[str, str],
) -> None:
    """Change a recipe in place to use a user's folder and classes; None keeps those of COCO or ADE20K.

    In segmentation masks, the value of a pixel is the index of its class, and 255 is ignored. ``places`` are files and
    folders by their names in ``PLACES``, for data with another layout. They are relative to ``data_root``, or to the
    current folder if that does not contain them. Those for 'val' also apply to the test data.
    """
    if data_root is not None:
        _replace_root(experiment, data_root)
    if places:
        _place(experiment, data_root, places)
    if classes is not None:
        set_classes(experiment, classes)
    if (classes is not None or places) and not experiment.is_detector:
        for dataset in experiment.datasets:  # find_endings detects them again
            dataset.entry.pop('img_suffix', None)
            dataset.entry.pop('seg_map_suffix', None)


def find_endings(experiment: Experiment) -> list[str]:
    """Detect and set the file name endings of a segmentor's own data sets, unless the config sets them.

    Return one message for each folder with images that will not be read, because they have another ending than most.
    """
    messages: dict[str, bool] = {}
    for data in experiment.datasets:
        if data.kind != 'BaseSegDataset':
            continue
        dataset = data.entry
        images, masks = Path(data.folder('img_path')), Path(data.folder('seg_map_path'))
        if images.is_dir() and 'img_suffix' not in dataset:
            (dataset.img_suffix, _), *others = image_endings(images).most_common()
            if others:
                unread = ', '.join(f'{count} {ending}' for ending, count in others)
                messages[f'in {images}, only images that end in {dataset.img_suffix} are read, not {unread}'] = True
        if images.is_dir() and masks.is_dir() and 'seg_map_suffix' not in dataset:
            dataset.seg_map_suffix = _mask_ending(images, dataset.img_suffix, masks)
        dataset.setdefault('img_suffix', '.jpg')
        dataset.setdefault('seg_map_suffix', '.png')
    return list(messages)


def endings_in(folder: Path) -> str:
    """Describe the file name endings in a folder, searched recursively, with counts, for an error message."""
    found = Counter(path.suffix or path.name for path in folder.rglob('*') if path.is_file())
    listed = ', '.join(f'{ending} ({count})' for ending, count in found.most_common(5))
    return f'whose files end in {listed}' if listed else 'which contains no files'


def _replace_root(experiment: Experiment, data_root: str) -> None:
    """Change every string that is the value of a dict's key and begins with the folder of the data sets."""
    roots = {dataset.entry.get('data_root') or '' for dataset in experiment.datasets}
    if len(roots) != 1 or '' in roots:
        found = ', '.join(repr(root) for root in sorted(roots)) or 'no dataset'
        raise ValueError(
            f'the data root can be replaced only if all datasets of a config have the same, got {found}; '
            'set them one by one, for example --set train_dataloader.dataset.data_root=DIR'
        )
    old = roots.pop()
    new = data_root.rstrip('/') + '/' * old.endswith('/')
    for part in dicts(list(experiment.config.values())):
        for key, item in list(part.items()):
            if isinstance(item, str) and item.startswith(old):
                part[key] = new + item.removeprefix(old)


def _place(experiment: Experiment, data_root: str | None, places: Mapping[str, str]) -> None:
    """Set the given files and folders in data sets, and in evaluators that read annotations."""
    is_detector = experiment.is_detector
    keys = {'images': 'img'} if is_detector else {'images': 'img_path', 'masks': 'seg_map_path'}
    if data_root is None:  # make all paths relative to the current folder, as the given places are
        for dataset in experiment.datasets:
            if dataset.annotations:
                dataset.entry.ann_file = dataset.annotations
            if 'data_prefix' in dataset.entry:
                dataset.entry.data_prefix = {key: dataset.folder(key) for key in dataset.entry.data_prefix}
            dataset.entry.data_root = ''
    for name, path in places.items():
        part, _, kind = name.partition('_')
        if is_detector and kind == 'masks':
            raise ValueError(f'--{part}-masks is for segmentation, but this config is for a detector')
        # A path that exists only in the current folder is made relative to the data root.
        if data_root is not None and not os.path.exists(os.path.join(data_root, path)) and os.path.exists(path):
            path = os.path.relpath(path, data_root)
        splits = ('train',) if part == 'train' else ('val', 'test')
        for dataset in experiment.of(splits):
            if kind == 'ann':
                dataset.entry.ann_file = path
            else:
                dataset.entry.setdefault('data_prefix', {})[keys[kind]] = path
        for evaluator in dicts([experiment.config.get(f'{split}_evaluator') for split in splits]):
            if kind == 'ann' and 'ann_file' in evaluator:
                evaluator.ann_file = os.path.join(data_root or '', path)


def image_endings(folder: Path) -> Counter[str]:
    """Count the images in a folder, searched recursively, by their ending; those that differ in case are an error."""
    images = [path for path in folder.rglob('*.*') if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file()]
    found = Counter(path.suffix for path in images)
    if not found:
        raise ValueError(f'no images found in {folder}, {endings_in(folder)}')
    (most, count), *others = found.most_common()
    for ending, other in others:
        if ending.lower() == most.lower():
            raise ValueError(
                f'in {folder}, {count} images end in {most} and {other} in {ending}, but mmseg reads one ending; '
                f'rename the others: for name in *{ending}; do mv -n "$name" "${{name%{ending}}}{most}"; done'
            )
    return found


def _mask_ending(images: Path, ending: str, masks: Path) -> str:
    """Return the ending that replaces the image ending in the names of masks, such as '_L.png'."""
    stems = sorted(str(path.relative_to(images)).removesuffix(ending) for path in images.rglob(f'*{ending}'))
    names = sorted(str(path.relative_to(masks)) for path in masks.rglob('*.*'))
    found = Counter(
        name.removeprefix(stem) for stem in stems[:_COMPARED] for name in names if name.startswith(stem)
    )  # the stem 'image1' also matches the mask of 'image10', but such wrong endings are less frequent
    if not found:
        example = f'images such as {stems[0]}{ending}' if stems else f'no images {ending}'
        raise ValueError(
            f'no image in {images} has a mask in {masks}, {endings_in(masks)}: a mask must have the name of its image, '
            f'except for the ending; got {example} and masks such as {", ".join(names[:3])}'
        )
    return min(found, key=lambda rest: (-found[rest], len(rest)))

"""A recipe pointed at a user's own data: where the files lie, which classes they have, and how their names end."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swin_dense.features.sources import IMAGE_SUFFIXES
from swin_dense.recipes.classes import ignore_values, set_classes
from swin_dense.recipes.parts import SPLITS, class_count, datasets, dicts
from swin_dense.recipes.standalone import check_form

if TYPE_CHECKING:
    from mmengine.config import Config

# What `swin-dense config` has an option for.
PLACES = ('train_ann', 'val_ann', 'train_images', 'val_images', 'train_masks', 'val_masks')
_COMPARED = 100  # images whose masks are looked for, to find how the names of masks end


def own_data(
    config: Config,
    data_root: str | None = None,
    classes: Sequence[str] | None = None,
    places: Mapping[str, str] | None = None,
    ignore: Sequence[int] = (),
) -> None:
    """Point a recipe at a user's own data.

    Args:
        config: changed in place.
        data_root: folder that takes the place of COCO's or ADE20K's, None to keep it.
        classes: names that take the place of COCO's or ADE20K's, None to keep them. For segmentation, the value of a
            pixel in a mask is the index of its class in this list, and 255 is ignored.
        places: files and folders by their names in ``PLACES``, those that do not lie as COCO's or ADE20K's: below
            ``data_root``, or from the current folder where there is no ``data_root`` or nothing below it. Those of val
            hold for the test data too.
        ignore: values in masks that are no class.

    Raises:
        ValueError: the names are not distinct, or too few, a place or value is not for this task, or the config is of
            a kind that cannot be changed here.
    """
    check_form(config)
    is_detector = config.default_scope == 'mmdet'
    if data_root is not None:
        _replace_root(config, data_root)
    if places:
        _place(config, data_root, places)
    if classes is not None:
        set_classes(config, classes)
    if (classes is not None or places) and not is_detector:
        for dataset in datasets(config):  # find_endings looks again
            dataset.pop('img_suffix', None)
            dataset.pop('seg_map_suffix', None)
    if ignore:
        ignore_values(config, ignore)


def find_endings(config: Config) -> list[str]:
    """Let a segmentor's plain data sets read the endings that their files have, where the config names none.

    Returns:
        Messages on images that are left out, as they have another ending than most.

    Raises:
        ValueError: a folder is there and has no images, or no image has a mask.
    """
    messages: dict[str, bool] = {}
    for dataset in datasets(config):
        if dataset.get('type') != 'BaseSegDataset':
            continue
        images, masks = _below(dataset, 'img_path'), _below(dataset, 'seg_map_path')
        if images.is_dir() and 'img_suffix' not in dataset:
            (dataset.img_suffix, _), *others = _image_endings(images).most_common()
            if others:
                left_out = ', '.join(f'{count} {ending}' for ending, count in others)
                messages[f'of the images in {images}, those in {dataset.img_suffix} are read, not {left_out}'] = True
        if images.is_dir() and masks.is_dir() and 'seg_map_suffix' not in dataset:
            dataset.seg_map_suffix = _mask_ending(images, dataset.img_suffix, masks)
        dataset.setdefault('img_suffix', '.jpg')
        dataset.setdefault('seg_map_suffix', '.png')
    return list(messages)


def check_annotations(config: Config) -> None:
    """Compare the classes and files with those that annotations in COCO's form name, where these are there.

    mmdet trains without a single box, and says nothing, where no annotation has the classes.

    Raises:
        ValueError: the classes differ, no image lies where the annotations say, there are no masks to train on, or they
            have another form.
    """
    for dataset in datasets(config):
        annotations = Path(dataset.get('data_root') or '', dataset.get('ann_file', ''))
        if annotations.suffix != '.json' or not annotations.is_file():
            continue
        found, names, has_masks = _read_annotations(annotations)
        classes = dataset.get('metainfo', {}).get('classes')
        given, expected = (classes, class_count(config.model)) if classes else (found, class_count(config.model))
        absent = [name for name in given if name not in found]
        if absent or len(given) != expected:
            raise ValueError(
                f'{annotations} has the classes {",".join(found)}, the config '
                f'{",".join(classes) if classes else expected}; give those to train with: --classes A,B,C'
            )
        if not has_masks and any(step.get('with_mask') for step in dataset.get('pipeline') or ()):
            raise ValueError(
                f'{annotations} has boxes without masks, and this recipe trains on masks; take one for boxes: '
                '`swin-dense zoo --task detection`'
            )
        folder = _below(dataset, 'img')
        if folder.is_dir() and names and not any((folder / name).exists() for name in names):
            raise ValueError(
                f'{annotations} names {len(names)} images, {names[0]!r} among them, and none lies in {folder}, '
                f'{endings_in(folder)}; --train-images and --val-images say which folder the names start from'
            )


def _read_annotations(path: Path) -> tuple[list[str], list[str], bool]:
    """Return the names of the classes and of the images, and whether objects, where there are any, have masks."""
    try:
        content = json.loads(path.read_bytes())
        classes = [category['name'] for category in content['categories']]
        found = content.get('annotations') or []
        has_masks = not found or any(annotation.get('segmentation') for annotation in found)
        return classes, [image['file_name'] for image in content['images']], has_masks
    except (ValueError, KeyError, TypeError) as error:
        reason = f'{type(error).__name__}: {error}'
        raise ValueError(f"{path} cannot be read as annotations in COCO's form ({reason})") from error


def missing_data(config: Config, splits: Sequence[str] = SPLITS) -> list[str]:
    """Return the files and folders of a config's data that are not there; addresses are not looked at."""
    missing = {}
    for dataset in datasets(config, splits):
        root = dataset.get('data_root') or ''
        for path in [dataset.get('ann_file'), *_folders(dataset)]:
            whole = os.path.join(root, path or '')
            if path and '://' not in whole and not os.path.exists(whole):
                missing[whole] = True
    return list(missing)


def _folders(dataset: Any) -> list[str]:
    """Return the folders that a data set reads; mmdet's recipes for instances also name that of panoptic masks."""
    reads_masks = dataset.get('type') != 'CocoDataset' or any(
        step.get('with_seg') for step in dataset.get('pipeline') or ()
    )
    return [path for key, path in dataset.get('data_prefix', {}).items() if key != 'seg' or reads_masks]


def endings_in(folder: Path) -> str:
    """Return in words which endings the files in a folder and below have, and how many of each."""
    found = Counter(path.suffix or path.name for path in folder.rglob('*') if path.is_file())
    listed = ', '.join(f'{ending} ({count})' for ending, count in found.most_common(5))
    return f'whose files end in {listed}' if listed else 'which has no files'


def _replace_root(config: Config, data_root: str) -> None:
    entries = list(config.values())
    old = _data_root(config)
    new = data_root.rstrip('/') + '/' * old.endswith('/')
    _replace(entries, lambda text: new + text.removeprefix(old) if text.startswith(old) else text)


def _replace(value: Any, change: Callable[[str], str]) -> None:
    """Change every string that is the value of a dict's key."""
    for part in dicts(value):
        for key, item in list(part.items()):
            if isinstance(item, str):
                part[key] = change(item)


def _data_root(config: Config) -> str:
    roots = {str(dataset.get('data_root') or '') for dataset in datasets(config)}
    if len(roots) != 1 or '' in roots:
        found = ', '.join(repr(root) for root in sorted(roots)) or 'no dataset'
        raise ValueError(
            f'a data root is replaced where all datasets of a config have the same; here is {found}: '
            'set them one by one, as in --set train_dataloader.dataset.data_root=DIR'
        )
    return roots.pop()


def _place(config: Config, data_root: str | None, places: Mapping[str, str]) -> None:
    """Let data sets, and the evaluators that read annotations too, read the files and folders that are named."""
    is_detector = config.default_scope == 'mmdet'
    for name in places:
        if is_detector and name.endswith('_masks'):
            raise ValueError(f'--{name.replace("_", "-")} is for segmentation, and this config is that of a detector')
    keys = {'images': 'img'} if is_detector else {'images': 'img_path', 'masks': 'seg_map_path'}
    if data_root is None:
        _write_out_roots(config)
    for split in SPLITS:
        source = 'train' if split == 'train' else 'val'
        for name, place in places.items():
            if not name.startswith(source):
                continue
            kind, path = name.partition('_')[2], _from_root(place, data_root)
            for dataset in datasets(config, [split]):
                if kind == 'ann':
                    dataset.ann_file = path
                else:
                    dataset.setdefault('data_prefix', {})[keys[kind]] = path
            for evaluator in dicts(config.get(f'{split}_evaluator')):
                if kind == 'ann' and 'ann_file' in evaluator:
                    evaluator.ann_file = os.path.join(data_root or '', path)


def _write_out_roots(config: Config) -> None:
    """Let all paths start from the current folder, as those that are placed without a data root do."""
    for dataset in datasets(config):
        root, dataset.data_root = dataset.get('data_root') or '', ''
        if dataset.get('ann_file'):
            dataset.ann_file = os.path.join(root, dataset.ann_file)
        if 'data_prefix' in dataset:
            dataset.data_prefix = {key: os.path.join(root, path) for key, path in dataset.data_prefix.items()}


def _from_root(path: str, root: str | None) -> str:
    """Return where a path lies from the data root: there, or else where the current folder has it."""
    if root is None or os.path.exists(os.path.join(root, path)) or not os.path.exists(path):
        return path
    return os.path.relpath(path, root)


def _below(dataset: Any, prefix: str) -> Path:
    return Path(dataset.get('data_root') or '', dataset.get('data_prefix', {}).get(prefix) or '')


def _image_endings(folder: Path) -> Counter[str]:
    """Return how many images in a folder and below have which ending."""
    found = Counter(path.suffix for path in folder.rglob('*.*') if path.suffix.lower() in IMAGE_SUFFIXES)
    if not found:
        raise ValueError(f'there are no images in {folder}, {endings_in(folder)}')
    return found


def _mask_ending(images: Path, ending: str, masks: Path) -> str:
    """Return what follows in the names of masks where in those of images the ending does, such as '_L.png'."""
    stems = sorted(str(path.relative_to(images)).removesuffix(ending) for path in images.rglob(f'*{ending}'))
    names = sorted(str(path.relative_to(masks)) for path in masks.rglob('*.*'))
    found = Counter(
        name.removeprefix(stem) for stem in stems[:_COMPARED] for name in names if name.startswith(stem)
    )  # those of image 1 are also found at the mask of image 10, but fewer of them
    if not found:
        example = f'{stems[0]}{ending}' if stems else f'*{ending}, and there is none'
        raise ValueError(
            f'no image in {images} has a mask in {masks}, {endings_in(masks)}: a mask must be called as its image, up '
            f'to the ending; an image here is called {example}, and masks {", ".join(names[:3])}'
        )
    return min(found, key=lambda rest: (-found[rest], len(rest)))

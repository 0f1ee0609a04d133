"""Common layouts of data sets, in which `swin-dense config` finds files and folders by itself."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path

from swin_dense.utils.checks import first_few
from swin_dense.workbench.configs.coco import read_coco
from swin_dense.workbench.configs.experiment import Experiment
from swin_dense.workbench.configs.files import endings_in, hint_on_name

_ROBOFLOW = '_annotations.coco.json'
# Folders of a data set for segmentation, in any case of letters; the last of each are those of Pascal VOC.
_IMAGES = ('images', 'image', 'imgs', 'img', 'img_dir', 'jpegimages')
_MASKS = ('masks', 'mask', 'annotations', 'annotation', 'labels', 'label', 'ann_dir', 'segmentationclass')
_PARTS = {'train': ('train', 'training'), 'val': ('valid', 'val', 'validation', 'test', 'testing')}
_YOLO = re.compile(rb'\d+( [01]?\.\d+){4}')  # the first line of a file: a class, and a box or the points of a polygon


def find_places(experiment: Experiment, data_root: str, is_split: bool) -> tuple[dict[str, str], str]:
    """Return the files and folders of data in a common layout, or {} to expect the layout of the recipe, and why.

    For detection: Roboflow's, or one file of annotations with its images, as CVAT and Label Studio write them. For
    segmentation: folders of images and of masks, by their names, with or without folders for each part. Unless the data
    are to be split, there must be validation data. The reason is what is there instead, '' if nothing was searched for.
    """
    root = Path(data_root)
    own = [data.entry for data in experiment.datasets if data.split == 'train']
    if not own or not root.is_dir():
        return {}, ''
    if experiment.is_detector:
        expected = own[0].get('ann_file')
    else:
        expected = own[0].get('data_prefix', {}).get('img_path')
    if expected and (root / expected).exists():
        return {}, ''
    found, reason = _annotated(root) if experiment.is_detector else _masked(root)
    is_complete = any(name.startswith('val') for name in found)
    if found and not is_complete and not is_split:
        raise ValueError(
            f'{root} has no validation data beside {", ".join(found.values())}; give --val-share 0.2 to take a fifth '
            'of these data, or the paths with --val-ann, --val-images and --val-masks'
        )
    return found, reason


def _annotated(root: Path) -> tuple[dict[str, str], str]:
    """Return the places of annotations in COCO's format and of their images, or {} and why there are none."""
    places: dict[str, str] = {}
    for part, names in _PARTS.items():
        held = next((name for name in names if (root / name / _ROBOFLOW).is_file()), None)
        if held:
            places |= {f'{part}_ann': f'{held}/{_ROBOFLOW}', f'{part}_images': held}
    if 'train_ann' in places:
        return places, ''
    contents = {}
    reasons = []
    files = [*root.glob('*.json'), *root.glob('annotations/*.json')]
    for file in sorted(files):
        if file.name.endswith(('.train.json', '.val.json')):  # of an earlier split
            continue
        try:
            contents[file] = read_coco(file)
        except ValueError as error:
            reasons.append(str(error))
    if len(contents) > 1:
        options = '--train-ann, --train-images, --val-ann and --val-images'
        return {}, f'{root} has several files of annotations, {first_few(contents)}: name those to use with {options}'
    if not contents:
        none = f'{root} has no .json file of annotations, but {content_of(root)}{_hint_on_format(root)}'
        return {}, '; '.join(reasons) or none
    file, content = next(iter(contents.items()))
    if not content['images']:
        return {}, f'{file} lists no images'
    first = content['images'][0]['file_name']
    folders = [root, *sorted(root.glob('*')), *sorted(root.glob('*/*'))]
    holding = [folder for folder in folders if (folder / first).is_file()]
    if not holding:
        hint = hint_on_name(folders, first)
        return {}, f'{file} names {first!r} first, which is in no folder below {root}: there, {content_of(root)}{hint}'
    annotations = str(file.relative_to(root))
    images = str(holding[0].relative_to(root))
    return {'train_ann': annotations, 'train_images': images}, ''


def _hint_on_format(root: Path) -> str:
    """Return advice for the files of Pascal VOC, of XML, and of YOLO, with a class and shares of the image."""
    if next(root.rglob('*.xml'), None):
        name = 'Pascal VOC'
    else:
        texts = itertools.islice(root.rglob('*.txt'), 9)
        starts = [file.read_bytes()[:99] for file in texts]
        if not any(_YOLO.match(start) for start in starts):
            return ''
        name = 'YOLO'
    return f'; docs/own-data.md shows how to convert annotations of {name}, as these are, to the format of COCO'


def _masked(root: Path) -> tuple[dict[str, str], str]:
    """Return the folders of images and of masks, or {} and why there are none.

    Those of training and validation are images/train and masks/train, or train/images and train/masks.
    """
    images, masks = _named(root, _IMAGES), _named(root, _MASKS)
    places: dict[str, Path] = {}
    for part, names in _PARTS.items():
        own = _named(root, names)
        if own:
            of_images, of_masks = _named(own, _IMAGES), _named(own, _MASKS)
        else:
            of_images, of_masks = _named(images, names), _named(masks, names)
        if of_images and of_masks:
            places |= {f'{part}_images': of_images, f'{part}_masks': of_masks}
    if 'train_images' not in places and images and masks:
        places = {'train_images': images, 'train_masks': masks}
    if 'train_images' in places:
        return {name: str(folder.relative_to(root)) for name, folder in places.items()}, ''
    return {}, f'{root} has no folders such as images and masks, but {content_of(root)}'


def _named(folder: Path | None, names: Sequence[str]) -> Path | None:
    """Return the folder in another one that has the first of the names, in any case of letters."""
    if folder is None:
        return None
    below = {path.name.lower(): path for path in folder.iterdir() if path.is_dir()}
    return next((below[name] for name in names if name in below), None)


def content_of(root: Path) -> str:
    """Describe what is in a folder, for a message."""
    entries = sorted(root.iterdir())
    if not entries:
        return 'it is empty'
    folders = first_few(f'{path.name}/' for path in entries if path.is_dir())
    return f'it has {folders or "no folders"}, {endings_in(root)}'

"""Find a user's data below one folder, and split data that have no validation data."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from mmengine.config import Config

from swin_dense.utils import checks
from swin_dense.utils.atomic import check_destination, remove, write_text
from swin_dense.workbench.configs.coco import read_coco
from swin_dense.workbench.configs.own_data import image_endings
from swin_dense.workbench.configs.parts import datasets

_ROBOFLOW = '_annotations.coco.json'
# Folders of a data set for segmentation, in any case of letters; the last of each are those of Pascal VOC.
_IMAGES = ('images', 'image', 'imgs', 'img', 'jpegimages')
_MASKS = ('masks', 'mask', 'annotations', 'annotation', 'labels', 'label', 'segmentationclass')


def class_names(text: str) -> list[Any]:
    """Return the names of classes in an option: a,b,c, or the path of a file.

    A .txt file has a name in each line. Of a .json file of annotations, all categories are taken. Both keep commas,
    spaces and numbers in names.
    """
    path = Path(text)
    if path.suffix == '.json':
        return [category['name'] for category in read_coco(path)['categories']]
    if path.suffix == '.txt':
        return [line for line in path.read_text(encoding='utf-8-sig').splitlines() if line]
    return [name.strip() for name in text.split(',')]


def find_places(config: Config, data_root: str, is_split: bool) -> dict[str, str]:
    """Return the files and folders of data in a common layout, or {} to expect the layout of the recipe.

    For detection: Roboflow's, or one file of annotations with its images, as CVAT and Label Studio write them. For
    segmentation: a folder of images beside one of masks, by their names. Unless they are to be split, there must be
    validation data.
    """
    root, own = Path(data_root), datasets(config, ['train'])
    is_detector = config.default_scope == 'mmdet'
    if not own or not root.is_dir():
        return {}
    expected = own[0].get('ann_file') if is_detector else own[0].get('data_prefix', {}).get('img_path')
    if expected and (root / expected).exists():
        return {}
    if is_detector:
        found = _detection(root)
    else:
        found = _segmentation(root)
    if found and 'val_ann' not in found and not is_split:
        raise ValueError(
            f'{root} has no validation data beside {", ".join(found.values())}; give --val-share 0.2 to take a fifth '
            'of these data, or the paths with --val-ann, --val-images and --val-masks'
        )
    return found


def _detection(root: Path) -> dict[str, str]:
    names = [name for name in ('train', 'valid', 'val', 'test') if (root / name / _ROBOFLOW).is_file()]
    if 'train' in names:
        return {
            place: value
            for part, name in zip(('train', 'val'), names, strict=False)
            for place, value in ((f'{part}_ann', f'{name}/{_ROBOFLOW}'), (f'{part}_images', name))
        }
    files = [*root.glob('*.json'), *root.glob('annotations/*.json')]
    files = [file for file in files if not file.name.endswith(('.train.json', '.val.json'))]  # of an earlier split
    if len(files) != 1:
        return {}
    images = read_coco(files[0])['images']
    folders = [root, *sorted(root.glob('*')), *sorted(root.glob('*/*'))]
    folders = [folder for folder in folders if images and (folder / images[0]['file_name']).is_file()]
    places = {'train_ann': files[0], 'train_images': folders[0]} if folders else {}
    return {place: str(path.relative_to(root)) for place, path in places.items()}


def _segmentation(root: Path) -> dict[str, str]:
    names = {path.name.lower(): path.name for path in root.iterdir() if path.is_dir()}
    images = [names[name] for name in _IMAGES if name in names]
    masks = [names[name] for name in _MASKS if name in names]
    return {'train_images': images[0], 'train_masks': masks[0]} if images and masks else {}


@contextlib.contextmanager
def split_data(
    places: Mapping[str, str], data_root: str | None, share: float, out: Path, force: bool = False
) -> Iterator[dict[str, str]]:
    """Split training data, in ``places`` as of :func:`own_data`, at random, and yield the places of both parts.

    The split is always the same. Two files beside the config, ``out``, name the images of each part, with their
    annotations for detection. They are removed again if the block raises.
    """
    if not 0 < checks.number('--val-share', share) < 1:
        raise ValueError(f'--val-share must be between 0 and 1, got {share}')
    if data_root is not None and not Path(data_root).is_dir():
        raise FileNotFoundError(f'there is no folder {data_root}')
    if 'train_images' not in places or any(name.startswith('val') for name in places):
        raise ValueError(
            '--val-share splits training data; give them, without validation data, in a layout that --data-root finds '
            'or with --train-images and --train-ann or --train-masks'
        )
    below = {name: Path(data_root or '', place) for name, place in places.items()}
    paths = {name: path if path.exists() else Path(places[name]) for name, path in below.items()}
    is_masks = 'train_masks' in paths
    content: Any = {'images': _names(paths['train_images'])} if is_masks else read_coco(paths['train_ann'])
    count = len(content['images'])
    size = max(1, round(share * count))
    if size >= count:
        raise ValueError(f'--val-share {share} of {count} images leaves none for training')
    chosen = set(np.random.default_rng(0).permutation(count)[:size].tolist())
    val_ids = set() if is_masks else {content['images'][index]['id'] for index in chosen}
    parts = {}
    for part, is_val in (('train', False), ('val', True)):
        images = [image for index, image in enumerate(content['images']) if (index in chosen) == is_val]
        if is_masks:
            parts[out.with_suffix(f'.{part}.txt')] = ''.join(f'{name}\n' for name in images)
        else:
            # Annotations of no image stay in the training part, where they are found.
            kept = [one for one in content.get('annotations') or [] if (one.get('image_id') in val_ids) == is_val]
            parts[out.with_suffix(f'.{part}.json')] = json.dumps({**content, 'images': images, 'annotations': kept})
    for path in parts:
        check_destination(path, force)
    try:
        for path, text in parts.items():
            write_text(path, text)
        same = {name.replace('train', 'val'): place for name, place in places.items()}
        files = {f'{part}_ann': str(path.resolve()) for part, path in zip(('train', 'val'), parts, strict=True)}
        yield {**places, **same, **files}
    except BaseException:
        for path in parts:
            remove(path)
        raise


def _names(folder: Path) -> list[str]:
    """Return the names of images without their ending."""
    ((ending, _), *_) = image_endings(folder).most_common()
    return sorted(str(path.relative_to(folder)).removesuffix(ending) for path in folder.rglob(f'*{ending}'))

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
from swin_dense.utils.atomic import check_free, remove, write_text
from swin_dense.workbench.configs.coco import read_coco
from swin_dense.workbench.configs.own_data import image_endings
from swin_dense.workbench.configs.parts import datasets

_ROBOFLOW = '_annotations.coco.json'
_VALIDATION = ('valid', 'val', 'test')  # folders of Roboflow, the first that exists
_MASKS = ('masks', 'annotations', 'labels')
_SEED = 0  # the same split in every run


def find_places(config: Config, data_root: str, is_split: bool) -> dict[str, str]:
    """Return the files and folders of data in a common layout, or {} to expect the layout of the recipe.

    For detection, the layouts are Roboflow's, and a single file of annotations with its images, as CVAT and Label
    Studio write them; for segmentation, a folder of images beside one of masks. Unless the data are to be split into
    training and validation, there must be validation data.
    """
    root = Path(data_root)
    own = datasets(config, ['train'])
    if not own or not root.is_dir():
        return {}
    is_detector = config.default_scope == 'mmdet'
    expected = own[0].get('ann_file') if is_detector else own[0].get('data_prefix', {}).get('img_path')
    if expected and (root / expected).exists():
        return {}
    if is_detector:
        found = _detection(root)
    else:
        masks = next((name for name in _MASKS if (root / name).is_dir() and (root / 'images').is_dir()), None)
        found = {'train_images': 'images', 'train_masks': masks} if masks else {}
    if not found or 'val_ann' in found or is_split:
        return found
    raise ValueError(
        f'{root} has no validation data beside {", ".join(found.values())}; give --val-share 0.2 to take a fifth of '
        'these data, or the paths with --val-ann, --val-images and --val-masks'
    )


def _detection(root: Path) -> dict[str, str]:
    if (root / 'train' / _ROBOFLOW).is_file():
        places = {'train_ann': f'train/{_ROBOFLOW}', 'train_images': 'train'}
        other = next((name for name in _VALIDATION if (root / name / _ROBOFLOW).is_file()), None)
        return places if other is None else {**places, 'val_ann': f'{other}/{_ROBOFLOW}', 'val_images': other}
    files = [*root.glob('*.json'), *root.glob('annotations/*.json')]
    if len(files) != 1:
        return {}
    first = read_coco(files[0])['images'][:1]
    below = {str(folder.relative_to(root)) for folder in (files[0].parent, root / 'images', *root.glob('images/*'))}
    folders = [name for name in ['.', *sorted(below)] if first and (root / name / first[0]['file_name']).is_file()]
    return {'train_ann': str(files[0].relative_to(root)), 'train_images': folders[0]} if folders else {}


@contextlib.contextmanager
def split_data(
    places: Mapping[str, str], data_root: str | None, share: float, out: Path, force: bool = False
) -> Iterator[dict[str, str]]:
    """Split training data at random, always in the same way, and yield the places of both parts.

    Two files beside a config name the images of each part, with their annotations for detection. They are removed
    again if the block raises.

    Args:
        places: files and folders of the training data, as of :func:`own_data`.
        data_root: the folder to which they are relative, or None.
        share: share of the images for validation.
        out: the config.
        force: replace existing files.
    """
    if not 0 < checks.number('--val-share', share) < 1:
        raise ValueError(f'--val-share must be between 0 and 1, got {share}')
    if 'train_images' not in places or any(name.startswith('val') for name in places):
        raise ValueError(
            '--val-share splits training data; give them, without validation data, in a layout that --data-root finds '
            'or with --train-images and --train-ann or --train-masks'
        )
    below = {name: Path(data_root or '', place) for name, place in places.items()}
    paths = {name: path if path.exists() else Path(places[name]) for name, path in below.items()}
    parts = _annotations(paths['train_ann'], share) if 'train_masks' not in paths else _names(paths, share)
    suffix = '.txt' if 'train_masks' in paths else '.json'
    files = {part: out.with_suffix(f'.{part}{suffix}') for part in parts}
    for path in files.values():
        check_free(path, force)
    try:
        for part, path in files.items():
            write_text(path, parts[part])
        same = {name.replace('train', 'val'): place for name, place in places.items()}
        yield {**places, **same, **{f'{part}_ann': str(path.resolve()) for part, path in files.items()}}
    except BaseException:
        for path in files.values():
            remove(path)
        raise


def _annotations(path: Path, share: float) -> dict[str, str]:
    """Return the content of the annotation file of each part."""
    content: dict[str, Any] = read_coco(path)
    chosen = _chosen(len(content['images']), share)
    ids = {image['id'] for index, image in enumerate(content['images']) if index in chosen}
    parts = {}
    for part, is_val in (('train', False), ('val', True)):
        images = [image for image in content['images'] if (image['id'] in ids) == is_val]
        # Annotations of no image stay in the training part, where they are found.
        kept = [one for one in content.get('annotations') or [] if (one.get('image_id') in ids) == is_val]
        parts[part] = json.dumps({**content, 'images': images, 'annotations': kept})
    return parts


def _names(paths: Mapping[str, Path], share: float) -> dict[str, str]:
    """Return the list of the names of images of each part."""
    folder = paths['train_images']
    ((ending, _), *_) = image_endings(folder).most_common()
    names = sorted(str(path.relative_to(folder)).removesuffix(ending) for path in folder.rglob(f'*{ending}'))
    chosen = _chosen(len(names), share)
    parts: dict[str, list[str]] = {'train': [], 'val': []}
    for index, name in enumerate(names):
        part = 'val' if index in chosen else 'train'
        parts[part].append(f'{name}\n')
    return {part: ''.join(lines) for part, lines in parts.items()}


def _chosen(count: int, share: float) -> set[int]:
    """Return which images are for validation."""
    size = max(1, round(share * count))
    if size >= count:
        raise ValueError(f'--val-share {share} of {count} images leaves none for training')
    return set(np.random.default_rng(_SEED).permutation(count)[:size].tolist())

"""Find a user's data below one folder, and split data that have no validation data."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from swin_dense.utils import checks
from swin_dense.utils.atomic import check_destination, remove, write_text
from swin_dense.workbench.configs.coco import SPLIT_OF, read_coco
from swin_dense.workbench.configs.experiment import Experiment
from swin_dense.workbench.configs.images import hint_on_name, some
from swin_dense.workbench.configs.own_data import endings_in, image_endings

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


def find_places(experiment: Experiment, data_root: str, is_split: bool) -> tuple[dict[str, str], str]:
    """Return the files and folders of data in a common layout, or {} to expect the layout of the recipe, and why.

    For detection: Roboflow's, or one file of annotations with its images, as CVAT and Label Studio write them. For
    segmentation: a folder of images beside one of masks, by their names. Unless they are to be split, there must be
    validation data. The reason is what is there instead, '' if nothing was searched for.
    """
    root, own = Path(data_root), experiment.of(['train'])
    if not own or not root.is_dir():
        return {}, ''
    entry = own[0].entry
    expected = entry.get('ann_file') if experiment.is_detector else entry.get('data_prefix', {}).get('img_path')
    if expected and (root / expected).exists():
        return {}, ''
    found, reason = _detection(root) if experiment.is_detector else _segmentation(root)
    if found and 'val_ann' not in found and not is_split:
        raise ValueError(
            f'{root} has no validation data beside {", ".join(found.values())}; give --val-share 0.2 to take a fifth '
            'of these data, or the paths with --val-ann, --val-images and --val-masks'
        )
    return found, reason


def _detection(root: Path) -> tuple[dict[str, str], str]:
    names = [name for name in ('train', 'valid', 'val', 'test') if (root / name / _ROBOFLOW).is_file()]
    if 'train' in names:
        places: dict[str, str] = {}
        for part, name in zip(('train', 'val'), names, strict=False):
            places |= {f'{part}_ann': f'{name}/{_ROBOFLOW}', f'{part}_images': name}
        return places, ''
    files = sorted([*root.glob('*.json'), *root.glob('annotations/*.json')])
    files = [file for file in files if not file.name.endswith(('.train.json', '.val.json'))]  # of an earlier split
    contents = {}
    reasons = []
    for file in files:
        try:
            contents[file] = read_coco(file)
        except ValueError as error:
            reasons.append(str(error))
    if len(contents) > 1:
        options = '--train-ann, --train-images, --val-ann and --val-images'
        return {}, f'{root} has several files of annotations, {some(contents)}: name those to use with {options}'
    if not contents and not reasons:
        reasons.append(f'{root} has no .json file of annotations, but {_content_of(root)}')
    if not contents:
        return {}, '; '.join(reasons)
    (file, content), *_ = contents.items()
    folders = [root, *sorted(root.glob('*')), *sorted(root.glob('*/*'))]
    if not content['images']:
        return {}, f'{file} lists no images'
    first = content['images'][0]['file_name']
    held = [folder for folder in folders if (folder / first).is_file()]
    if not held:
        hint = hint_on_name(folders, first)
        return {}, f'{file} names {first!r} first, which is in no folder below {root}: there, {_content_of(root)}{hint}'
    return {'train_ann': str(file.relative_to(root)), 'train_images': str(held[0].relative_to(root))}, ''


def _segmentation(root: Path) -> tuple[dict[str, str], str]:
    names = {path.name.lower(): path.name for path in root.iterdir() if path.is_dir()}
    images = [names[name] for name in _IMAGES if name in names]
    masks = [names[name] for name in _MASKS if name in names]
    if images and masks:
        return {'train_images': images[0], 'train_masks': masks[0]}, ''
    return {}, f'{root} has no folders such as images and masks, but {_content_of(root)}'


def _content_of(root: Path) -> str:
    """Describe what is in a folder, for a message."""
    folders = [f'{path.name}/' for path in sorted(root.iterdir()) if path.is_dir()]
    return f'it has {some(folders) or "no folders"}, {endings_in(root)}' if any(root.iterdir()) else 'it is empty'


@contextlib.contextmanager
def split_data(
    places: Mapping[str, str], data_root: str | None, share: float, out: Path, force: bool = False, reason: str = ''
) -> Iterator[dict[str, str]]:
    """Split training data, in ``places`` as of :func:`own_data`, at random, and yield the places of both parts.

    The split is always the same. Two files beside the config, ``out``, name the images of each part, with their
    annotations for detection, numbered from 1 if any number could not be evaluated. They are removed again if the block
    raises. ``reason`` says why no places were found.
    """
    if not 0 < checks.number('--val-share', share) < 1:
        raise ValueError(f'--val-share must be between 0 and 1, got {share}')
    if data_root is not None and not Path(data_root).is_dir():
        raise FileNotFoundError(f'there is no folder {data_root}')
    if 'train_images' not in places or any(name.startswith('val') for name in places):
        raise ValueError(
            f'{reason}{"; " * bool(reason)}--val-share splits training data; give them, without validation data, in a '
            'layout that --data-root finds or with --train-images and --train-ann or --train-masks'
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
    annotations = [] if is_masks else content.get('annotations') or []
    ids = [one['id'] for one in annotations]
    # Programs that number from 0, or with text: COCO's evaluation takes 0 for 'no match', and needs whole numbers.
    if not all(type(number) is int and number > 0 for number in ids) or len(set(ids)) < len(ids):
        annotations = [{**one, 'id': number} for number, one in enumerate(annotations, 1)]
    parts = {}
    for part, is_val in (('train', False), ('val', True)):
        images = [image for index, image in enumerate(content['images']) if (index in chosen) == is_val]
        if is_masks:
            parts[out.with_suffix(f'.{part}.txt')] = ''.join(f'{name}\n' for name in images)
        else:
            # Annotations of no image stay in the training part, where they are found.
            kept = [one for one in annotations if (one['image_id'] in val_ids) == is_val]
            source = {SPLIT_OF: str(paths['train_ann'].resolve())}
            whole = {**content, **source, 'images': images, 'annotations': kept}
            parts[out.with_suffix(f'.{part}.json')] = json.dumps(whole)
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

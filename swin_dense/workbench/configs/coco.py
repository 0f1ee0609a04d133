"""Look at annotations in COCO's format, and at the images that they name, before mmdet reads them.

mmdet leaves out boxes, or raises an error without a name in the middle of a training, for what is named here at once.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mmengine.config import Config
from mmengine.registry import DATASETS

from swin_dense.utils.addresses import is_address
from swin_dense.workbench.configs.images import absent_files, check_decodable, chosen, size_of, some
from swin_dense.workbench.configs.own_data import below, endings_in
from swin_dense.workbench.configs.parts import class_count
from swin_dense.workbench.configs.segmentations import is_in_place, is_mask, is_readable

_SAMPLED = 1000  # headers that are read, evenly spaced
_TOLERANCE = 2.0  # pixels that a box may reach beyond its image
# Entries that each section needs, and their types.
_WORDS = {int: 'a whole number', str: 'text'}
_IDS = (int, str)
_FIELDS: dict[str, dict[str, tuple[type, ...]]] = {
    'images': {'id': _IDS, 'file_name': (str,)},
    'categories': {'id': _IDS, 'name': _IDS},
    'annotations': {'id': _IDS, 'image_id': _IDS, 'category_id': _IDS},
}
# Models whose heads count something else than the classes of the data: any object, or the words of a text.
_OTHER_COUNTS = ('RPN', 'GroundingDINO', 'GLIP')


def look_at_coco(config: Config, dataset: Any, is_evaluated: bool, every_image: bool = False) -> list[str]:
    """Look at all annotations of a ``CocoDataset``, at all its file names, and at the sizes of a sample of its images.

    The default scope of mmengine must be that of the config. ``is_evaluated`` are data for validation or test, where
    pycocotools reads the annotations too. With ``every_image``, all images are decoded. Return what was looked at, and
    what is odd but no error; raise ValueError for what is one.
    """
    path = Path(dataset.get('data_root') or '', dataset.ann_file)
    content = read_coco(path)
    entries, annotations = content['images'], content.get('annotations') or []
    images = {entry['id']: entry for entry in entries}
    used = _check_categories(path, content['categories'], config, dataset)
    needs_masks = any(step.get('with_mask') for step in dataset.get('pipeline') or ())

    def refuse(kind: str, found: Sequence[Any], advice: str, is_wrong: Callable[[Any], Any]) -> None:
        wrong = [one for one in found if is_wrong(one)]
        if wrong:
            first = _shown(wrong[0])
            raise ValueError(f'{path}: {len(wrong)} of {len(found)} {kind} are wrong, such as {first}: {advice}')

    refuse('images', entries, 'write height and width in pixels', lambda one: not _are_numbers(one, 'height', 'width'))
    if len(images) < len(entries) or not images:
        raise ValueError(f'{path} has {len(entries)} images with {len(images)} ids; number them anew')
    if not annotations and not is_evaluated:
        raise ValueError(f'{path} has no annotations, so there is nothing to train with')
    known, times = {one['id'] for one in content['categories']}, Counter(one['id'] for one in annotations)
    rules: dict[str, Callable[[Any], Any]] = {
        'no image has this image_id (1 and "1" are different)': lambda one: one['image_id'] not in images,
        'no category has this category_id (1 and "1" are different)': lambda one: one['category_id'] not in known,
        'bbox must be x, y, width and height': lambda one: not _is_box(one.get('bbox')),
        'write the area; width times height is enough': lambda one: not _are_numbers(one, 'area'),
        'number the annotations from 1, each differently': lambda one: times[one['id']] > 1,
    }
    if is_evaluated:
        rules['pycocotools needs whole numbers as ids'] = lambda one: type(one['id']) is not int
        rules['write iscrowd, 0 for a single object'] = lambda one: one.get('iscrowd') is None
    if needs_masks:
        advice = 'this recipe needs masks, as lists of polygons or RLE of the size of the image; use one without masks'
        advice_on_numbers = 'write polygons as finite numbers, RLE as lengths that sum to height times width'
        advice_on_place = 'the mask covers nothing, or lies elsewhere than bbox; write pixels, not shares of the image'
        rules[f'{advice}: `swin-dense zoo detection`'] = lambda one: not is_mask(one, images[one['image_id']])
        rules[advice_on_numbers] = lambda one: not is_readable(one, images[one['image_id']])
        rules[advice_on_place] = lambda one: not is_in_place(one, images[one['image_id']])
    for advice, is_wrong in rules.items():
        refuse('annotations', annotations, advice, is_wrong)
    kept = [one for one in annotations if one['category_id'] in used]
    notes = _check_boxes(path, kept, images, used) if annotations else []
    load = next(iter(dataset.get('pipeline') or ()), {'type': 'LoadImageFromFile'})
    _check_files(path, images, below(dataset, 'img'), load, every_image)
    empty = len(images) - len({one['image_id'] for one in annotations})
    return [f'{path}: {len(images)} images, {empty} without annotations, {len(annotations)} annotations', *notes]


def read_coco(path: Path) -> Any:
    """Return the content of a file of annotations in the format of COCO."""
    if path.suffix != '.json' or path.is_dir():
        raise ValueError(
            f'{path} is no .json file, but annotations must be in the format of COCO; docs/own-data.md shows how to '
            'convert those of Pascal VOC (XML) and YOLO (txt)'
        )
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f'{path} cannot be read as JSON ({error})') from error
    for section, fields in _FIELDS.items():
        entries = content.get(section) if isinstance(content, dict) else None
        if entries is None and section == 'annotations':
            continue
        if not isinstance(entries, list):
            raise ValueError(f'{path} is no file of annotations in the format of COCO, because it has no {section}')
        for entry, (name, kinds) in itertools.product(entries, fields.items()):
            if not isinstance(entry, dict) or not isinstance(entry.get(name), kinds):
                words = ' or '.join(_WORDS[kind] for kind in kinds)
                raise ValueError(f'{path}: {name} of each of the {section} must be {words}, got {_shown(entry)}')
    return content


def _shown(entry: Any) -> Any:
    """Return an entry of a file for a message, without its mask."""
    return {key: value for key, value in entry.items() if key != 'segmentation'} if isinstance(entry, dict) else entry


def _check_categories(path: Path, categories: Sequence[Any], config: Config, dataset: Any) -> set[Any]:
    """Return the ids of the categories that are classes."""
    found = [category['name'] for category in categories]
    classes = (dataset.get('metainfo') or {}).get('classes')
    if not classes:  # those of the data set's type, such as COCO's 80, if the package that defines it is installed
        with DATASETS.switch_scope_and_registry(None) as registry:
            kind = registry.get(dataset.type)
        classes = found if kind is None else kind.METAINFO.get('classes') or found
    count = len(classes)
    with contextlib.suppress(ValueError):  # a model without num_classes
        count = len(classes) if config.model.get('type') in _OTHER_COUNTS else class_count(config.model)
    if len(classes) != count or not set(classes) <= set(found):
        model = '' if len(classes) == count else f', and a model of {count} classes'
        raise ValueError(
            f'{path} has {len(found)} classes, {some(found)}, but the config has {len(classes)}, {some(classes)}{model}'
            f'; give those to train with, such as all of the file: {_as_option(path, found)}'
        )
    used = [category for category in categories if category['name'] in classes]
    names = [category['name'] for category in used]
    if len({category['id'] for category in used}) < len(used) or len(set(names)) < len(names):
        raise ValueError(
            f'{path} has several categories of one name or id among {some(used)}, so that mmdet would number the '
            'classes wrongly; remove or rename the one without annotations (Roboflow writes one for the project)'
        )
    if names != list(classes):
        raise ValueError(
            f'{path} has the classes in the order {",".join(map(str, names))}, in which mmdet numbers them, but the '
            f'config has {",".join(map(str, classes))}; give them in the order of the file: {_as_option(path, names)}'
        )
    return {category['id'] for category in used}


def _as_option(path: Path, names: Sequence[Any]) -> str:
    """Return the option that gives these classes of a file, or all of it if their names are not plain words."""
    is_plain = all(isinstance(name, str) and ',' not in name and name == name.strip() for name in names)
    return f'--classes "{",".join(names)}"' if is_plain else f'--classes "{path}"'


def _are_numbers(entry: Any, *keys: str) -> bool:
    return all(type(entry.get(key)) in (int, float) and math.isfinite(entry[key]) for key in keys)


def _is_box(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 4 and _are_numbers(dict(enumerate(value)), *range(4))  # type: ignore[arg-type]


def _is_marked(annotation: Any) -> bool:
    return bool(annotation.get('ignore') or annotation.get('iscrowd'))


def _check_boxes(path: Path, annotations: Sequence[Any], images: Any, used: set[Any]) -> list[str]:
    """Check the boxes of the classes as mmdet reads them, and return notes on those that it leaves out."""
    boxes = np.array([one['bbox'] for one in annotations], float).reshape(-1, 4)
    shapes = [images[one['image_id']] for one in annotations]
    size = np.array([(image['width'], image['height']) for image in shapes], float).reshape(-1, 2)
    low, high = boxes[:, :2], boxes[:, :2] + boxes[:, 2:]
    is_beyond = ((low < -_TOLERANCE) | (high > size + _TOLERANCE)).any(1)
    reasons = {
        'lie outside of their image': (np.minimum(high, size) - np.maximum(low, 0) <= 0).any(1),
        'have an area of 0 or less': np.array([one['area'] for one in annotations], float) <= 0,
        'are narrower than a pixel': (boxes[:, 2:] < 1).any(1),
        "are marked 'ignore' or 'iscrowd'": np.array(list(map(_is_marked, annotations))),
    }
    is_left_out = np.any(list(reasons.values()), 0)
    why = ', '.join(f'{found.sum()} {reason}' for reason, found in reasons.items() if found.any())
    if is_left_out.all():
        raise ValueError(
            f'{path}: mmdet would leave out all {len(boxes)} boxes of the classes: {why}; write x, y, width and height '
            'in pixels, not as shares of the image (CVAT marks masks that are painted as iscrowd)'
        )
    are_corners = (boxes[:, 2:] > low) & (boxes[:, 2:] <= size + _TOLERANCE)
    if is_beyond.any() and are_corners.all():
        raise ValueError(
            f'{path}: {is_beyond.sum()} of {len(boxes)} boxes reach beyond their image, but none does as (x1, y1, x2, '
            'y2); write them as x, y, width, height'
        )
    notes = [f'{path}: mmdet leaves out {100 * is_left_out.mean():.2g} % of the boxes: {why}'] if why else []
    if is_beyond.any():
        notes.append(f'{path}: {is_beyond.sum()} of {len(boxes)} boxes reach beyond their image')
    kept = [one['category_id'] for one, is_out in zip(annotations, is_left_out, strict=True) if not is_out]
    if used - {*kept}:
        notes.append(f'{path}: some classes have no box')
    return notes


def _check_files(path: Path, images: Any, folder: Path, load: Any, every_image: bool) -> None:
    if is_address(str(folder)):
        return
    files = {os.path.join(folder, image['file_name']): image for image in images.values()}
    absent = list(absent_files(list(files)))
    if absent:
        raise ValueError(
            f'{path} lists {len(files)} images, of which {len(absent)} are missing: {some(absent)}; the folder is '
            f'{folder}, {endings_in(folder)} (--train-images, --val-images)'
        )
    looked_at = chosen(list(files), _SAMPLED, every_image)
    if every_image:
        check_decodable(looked_at, load)
    for name in looked_at:
        stated, found = (files[name]['width'], files[name]['height']), size_of(name, load)
        if found not in (stated, None):
            raise ValueError(
                f'{path}: {name} is stated as {stated[0]} x {stated[1]} pixels, but is read as {found[0]} x {found[1]} '
                'after its EXIF orientation; annotate upright images, or read them as stored, in each split: '
                '--set train_dataloader.dataset.pipeline.0.color_type=color_ignore_orientation'
            )

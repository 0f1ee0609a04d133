"""Look at annotations in COCO's format, and at the images that they name, before mmdet reads them.

mmdet leaves out boxes, or raises an error without a name in the middle of a training, for what is named here at once.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mmengine.config import Config
from mmengine.registry import DATASETS

from swin_dense.utils.addresses import is_address
from swin_dense.workbench.configs.images import Images, absent_files, some
from swin_dense.workbench.configs.own_data import below, endings_in
from swin_dense.workbench.configs.parts import class_count

_TOLERANCE = 2.0  # pixels that a box may reach beyond its image without a note
# Models whose heads count something else than the classes of the data: any object, or the words of a text.
_OTHER_COUNTS = ('RPN', 'GroundingDINO', 'GLIP')


def look_at_coco(config: Config, dataset: Any, is_evaluated: bool, every_image: bool = False) -> list[str]:
    """Look at all annotations of a ``CocoDataset``, at all its file names, and at the sizes of a sample of its images.

    The default scope of mmengine must be that of the config. ``is_evaluated`` are data for validation or test, where
    pycocotools reads the annotations too. Return what was looked at, and what is odd but no error.

    Raises:
        ValueError: the annotations are not in COCO's format, do not fit the config, or would train a wrong model; or
            images are missing, damaged, or not of the size that the annotations state.
    """
    path = Path(dataset.get('data_root') or '', dataset.ann_file)
    content = read_coco(path)
    used = _check_categories(path, content['categories'], config, dataset)
    images = _check_images(path, content['images'])
    annotations = content.get('annotations') or []
    notes = []
    if annotations:
        steps = dataset.get('pipeline') or ()
        needs_masks = any(step.get('with_mask') for step in steps)
        _check_annotations(path, annotations, content, is_evaluated)
        kept = [annotation for annotation in annotations if annotation['category_id'] in used]
        if needs_masks:
            _check_masks(path, kept, images)
        notes = _check_boxes(path, kept, images, used, needs_masks)
        if is_evaluated and any(annotation['id'] == 0 for annotation in annotations):
            notes.append(f'{path}: pycocotools counts the annotation with the id 0 as never found; number from 1')
    elif not is_evaluated:
        raise ValueError(f'{path} has no annotations, so there is nothing to train with')
    load = next(iter(dataset.get('pipeline') or ()), {'type': 'LoadImageFromFile'})
    looked_at = _check_files(path, images, below(dataset, 'img'), Images(load, every_image))
    empty = len(images) - len({annotation['image_id'] for annotation in annotations})
    return [
        f'{path}: {len(images)} images, {empty} without annotations, {len(annotations)} annotations{looked_at}',
        *notes,
    ]


def read_coco(path: Path) -> Any:
    """Return the content of a file of annotations in the format of COCO."""
    if path.suffix != '.json' or path.is_dir():
        raise ValueError(
            f'{path} is no .json file, but annotations must be in the format of COCO; docs/predictions.md shows how to '
            'convert those of Pascal VOC (XML) and YOLO (txt)'
        )
    try:
        content = json.loads(path.read_bytes())
        for key, needed in (('images', ('id', 'file_name')), ('categories', ('id', 'name'))):
            for entry in content[key]:
                for name in needed:
                    hash(entry[name])  # raises if it is missing, or a list or dict
        return content
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        reason = f'{type(error).__name__}: {error}'
        raise ValueError(f'{path} cannot be read as COCO annotations ({reason})') from error


def _check_categories(path: Path, categories: Sequence[Any], config: Config, dataset: Any) -> dict[Any, str]:
    """Return the names of the categories that are classes, by their ids."""
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
            f'{path} has {len(found)} classes, {some(found)}, but the config has {len(classes)}, '
            f'{some(classes)}{model}; give those to train with, such as all of the file: '
            f'--classes "{",".join(map(str, found))}"'
        )
    used = {category['id']: category['name'] for category in categories if category['name'] in classes}
    names = [category['name'] for category in categories if category['name'] in classes]
    twice = [name for name, times in Counter(names).items() if times > 1]
    if twice:
        ids = [category['id'] for category in categories if category['name'] == twice[0]]
        raise ValueError(
            f'{path} has several categories of the name {twice[0]!r}, with the ids {", ".join(map(str, ids))}, so that '
            'mmdet would number the classes wrongly and train boxes as background; remove or rename the one without '
            'annotations (Roboflow writes such a category for the whole project)'
        )
    if len(used) < len(names):
        raise ValueError(f'{path} has several categories of the same id, among {some(c["id"] for c in categories)}')
    if names != list(classes):
        raise ValueError(
            f'{path} has the classes in the order {",".join(names)}, in which mmdet numbers them, but the config has '
            f'{",".join(classes)}, so that predictions would have wrong names; give them in the order of the file: '
            f'--classes "{",".join(names)}"'
        )
    return used


def _check_images(path: Path, entries: Sequence[Any]) -> dict[Any, Any]:
    """Return the images by their ids."""
    images = {image['id']: image for image in entries}
    if not images:
        raise ValueError(f'{path} lists no images')
    if len(images) < len(entries):
        ((twice, _),) = Counter(image['id'] for image in entries).most_common(1)
        raise ValueError(f'{path} has several images of the id {twice!r}; number them anew')
    for key in ('height', 'width'):
        faults = [
            f'image {image["file_name"]!r} has the {key} {image.get(key)!r}'
            for image in entries
            if type(image.get(key)) not in (int, float) or image[key] <= 0
        ]
        _refuse(path, faults, len(entries), 'write the sizes of the images in pixels')
    return images


def _refuse(path: Path, faults: Sequence[str], among: int, advice: str) -> None:
    """Raise an error that names the first fault and counts all of one kind."""
    if faults:
        raise ValueError(f'{path}: {faults[0]} ({len(faults)} of {among} are so); {advice}')


def _check_annotations(path: Path, annotations: Sequence[Any], content: Any, is_evaluated: bool) -> None:
    """Check the keys, ids and types of all annotations."""
    if any(not isinstance(annotation, dict) for annotation in annotations):
        raise ValueError(f'{path} cannot be read as COCO annotations (an annotation is no dict)')
    times = Counter(annotation.get('id') for annotation in annotations)
    images = {entry['id'] for entry in content['images']}
    categories = {entry['id'] for entry in content['categories']}
    lost = '(1 and "1" are different); mmdet would leave the annotation out without a word; correct or remove it'
    # What the value of a key must be, and how to mend another one.
    rules: dict[str, tuple[Callable[[Any], bool], str]] = {
        'id': (lambda value: times[value] == 1, 'number the annotations from 1, each differently'),
        'image_id': (images.__contains__, f'the ids of the images are {some(map(repr, images))} {lost}'),
        'category_id': (categories.__contains__, f'the ids are {some(map(repr, categories))} {lost}'),
        'bbox': (_is_box, 'write four numbers: x and y of the upper left corner, width, height'),
        'area': (_is_number, 'write a number; width times height of the box is enough'),
    }
    if is_evaluated:
        rules['id'] = (
            lambda value: times[value] == 1 and type(value) is int,
            'pycocotools needs whole numbers; number the annotations from 1, each differently',
        )
        rules['iscrowd'] = (lambda value: value is not None, 'write 0 for a single object')
    for key, (is_right, advice) in rules.items():
        faults = [
            f'annotation {one.get("id")!r} has the {key} {one.get(key)!r}'
            for one in annotations
            if not is_right(one.get(key))
        ]
        _refuse(path, faults, len(annotations), advice)


def _is_box(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 4 and all(map(_is_number, value))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _check_boxes(
    path: Path, annotations: Sequence[Any], images: Mapping[Any, Any], used: Mapping[Any, str], needs_masks: bool
) -> list[str]:
    """Check the boxes of the classes as mmdet reads them, and return notes on those that it leaves out."""
    if not annotations:
        raise ValueError(
            f'{path} has no annotation of the classes {",".join(map(str, used.values()))}; name others (--classes)'
        )
    boxes = np.array([annotation['bbox'] for annotation in annotations], float)
    shapes = [images[annotation['image_id']] for annotation in annotations]
    size = np.array([(image['width'], image['height']) for image in shapes], float)
    low, high = boxes[:, :2], boxes[:, :2] + boxes[:, 2:]
    if boxes.max() <= 1:
        raise ValueError(
            f'{path}: all boxes lie between 0 and 1, such as {annotations[0]["bbox"]}; mmdet would leave them out: '
            'multiply x and width by the width of the image, y and height by its height'
        )
    is_beyond = ((low < -_TOLERANCE) | (high > size + _TOLERANCE)).any(1)
    are_corners = ((boxes[:, 2:] > low) & (boxes[:, 2:] <= size + _TOLERANCE)).all()
    first = annotations[int(is_beyond.argmax())]
    image = images[first['image_id']]
    shape = f'{image["width"]} x {image["height"]}'
    example = f'{first["bbox"]} of annotation {first["id"]!r} in {image["file_name"]!r} ({shape})'
    if is_beyond.any() and are_corners:
        raise ValueError(
            f'{path}: {is_beyond.sum()} of {len(boxes)} boxes reach beyond their image, such as {example}, but none '
            'does as (x1, y1, x2, y2); write them as x, y, width, height'
        )
    reasons = {
        'lie outside of their image': (np.minimum(high, size) - np.maximum(low, 0) <= 0).any(1),
        'have an area of 0 or less': np.array([annotation['area'] for annotation in annotations], float) <= 0,
        'are narrower than a pixel': (boxes[:, 2:] < 1).any(1),
        "are marked 'ignore'": np.array([bool(annotation.get('ignore')) for annotation in annotations]),
        "are marked 'iscrowd'": np.array([bool(annotation.get('iscrowd')) for annotation in annotations]),
    }
    if needs_masks:
        masks = [one['segmentation'] for one in annotations]
        is_read = [not isinstance(mask, list) or any(map(_is_polygon, mask)) for mask in masks]
        reasons['have a mask of fewer than three points'] = ~np.array(is_read)
    is_left_out = np.any(list(reasons.values()), 0)
    why = ', '.join(f'{found.sum()} {reason}' for reason, found in reasons.items() if found.any())
    if is_left_out.all():
        raise ValueError(
            f'{path}: mmdet would leave out all {len(boxes)} boxes: {why}, such as '
            f'annotation {annotations[0]["id"]!r}; correct the annotations (CVAT marks masks that are painted as '
            'iscrowd)'
        )
    notes = []
    if is_left_out.any():
        share = 100 * is_left_out.mean()
        left_out = annotations[int(is_left_out.argmax())]
        notes.append(
            f'{path}: mmdet leaves out {share:.2g} % of the boxes: {why}, such as annotation {left_out["id"]!r}'
        )
    if is_beyond.any():
        notes.append(f'{path}: {is_beyond.sum()} of {len(boxes)} boxes reach beyond their image, such as {example}')
    kept = {
        annotation['category_id'] for annotation, is_out in zip(annotations, is_left_out, strict=True) if not is_out
    }
    rest = [name for key, name in used.items() if key not in kept]
    if rest:
        notes.append(f'{path}: no box of the classes {some(rest)}')
    return notes


def _is_polygon(numbers: Any) -> bool:
    """Return whether mmdet reads a polygon of a mask."""
    return len(numbers) >= 6 and len(numbers) % 2 == 0


def _check_masks(path: Path, annotations: Sequence[Any], images: Mapping[Any, Any]) -> None:
    no_masks = 'for boxes alone, use a recipe without masks: `swin-dense zoo --task detection`'
    if not any(annotation.get('segmentation') for annotation in annotations):
        raise ValueError(f'{path} has boxes without masks, but this recipe needs masks; {no_masks}')

    def fault(annotation: Any) -> str | None:
        mask, image = annotation.get('segmentation'), images[annotation['image_id']]
        if not mask:
            return "has no 'segmentation'"
        if isinstance(mask, list):
            return None if all(isinstance(polygon, list) for polygon in mask) else 'has a mask that is no list of lists'
        if not isinstance(mask, dict) or not {'size', 'counts'} <= set(mask):
            return "has a mask that is neither a list of polygons nor a dict with 'size' and 'counts'"
        size = [image['height'], image['width']]
        return None if list(mask['size']) == size else f'has a mask of the size {mask["size"]} in an image of {size}'

    faults = [f'annotation {one["id"]!r} {reason}' for one in annotations if (reason := fault(one))]
    advice = 'write polygons as [[x, y, x, y, ...]], or RLE of the size [height, width]'
    _refuse(path, faults, len(annotations), f'{advice}; {no_masks}')


def _check_files(path: Path, images: Mapping[Any, Any], folder: Path, looked_at: Images) -> str:
    """Check that all images exist, and the sizes of a sample; return what was looked at."""
    if is_address(str(folder)):
        return '; the images, which are at an address, were not looked at'
    files = {os.path.join(folder, image['file_name']): image for image in images.values()}
    absent = list(absent_files(list(files)))
    if len(absent) == len(files):
        first = next(iter(images.values()))['file_name']
        raise ValueError(
            f'{path} lists {len(files)} images, such as {first!r}, but none of them is in {folder}, '
            f'{endings_in(folder)}; set the folder of the images with --train-images and --val-images'
        )
    if absent:
        raise ValueError(
            f'{path} lists {len(files)} images, of which {len(absent)} are missing: {some(absent)}; add them, or '
            'remove them from the file'
        )
    sample = looked_at.sample(list(files))
    stated = {name: (files[name]['width'], files[name]['height']) for name in sample}
    sizes = looked_at.sizes(sample)
    wrong = [name for name in sample if sizes[name] != stated[name]]
    if wrong:
        name = wrong[0]
        width, height = stated[name]
        advice = 'write the sizes of the images, and boxes in their pixels'
        if sizes[name] == (height, width):
            advice = (
                'width and height are exchanged, or stated for the image before it is turned as its EXIF orientation '
                'says; annotate upright images or, if the boxes too are for the image as stored, read it so, in each '
                'split: --set train_dataloader.dataset.pipeline.0.color_type=color_ignore_orientation'
            )
        read_as = ' x '.join(map(str, sizes[name]))
        raise ValueError(
            f'{path}: {name} is stated as {width} x {height} pixels, but is read as {read_as} ({len(wrong)} of '
            f'{len(sample)} images looked at are wrong); {advice}'
        )
    how = 'decoded' if looked_at.every_image else 'read the headers of'
    return f'; all files exist, {how} {len(sample)}'

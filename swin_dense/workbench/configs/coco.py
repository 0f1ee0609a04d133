"""Look at annotations in COCO's format, and at the images that they name, before mmdet reads them.

mmdet leaves out boxes and images, or raises an error without a name in the middle of a training, and pycocotools counts
objects as missed, for what is named here at once.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from swin_dense.utils.addresses import is_address
from swin_dense.utils.checks import first_few
from swin_dense.workbench.configs.experiment import DataSet
from swin_dense.workbench.configs.images import check_images, endings_in, hint_on_name, other_size
from swin_dense.workbench.configs.segmentations import Mask, check_mask
from swin_dense.workbench.configs.stated import SPLIT_OF, encoding_of, read_coco, shown

_TOLERANCE = 2.0  # pixels that a box may reach beyond its image
_ROUNDING = 0.01  # pixels


def check_coco(data: DataSet, every_image: bool = False) -> list[str]:
    """Check all annotations of a ``CocoDataset``, all its file names, and the headers of a sample of its images.

    The default scope of mmengine must be that of the config. pycocotools reads the annotations for validation and test
    too. With ``every_image``, all images are decoded. Return what was looked at, and what is odd but no error; raise
    ValueError for what is one.
    """
    path, is_evaluated = Path(data.annotations), data.is_evaluated
    content = read_coco(path)
    unreadable = []
    if encoding_of(path) != 'utf-8':
        unreadable.append(f'is in {encoding_of(path)}, but mmdet reads UTF-8 without a byte order mark')
    if content.get('annotations', []) is None:
        unreadable.append('has "annotations": null, but pycocotools needs a list')
    if unreadable:
        raise ValueError(f'{path} {", and it ".join(unreadable)}; `swin-dense config` with --out writes a copy so')
    # Errors name the file that can be corrected.
    whole = content.get(SPLIT_OF)
    name = str(path)
    if isinstance(whole, str) and os.path.isfile(whole):
        name = f'{whole}, in the part {path.name}'
    entries, annotations = content['images'], content.get('annotations') or []
    images = {entry['id']: entry for entry in entries}
    used = _check_categories(name, content['categories'], data)
    wrong = [entry for entry in entries if not _are_numbers(entry, 'height', 'width')]
    if wrong:
        which = f'{len(wrong)} of {len(entries)} images are wrong, such as {shown(wrong[0])}'
        raise ValueError(f'{name}: {which}: write height and width in pixels')
    if len(images) < len(entries) or not images:
        raise ValueError(f'{name} has {len(entries)} images with {len(images)} ids; number them anew')
    if not annotations and not is_evaluated:
        raise ValueError(f'{name} has no annotations, so there is nothing to train with')
    metrics = str([evaluator.get('metric') for evaluator in data.evaluators])
    loads_masks = any(step.get('with_mask') for step in data.pipeline)
    needs_masks = loads_masks or (is_evaluated and 'segm' in metrics)
    masks = _check_annotations(name, annotations, images, content['categories'], is_evaluated, needs_masks)
    kept = [one for one in annotations if one['category_id'] in used]
    empty = len(images) - len({one['image_id'] for one in annotations})
    notes = [f'{len(images)} images, {empty} without annotations, {len(annotations)} annotations']
    unused = Counter(one['category_id'] for one in annotations if one['category_id'] not in used)
    if unused:
        names = {one['id']: one['name'] for one in content['categories']}
        others = first_few(f'{names[key]} ({count})' for key, count in unused.most_common())
        count = f'{unused.total()} of {len(annotations)} annotations'
        notes.append(f'{count} are not used, of categories that are no class: {others}')
    if kept:
        notes += _check_boxes(name, kept, images, used, is_evaluated)
    else:
        notes.append('no class has an annotation' + ', so COCO gives -1 for every figure' * is_evaluated)
    notes += _notes_on_masks(masks)
    notes += _count_images(name, data, images, {one['image_id'] for one in kept})
    of_evaluation = _check_evaluation(path, data, kept)
    notes += _check_files(name, images, data, every_image)
    return [f'{path}: {note}' for note in notes] + of_evaluation


def _check_categories(name: str, categories: Sequence[Any], data: DataSet) -> dict[Any, Any]:
    """Return the names of the categories that are classes, by id.

    The training data decide on the classes. Data to evaluate must have the same, or mmdet compares other classes.
    """
    found = [category['name'] for category in categories]
    is_own = bool((data.entry.get('metainfo') or {}).get('classes'))
    classes = data.classes or found
    count = data.experiment.class_count or len(classes)
    absent = [one for one in classes if one not in found]
    has_other_count = count != len(classes)
    if absent or has_other_count:
        differ = f'{name} has {len(found)} classes, {first_few(found)}, '
        differ += f'but the config has {len(classes)}, {first_few(classes)}'
        if has_other_count:
            differ += f', and a model of {count} classes'
        elif is_own:
            differ += _training_data(data, name)
            like = {str(one).strip().lower(): one for one in found}
            alike = {one: like.get(str(one).strip().lower()) for one in absent}
            pairs = [f'{other} to {one}' for one, other in alike.items() if other is not None]
            if data.is_evaluated:
                cure = f'add {first_few(absent)} there, also without an annotation'
                if pairs:
                    cure = f'rename {first_few(pairs)}'
                raise ValueError(
                    f'{differ}: to evaluate, the categories of this file must be those to train with, in their order '
                    f'({_quoted(classes)}); in it, {cure}'
                )
            if not pairs and {*found} < {*classes}:
                raise ValueError(
                    f'{differ}: add {first_few(absent)} to its categories, also without an annotation, in the order '
                    f'{_quoted(classes)}'
                )
        raise ValueError(f'{differ}; name those to train with, such as all of the file: {_as_option(name, found)}')
    used = [category for category in categories if category['name'] in classes]
    names = [category['name'] for category in used]
    ids = {category['id'] for category in used}
    if len(ids) < len(used) or len(set(names)) < len(used):
        raise ValueError(
            f'{name} has several categories of one name or id among {first_few(used)}, so that mmdet would number the '
            'classes wrongly; remove or rename the one without annotations (Roboflow writes one for the project)'
        )
    if names != list(classes):
        order = (
            f'{name} has the classes in the order {",".join(map(str, names))}, in which mmdet numbers them, but the '
            f'config has {",".join(map(str, classes))}'
        )
        if data.is_evaluated:
            raise ValueError(
                f'{order}{_training_data(data, name)}; sort the list of categories in this file so, with any ids '
                f'({_quoted(classes)})'
            )
        raise ValueError(f'{order}; give them in the order of the file: {_as_option(name, names)}')
    return {category['id']: category['name'] for category in used}


def _training_data(data: DataSet, name: str) -> str:
    """Return the words that name the file of the training data, if it is another than that of the given name."""
    files = [one.annotations for one in data.experiment.datasets_of(['train']) if one.annotations]
    return f', those of the training data in {files[0]}' if files and not name.startswith(files[0]) else ''


def _quoted(names: Sequence[Any]) -> str:
    return f'"{",".join(map(str, names))}"'


def _as_option(name: str, names: Sequence[Any]) -> str:
    """Return the command with these classes of a file, or with the file if their names are not plain words."""
    is_plain = all(isinstance(one, str) and ',' not in one and one == one.strip() for one in names)
    file = name.partition(', in the part ')[0]
    given = _quoted(names) if is_plain else f'"{file}"'
    return f'`swin-dense config ... --classes {given}`'


def _are_numbers(entry: Any, *keys: str) -> bool:
    return all(_is_number(entry.get(key)) for key in keys)


def _is_number(value: Any) -> bool:
    try:
        return type(value) in (int, float) and math.isfinite(value)
    except OverflowError:  # a whole number beyond a float
        return False


def _check_annotations(
    name: str,
    annotations: Sequence[Any],
    images: dict[Any, Any],
    categories: Sequence[Any],
    is_evaluated: bool,
    needs_masks: bool,
) -> list[Mask]:
    """Raise ValueError for annotations that mmdet or pycocotools cannot read, and return what was seen in masks."""
    known = {one['id'] for one in categories}
    times = Counter(one['id'] for one in annotations)
    masks: list[Mask] = []

    def fault(one: Any) -> str | None:
        if one['image_id'] not in images:
            return 'no image has this image_id (1 and "1" are different)'
        if one['category_id'] not in known:
            return 'no category has this category_id (1 and "1" are different)'
        box = one.get('bbox')
        is_box = isinstance(box, list) and len(box) == 4
        if not is_box or not all(_is_number(side) for side in box):
            return 'bbox must be x, y, width and height'
        if not _are_numbers(one, 'area'):
            return 'write the area; width times height is enough'
        if times[one['id']] > 1:
            return 'number the annotations from 1, each differently'
        if is_evaluated and type(one['id']) is not int:
            return 'pycocotools needs whole numbers as ids'
        if is_evaluated and one['id'] == 0:
            return (
                "number them from 1, because COCO's evaluation takes 0 for 'no match' and counts this object as missed"
            )
        if is_evaluated and one.get('iscrowd') is None:
            return 'write iscrowd, 0 for a single object'
        if needs_masks:
            mask = check_mask(one, images[one['image_id']], is_evaluated)
            masks.append(mask)
            return mask.fault
        return None

    faults = [(one, why) for one in annotations if (why := fault(one))]
    if faults:
        first, advice = faults[0]
        count = sum(why == advice for _, why in faults)
        raise ValueError(
            f'{name}: {count} of {len(annotations)} annotations are wrong, such as {shown(first)}: {advice}'
        )
    return masks


def _check_boxes(
    name: str, annotations: Sequence[Any], images: Any, used: dict[Any, Any], is_evaluated: bool
) -> list[str]:
    """Check the boxes of the classes as mmdet reads them, and return notes on those that it leaves out."""
    places = [one['bbox'] for one in annotations]
    boxes = np.array(places, float).reshape(-1, 4)
    sizes = []
    for one in annotations:
        image = images[one['image_id']]
        sizes.append((image['width'], image['height']))
    size = np.array(sizes, float).reshape(-1, 2)
    low = boxes[:, :2]
    high = low + boxes[:, 2:]
    within = np.minimum(high, size) - np.maximum(low, 0)
    is_crowd = np.array([bool(one.get('iscrowd')) for one in annotations])
    reasons = {
        'outside of their image': (within <= 0).any(1),
        'with an area of 0 or less': np.array([one['area'] for one in annotations], float) <= 0,
        'narrower than a pixel': (boxes[:, 2:] < 1).any(1),
        "marked 'ignore'": np.array([bool(one.get('ignore')) for one in annotations]),
        "marked 'iscrowd'": is_crowd,
    }
    is_left_out = np.any(list(reasons.values()), 0)
    counts = [f'{found.sum()} {reason}' for reason, found in reasons.items() if found.any()]
    why = ', '.join(counts)
    if is_left_out.all():
        raise ValueError(
            f'{name}: mmdet would leave out all {len(boxes)} boxes of the classes: {why}; write x, y, width and height '
            'in pixels, not as shares of the image (CVAT marks masks that are painted as iscrowd)'
        )
    beyond = np.maximum(-low, high - size).max(1)
    is_beyond = beyond > _TOLERANCE
    sides = boxes[:, 2:]
    are_corners = (sides > low) & (sides <= size + _TOLERANCE)
    if is_beyond.any() and are_corners.all():
        raise ValueError(
            f'{name}: {is_beyond.sum()} of {len(boxes)} boxes reach beyond their image, but none does as (x1, y1, x2, '
            'y2); write them as x, y, width, height'
        )
    notes = []
    is_counted = is_left_out & ~is_crowd
    if why:
        count = f'{is_left_out.sum()} of {len(boxes)} boxes ({100 * is_left_out.mean():.2g} %)'
        notes.append(f'mmdet does not train on {count}: {why}')
    if is_evaluated and is_counted.any():
        notes[-1] += f"; COCO's evaluation counts {is_counted.sum()} of them, all that are not marked 'iscrowd'"
    is_cut = beyond > _ROUNDING
    if is_cut.any():
        use = "COCO's evaluation compares them whole" if is_evaluated else 'mmdet cuts them at its edge'
        count = f'{is_cut.sum()} of {len(boxes)} boxes'
        notes.append(f'{count} reach beyond their image, by up to {beyond.max():.3g} pixels; {use}')
    kept = set()
    for one, is_out in zip(annotations, is_left_out, strict=True):
        if not is_out:
            kept.add(one['category_id'])
    without = [name for key, name in used.items() if key not in kept]
    if without:
        notes.append(f'{len(without)} of {len(used)} classes have no box: {first_few(without)}')
    return notes


def _notes_on_masks(masks: Sequence[Mask]) -> list[str]:
    """Return notes on polygons that mmdet leaves out, and on masks that reach beyond their box."""
    notes = []
    left_out = [mask.left_out for mask in masks if mask.left_out]
    if left_out:
        notes.append(
            f'mmdet leaves out {sum(left_out)} polygons of fewer than three points, or with an odd number of '
            f'coordinates, in {len(left_out)} of {len(masks)} masks'
        )
    beyond = [mask.beyond for mask in masks if mask.beyond]
    if beyond:
        notes.append(
            f'{len(beyond)} of {len(masks)} masks reach beyond their box, by up to {max(beyond):.3g} pixels; '
            'a box should hold its mask, because detectors such as Mask R-CNN learn only the part within'
        )
    return notes


def _count_images(name: str, data: DataSet, images: dict[Any, Any], with_boxes: set[Any]) -> list[str]:
    """Return a note on images that mmdet leaves out by ``filter_cfg`` and ``indices``; raise ValueError for all."""
    filters = data.entry.get('filter_cfg') or {}
    if data.entry.get('test_mode'):
        filters = {}
    side = filters.get('min_size', 0)
    indices = data.entry.get('indices')
    empty = small = 0
    for key, image in images.items():
        if filters.get('filter_empty_gt') and key not in with_boxes:
            empty += 1
        elif min(image['width'], image['height']) < side:
            small += 1
    left = len(images) - empty - small
    cure = f'--set {data.address}.filter_cfg'
    reasons = []
    if empty:
        reasons.append(f'{empty} without an annotation of the classes ({cure}.filter_empty_gt=False keeps them)')
    if small:
        reasons.append(f'{small} with a side below {side} pixels ({cure}.min_size=1 keeps them)')
    if indices is not None:
        number = abs(indices) if isinstance(indices, int) else len(indices)
        reasons.append(f'{max(0, left - number)} by indices={indices}')
        left = min(left, number)
    data.used_images = left
    if not reasons:
        return []
    if not left:
        raise ValueError(f'{name}: mmdet would leave out all {len(images)} images: {", ".join(reasons)}')
    used = f'mmdet uses {left} of {len(images)} images and leaves out {", ".join(reasons)}'
    if data.is_evaluated:
        used += f"; COCO's evaluation counts the objects of all images (--set {data.address}.test_mode=True keeps them)"
    return [used]


def _check_evaluation(path: Path, data: DataSet, annotations: Sequence[Any]) -> list[str]:
    """Return notes on objects that COCO's evaluation counts as missed whatever a model finds."""
    if not data.is_evaluated:
        return []
    notes = []
    for evaluator in data.evaluators:
        compared = evaluator.get('ann_file')
        if not compared or is_address(compared):
            continue
        if os.path.realpath(compared) != os.path.realpath(path):
            notes.append(
                f'{data.address} reads {path}, but its evaluator compares with {compared}: --set '
                f'{data.split}_evaluator.ann_file={path} compares with the same'
            )
    # The parts of a detector that limit what it returns; proposals do not.
    test_cfg = data.experiment.model.get('test_cfg') or {}
    parts = {'model.test_cfg': test_cfg}
    for key, part in test_cfg.items():
        if isinstance(part, dict) and key != 'rpn':
            parts[f'model.test_cfg.{key}'] = part
    limits = {}
    for address, part in parts.items():
        for key in ('max_per_img', 'max_per_image'):
            if isinstance(part.get(key), int):
                limits[f'{address}.{key}'] = part[key]
    counts = Counter(one['image_id'] for one in annotations if not one.get('iscrowd'))
    for address, limit in limits.items():
        crowded = [count for count in counts.values() if count > limit >= 0]
        if crowded:
            missed = sum(crowded) - limit * len(crowded)
            notes.append(
                f'{path}: {len(crowded)} of {len(counts)} images have more objects than the {limit} that the model '
                f'returns, so that {missed} count as missed: --set {address}={max(crowded)}'
            )
    return notes


def _check_files(name: str, images: Any, data: DataSet, every_image: bool) -> list[str]:
    """Check that the images exist and have the sizes of the annotations, and return notes on how they are loaded."""
    if is_address(data.images):
        return []
    folder = Path(data.images)
    files = {}
    for image in images.values():
        files[os.path.join(folder, image['file_name'])] = image
    samples = {}
    for file, image in files.items():
        size = {'height': image['height'], 'width': image['width']}
        samples[file] = {'img_path': file, 'img_id': image['id'], 'instances': [], **size}
    absent, looked_at, notes = check_images(list(files), data.loader, every_image=every_image, samples=samples)
    if absent:
        first = files[next(iter(absent))]['file_name']
        raise ValueError(
            f'{name} lists {len(files)} images, of which {len(absent)} are missing: {first_few(absent.values())}; the '
            f'folder is {folder}, {endings_in(folder)} (data_prefix.img){hint_on_name([folder], first)}'
        )
    stated = {}
    wrong = []
    for file, loaded in looked_at.items():
        stated[file] = (files[file]['width'], files[file]['height'])
        if loaded.size != stated[file]:
            wrong.append(file)
    if wrong:
        first = wrong[0]
        advice = 'annotate the image of this size, or write its size if only that is wrong'
        sizes = other_size(f'{first} is stated as', stated[first], 'is read', looked_at[first], advice)
        raise ValueError(f'{name}: {len(wrong)} of {len(looked_at)} images looked at have another size: {sizes}')
    return notes

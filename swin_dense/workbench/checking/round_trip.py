"""The round trip: what the annotations of a detector's data set state, and what the framework yields of them.

The framework builds the data set and loads some samples with its own pipeline. Objects are compared by file, class and
place; images by file. Nothing here says what a framework leaves out: words for that are in ``hints.py``, and a
difference without words is reported, too.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from swin_dense.utils.addresses import is_address
from swin_dense.utils.checks import first_few
from swin_dense.workbench.checking import hints
from swin_dense.workbench.checking.anchors import notes_on_anchors
from swin_dense.workbench.checking.classes import check_classes, plain
from swin_dense.workbench.checking.found import Found
from swin_dense.workbench.checking.images import check_images, other_size
from swin_dense.workbench.checking.readings import TOLERANCE, Places, check_places, places_of
from swin_dense.workbench.checking.samples import load_samples
from swin_dense.workbench.checking.stated import Source, StatedObject, needs_masks
from swin_dense.workbench.configs.coco import shown
from swin_dense.workbench.configs.experiment import DataSet
from swin_dense.workbench.configs.files import endings_in, hint_on_name

_ROUNDING = 0.01  # pixels
_NARROW = 0.5  # share of a box that the bounds of its mask fill at least
_NO_MASK = (
    'this recipe needs masks, as lists of polygons or RLE of the size of the image; use one without masks: `swin-dense '
    'zoo detection`'
)


@dataclass
class Trip:
    """The objects of a data set after the round trip; those of no class are not among them.

    Attributes:
        of_classes: the number of stated objects of the classes.
        lost: those that the framework does not yield.
        ignored: those that it yields, but not to train on.
        gained: objects that it yields although the annotations do not state them: (path, class, box).
        boxes: (path, class, box) of those that are trained on.
        unused: stated objects of other classes, by their names.
    """

    of_classes: int = 0
    lost: list[StatedObject] = field(default_factory=list)
    ignored: list[StatedObject] = field(default_factory=list)
    gained: list[tuple[str, Any, tuple[float, ...]]] = field(default_factory=list)
    boxes: list[tuple[str, Any, tuple[float, ...]]] = field(default_factory=list)
    unused: Counter[Any] = field(default_factory=Counter)


def check_objects(data: DataSet, source: Source | None, every_image: bool = False) -> Found:
    """Check a data set of a detector by the round trip, and all file names and a sample of its images.

    With ``every_image``, all images are decoded. The result has notes on the data and on anything unusual; ValueError
    is raised for errors. The default scope of mmengine must be that of the config.
    """
    if source is None:
        return Found([f'{data.address}: the annotations of a {data.kind} are not checked'])
    name = source.stated.name
    objects = list(source.stated.objects())
    if not source.stated.files:
        raise ValueError(f'{name} lists no images')
    classes = check_classes(source)
    wrong = [obj for obj in objects if obj.file == '' or obj.label is None]
    if wrong:
        key = 'image_id' if wrong[0].file == '' else 'category_id'
        section = 'image' if wrong[0].file == '' else 'category'
        count = f'{len(wrong)} of {len(objects)} annotations are wrong, such as {shown(wrong[0].entry)}'
        raise ValueError(f'{name}: {count}: no {section} has this {key} (1 and "1" are different)')
    empty = sum(not file.objects for file in source.stated.files.values())
    notes = [f'{len(source.loaded)} images, {empty} without annotations, {len(objects)} annotations']
    trip = compare(source, classes)
    places = places_of(source, [obj for obj in objects if obj.label in classes])
    notes_on_files = _check_files(source, every_image)
    check_places(source, places)  # after the sizes of images, which they must fit
    notes += _notes_on(trip, source, classes, len(objects))
    notes += _notes_on_places(source, trip, places)
    notes += _notes_on_repetitions(source)
    notes += _notes_on_masks(source, trip, places)
    notes += _notes_on_images(source)
    notes += notes_on_files
    samples = load_samples(source)
    if not data.is_evaluated:
        notes += notes_on_anchors(data.experiment, [box for _, _, box in trip.boxes], _scale_of(samples))
    files = frozenset(os.path.realpath(sample['img_path']) for sample in source.samples)
    return Found([f'{data.annotations or data.address}: {note}' for note in notes], len(source.samples), files, samples)


def compare(source: Source, classes: Sequence[Any]) -> Trip:
    """Return what became of the stated objects of a data set."""
    yielded: dict[str, dict[Any, list[bool]]] = defaultdict(lambda: defaultdict(list))
    names = dict(enumerate(source.built.metainfo.get('classes') or ()))
    for sample in source.loaded:
        for instance in sample.get('instances') or ():
            label = names.get(instance['bbox_label'], f'class number {instance["bbox_label"]}, which has no name')
            yielded[sample['img_path']][label, tuple(instance['bbox'])].append(bool(instance.get('ignore_flag')))
    trip = Trip()
    for file in source.stated.files.values():
        found, missed = yielded[file.path], []
        for obj in file.objects:
            if obj.label not in classes:
                trip.unused[obj.label] += 1
            elif found.get((obj.label, obj.box)):
                _add(trip, obj, obj.box, found[obj.label, obj.box].pop())
            else:
                missed.append(obj)
        for obj in missed:  # coordinates of VOC's files are rounded
            place = next((place for place, flags in found.items() if flags and _is_near(place, obj)), None)
            if place is None:
                trip.lost.append(obj)
            else:
                _add(trip, obj, place[1], found[place].pop())
        trip.gained += [(file.path, *place) for place, flags in found.items() for _ in flags]
    trip.of_classes = len(trip.boxes) + len(trip.ignored) + len(trip.lost)
    return trip


def _add(trip: Trip, obj: StatedObject, box: tuple[float, ...], is_ignored: bool) -> None:
    if is_ignored:
        trip.ignored.append(obj)
    else:
        trip.boxes.append((obj.file, obj.label, box))


def _is_near(place: tuple[Any, tuple[float, ...]], obj: StatedObject) -> bool:
    label, box = place
    return label == obj.label and all(abs(own - other) <= 1 for own, other in zip(box, obj.box, strict=True))


def _notes_on(trip: Trip, source: Source, classes: Sequence[Any], count: int) -> list[str]:
    """Return notes on objects that are lost, ignored or cut; raise ValueError if nothing right is left."""
    name, is_evaluated = source.stated.name, source.data.is_evaluated
    notes = _notes_on_names(trip, source, classes, count)
    if trip.gained:
        path, label, box = trip.gained[0]
        raise ValueError(
            f'{name}: the framework yields {len(trip.gained)} objects that are not stated, such as {label!r} at {box} '
            f'in {path}'
        )
    if not trip.of_classes:
        if not is_evaluated:
            none = f'{name}: none of {count} annotations is of a class, {first_few(classes)}'
            raise ValueError('; '.join([none, *notes]))
        return notes  # a perfect model says what that means for the evaluation
    reasons: dict[str, list[StatedObject]] = defaultdict(list)
    for obj in trip.lost:
        reasons[hints.why_left_out(obj, source.stated.files[obj.file].images[0])].append(obj)
    for obj in trip.ignored:
        reasons[hints.why_ignored(obj)].append(obj)
    why = ', '.join(f'{len(ones)} {reason}' for reason, ones in reasons.items())
    left_out = len(trip.lost) + len(trip.ignored)
    if not trip.boxes:
        most_common = max(reasons, key=lambda reason: len(reasons[reason]), default=hints.UNKNOWN)
        cure = hints.CURES.get(most_common, 'write boxes of a pixel or more within their images')
        raise ValueError(f'{name}: mmdet would leave out all {trip.of_classes} boxes of the classes: {why}; {cure}')
    unknown = reasons.get(hints.UNKNOWN)
    if unknown and type(source.built).__module__.startswith('mmdet.'):
        which = f'{len(unknown)} of {trip.of_classes} objects, such as {shown(unknown[0].entry)}'
        raise ValueError(f'{name}: the framework leaves out {which}, {hints.UNKNOWN}')
    if why:
        share = f'{left_out} of {trip.of_classes} boxes ({100 * left_out / trip.of_classes:.2g} %)'
        notes.append(f'mmdet does not train on {share}: {why}')
    present = {label for _, label, _ in trip.boxes}
    without = [label for label in classes if label not in present]
    if without:
        notes.append(f'{len(without)} of {len(classes)} classes have no box: {first_few(without)}')
    return notes


def _notes_on_names(trip: Trip, source: Source, classes: Sequence[Any], count: int) -> list[str]:
    """Return notes on names that are no class, and classes that may be one; raise ValueError for a wrong spelling."""
    notes = []
    of_plain = {plain(label): label for label in classes}
    if trip.unused:
        others = first_few(f'{label} ({number})' for label, number in trip.unused.most_common())
        notes.append(f'{trip.unused.total()} of {count} annotations are not used, of names that are no class: {others}')
    similar = [f'{label!r} for {of_plain[plain(label)]!r}' for label in trip.unused if plain(label) in of_plain]
    if similar:
        raise ValueError(
            f'{source.stated.name}: {notes[0]}; some differ from a class by case or spaces alone, '
            f'{first_few(similar)}: write the same name in the files and in {source.data.address}.metainfo.classes'
        )
    spellings = [f'{label!r} and {of_plain[plain(label)]!r}' for label in classes if of_plain[plain(label)] != label]
    if spellings and not source.data.is_evaluated:
        notes.append(
            f'the classes {first_few(spellings)} differ by case or spaces alone; if they are one, give their '
            'annotations one category'
        )
    return notes


def _notes_on_places(source: Source, trip: Trip, places: Places) -> list[str]:
    """Return a note on boxes beyond their image; raise ValueError for boxes without an area in training data."""
    flat = [(path, box) for path, _, box in trip.boxes if box[2] <= box[0] or box[3] <= box[1]]
    if flat and not source.data.is_evaluated:  # a perfect model says what they cost an evaluation
        _, (left, top, right, bottom) = flat[0]
        raise ValueError(
            f'{source.stated.name}: {len(flat)} of {trip.of_classes} boxes have no area, such as that from {left:g}, '
            f'{top:g} to {right:g}, {bottom:g} (counted from 0), so that losses would be NaN; write corners in pixels, '
            f'the smaller ones first, or remove them: {first_few(dict.fromkeys(path for path, _ in flat))}'
        )
    is_cut = places.beyond > _ROUNDING
    if not is_cut.any():
        return []
    count = f'{is_cut.sum()} of {len(is_cut)} boxes'
    use = 'the evaluation compares them whole' if source.data.is_evaluated else 'mmdet cuts them at its edge'
    return [f'{count} reach beyond their image, by up to {places.beyond.max():.3g} pixels; {use}']


def _notes_on_repetitions(source: Source) -> list[str]:
    """Return notes on files that several images name, and on objects that the training data state more than once.

    Raise ValueError for training on a file with other objects each time.
    """
    if source.data.is_evaluated:  # a perfect model says what they cost
        return []
    notes = []
    twice = [file for file in source.stated.files.values() if len(file.images) > 1]
    if twice:
        file = max(twice, key=lambda file: len(file.images))
        entries = sum(len(file.images) for file in source.stated.files.values())
        count = f'{entries} images name {len(source.stated.files)} files, such as {file.path} {len(file.images)} times'
        parts: dict[Any, set[Any]] = {image['id']: set() for image in file.images}
        for obj in file.objects:
            parts.setdefault(obj.entry.get('image_id'), set()).add((obj.label, obj.box))
        if len({frozenset(part) for part in parts.values()}) > 1:
            raise ValueError(
                f'{source.stated.name}: {count}, with other objects each time, so that a model learns to leave out '
                'what it is shown; give each image a file of its own, or all objects of a file to one image'
            )
        notes.append(count)
    repeated = sum(
        number - 1
        for file in source.stated.files.values()
        for number in Counter((obj.entry.get('image_id'), obj.label, obj.box) for obj in file.objects).values()
    )
    if repeated:
        total = sum(len(file.objects) for file in source.stated.files.values())
        notes.append(f'{repeated} of {total} annotations repeat another of the same image, class and place')
    return notes


def _notes_on_masks(source: Source, trip: Trip, places: Places) -> list[str]:
    """Return notes on turned rectangles and on masks beside their boxes; raise ValueError for those that are wrong."""
    notes = []
    objects = places.objects
    turned = [obj for obj in objects if hints.is_turned(obj)]
    if turned:
        notes.append(
            f'{len(turned)} of {len(objects)} boxes are of rectangles that were turned afterwards, such as '
            f'{shown(turned[0].entry)}: bbox is that before the turn; write the box around the turned rectangle '
            '(`swin-dense config` with --out writes a copy for those of CVAT)'
        )
    if not needs_masks(source.data) or not source.stated.categories:
        return notes
    lost = {id(obj) for obj in trip.lost}
    kept = np.array([id(obj) not in lost for obj in objects], bool)
    boxes, masks = places.boxes[kept], places.masks[kept]
    objects = [obj for obj, is_kept in zip(objects, kept, strict=True) if is_kept]
    box_sides, sides = boxes[:, 2:] - boxes[:, :2], masks[:, 2:] - masks[:, :2]
    faults = {
        _NO_MASK: np.isnan(masks).any(1),
        'the mask covers nothing: a polygon needs three points or more, in pixels': (sides <= 0).any(1),
        'the mask lies elsewhere than bbox; correct one of them': (
            np.maximum(masks[:, :2] - boxes[:, 2:], boxes[:, :2] - masks[:, 2:]) >= TOLERANCE
        ).any(1),
    }
    for fault, are_wrong in faults.items():
        if are_wrong.any():
            example = shown(objects[int(are_wrong.argmax())].entry)
            count = f'{are_wrong.sum()} of {len(masks)} annotations are wrong, such as {example}'
            raise ValueError(f'{source.stated.name}: {count}: {fault}')
    pieces = [sum(map(hints.is_no_polygon, obj.mask)) for obj in objects if isinstance(obj.mask, list)]
    if any(pieces):
        notes.append(
            f'mmdet leaves out {sum(pieces)} polygons of fewer than three points, or with an odd number of '
            f'coordinates, in {sum(map(bool, pieces))} of {len(masks)} masks'
        )
    beyond = np.maximum(boxes[:, :2] - masks[:, :2], masks[:, 2:] - boxes[:, 2:]).max(1)
    is_beyond = beyond > TOLERANCE
    if is_beyond.any():
        notes.append(
            f'{is_beyond.sum()} of {len(masks)} masks reach beyond their box, by up to {beyond.max():.3g} pixels; '
            'a box should hold its mask, because detectors such as Mask R-CNN learn only the part within'
        )
    filled = sides.prod(1) / box_sides.prod(1)
    is_narrow = ~is_beyond & (box_sides.min(1) > 2 * TOLERANCE) & (filled < _NARROW)
    if is_narrow.any():
        notes.append(
            f'the bounds of {is_narrow.sum()} of {len(masks)} masks fill less than half of their box, down to '
            f'{100 * filled[is_narrow].min():.2g} %: a box should end where its mask ends (those of another size of '
            'the image do not)'
        )
    return notes


def _notes_on_images(source: Source) -> list[str]:
    """Return a note on images that the data set leaves out, by the setting that its own filter needs for that."""
    built, data, total = source.built, source.data, len(source.loaded)
    if len(source.samples) == total:
        return []
    reasons, left = [], total
    settings = dict(built.filter_cfg or {})
    for number, (key, value) in enumerate(settings.items(), 1):
        built.filter_cfg, built.data_list = dict(list(settings.items())[:number]), list(source.loaded)
        kept = len(built.filter_data())
        if kept < left:
            why = hints.FILTERS.get(key, hints.Filter('by ' + key + '={value}', 'None'))
            cure = f'--set {data.address}.filter_cfg.{key}={why.cure} keeps them'
            reasons.append(f'{left - kept} {why.text.format(value=value)} ({cure})')
        left = kept
    built.filter_cfg, built.data_list = settings, source.samples
    if len(source.samples) < left:
        indices = data.entry.get('indices')
        reasons.append(
            f'{left - len(source.samples)} {"by" if indices is not None else "for a reason not known,"} '
            f'indices={indices}'
        )
    if not source.samples:
        raise ValueError(f'{source.stated.name}: mmdet would leave out all {total} images: {", ".join(reasons)}')
    return [f'mmdet uses {len(source.samples)} of {total} images and leaves out {", ".join(reasons)}']


def _check_files(source: Source, every_image: bool) -> list[str]:
    """Check that the images exist and have the sizes of the annotations, and return notes on how they are loaded."""
    of_path = {sample['img_path']: sample for sample in source.loaded}
    first = next(iter(of_path))
    if is_address(first):
        return []
    name, data = source.stated.name, source.data
    absent, looked_at, notes = check_images(list(of_path), data.loader, every_image=every_image, samples=of_path)
    if absent:
        gone = next(iter(absent))
        folder = Path(data.images) if source.stated.categories else Path(gone).parent
        written = source.stated.files[gone].images[0].get('file_name', '')
        hint = hint_on_name([folder], written)
        if not source.stated.categories:
            hint = (
                "; mmdet's data sets of Pascal VOC read names that end in .jpg; files of COCO's format can name others"
            )
        raise ValueError(
            f'{name} lists {len(of_path)} images, {len(absent)} of them missing: {first_few(absent.values())}; '
            f'the folder is {folder}, {endings_in(folder)} (data_prefix.img){hint}'
        )
    wrong = {}
    for path, loaded in looked_at.items():
        image = source.stated.files[path].images[0]
        stated = (image.get('width'), image.get('height'))
        if None not in stated and loaded.size != stated:
            wrong[path] = stated
    if wrong:
        path, stated = next(iter(wrong.items()))
        advice = 'annotate the image of this size, or write its size if only that is wrong'
        sizes = other_size(f'{path} is stated as', stated, 'is read', looked_at[path], advice)
        raise ValueError(f'{name}: {len(wrong)} of {len(looked_at)} checked images have another size: {sizes}')
    return notes


def _scale_of(samples: Sequence[Any]) -> float:
    """Return the median size of loaded images, divided by their own."""
    packed = [sample.get('data_samples') for sample in samples if isinstance(sample, dict)]
    factors = [sample.get('scale_factor') for sample in packed if sample is not None]
    return float(np.median([np.mean(factor) for factor in factors if factor is not None] or [1.0]))

"""Adapt a recipe to a user's own data: the layout of files, a split, classes, values of masks and endings of names."""

from __future__ import annotations

import colorsys
import contextlib
import itertools
import os
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swin_dense.images.listing import IMAGE_SUFFIXES
from swin_dense.utils import checks
from swin_dense.utils.addresses import is_address
from swin_dense.utils.checks import first_few
from swin_dense.workbench.configs.beside import share_of, split_annotations, split_names, write_beside, write_copies
from swin_dense.workbench.configs.coco import read_coco
from swin_dense.workbench.configs.experiment import (
    SPLITS,
    TEXT_MODELS,
    Experiment,
    dicts,
    framework_of,
    is_panoptic,
    loads_masks,
    mapped_values,
)
from swin_dense.workbench.configs.files import endings_in, hint_on_name
from swin_dense.workbench.configs.image_size import set_image_size
from swin_dense.workbench.configs.schedule import set_length
from swin_dense.workbench.configs.settings import merge_settings

_ROBOFLOW = '_annotations.coco.json'
# Folders of a data set for segmentation, in any case of letters; the last of each are those of Pascal VOC.
_IMAGES = ('images', 'image', 'imgs', 'img', 'jpegimages')
_MASKS = ('masks', 'mask', 'annotations', 'annotation', 'labels', 'label', 'segmentationclass')
_YOLO = re.compile(rb'\d+( [01]?\.\d+){4}')  # the first line of a file: a class, and a box or the points of a polygon
_COMPARED = 100  # number of images whose masks are searched for, to detect the ending of mask names
_GOLDEN_RATIO = 0.618034


@dataclass(frozen=True)
class OwnDataOptions:
    """What to change in a recipe, by the names of the options of `swin-dense config`; None is not given.

    Files and folders are relative to ``data_root``, or to the current folder if that does not contain them. Those for
    'val' also apply to the test data.
    """

    data_root: str | None = None
    train_ann: str | None = None
    val_ann: str | None = None
    train_images: str | None = None
    val_images: str | None = None
    train_masks: str | None = None
    val_masks: str | None = None
    val_share: float | None = None
    val_group: str | None = None
    classes: str | None = None
    mask_values: str | None = None
    ignore: str | None = None
    epochs: int | None = None
    iters: int | None = None
    image_size: int | None = None
    set: Sequence[str] = ()
    out: Path | None = None
    force: bool = False

    @property
    def places(self) -> dict[str, str]:
        """The given files and folders, by the names of their options."""
        names = [f'{part}_{kind}' for part in ('train', 'val') for kind in ('ann', 'images', 'masks')]
        given = {name: getattr(self, name) for name in names}
        return {name: place for name, place in given.items() if place is not None}

    @property
    def sets_length(self) -> bool:
        return self.epochs is not None or self.iters is not None


def adapt(experiment: Experiment, options: OwnDataOptions, stack: contextlib.ExitStack) -> list[str]:
    """Change a recipe in place for a user's own data, and for its length and settings, which win.

    In segmentation masks, the value of a pixel is the index of its class, and 255 is ignored. Without ``classes``, they
    are those of COCO or ADE20K. ``stack`` removes the files of a split if its block raises.

    Return what was found. Without options for places, the data of the recipe need not exist.

    Raises:
        FileNotFoundError: a given file or folder does not exist, or the folder has neither the layout of the recipe nor
            another.
        ValueError: an option does not fit the recipe or the data.
    """
    classes = None if options.classes is None else class_names(options.classes)
    places, reason, notes = _own_places(experiment, options, stack)
    if options.data_root is not None:
        replace_root(experiment, options.data_root)
    if places:
        _set_paths(experiment, options.data_root, places)
    if classes is not None:
        set_classes(experiment, classes)
    if options.sets_length:
        set_length(experiment, options.epochs, options.iters)
    if options.image_size is not None:
        checks.integer('--image-size', options.image_size)
        notes.append(set_image_size(experiment, options.image_size))
    if classes is not None or places:
        _forget_endings(experiment)
    merge_settings(experiment.config, options.set, only_read=True)
    experiment.check_form()
    framework_of(experiment.config)
    # After the settings, which number the steps of the recipe's pipelines.
    for option, text, change in (
        ('--mask-values', options.mask_values, map_values),
        ('--ignore', options.ignore, ignore_values),
    ):
        if text is not None:
            change(experiment, _numbers(option, text))
    if not experiment.is_detector:
        notes += _find_endings(experiment)
    elif options.out is not None:
        notes += write_copies(experiment, options.out, options.force, stack)
    absent = experiment.missing(SPLITS)
    if absent and (options.data_root is not None or places):
        cause = f'no other layout was found: {reason}' if reason else 'no options such as --val-ann name others'
        raise FileNotFoundError(f'there is no {", no ".join(absent)}, as the recipe expects, and {cause}')
    return notes


def _own_places(
    experiment: Experiment, options: OwnDataOptions, stack: contextlib.ExitStack
) -> tuple[dict[str, str], str, list[str]]:
    """Return the given or found files and folders, split if asked for, why none were found, and notes."""
    if options.val_group is not None and options.val_share is None:
        raise ValueError('--val-group keeps images of a group in one part of a split; give --val-share, too')
    _check_places(experiment, options)
    places, reason, notes = options.places, '', []
    if options.data_root is not None and not places:
        places, reason = find_places(experiment, options.data_root, options.val_share is not None)
        if places:
            notes.append(f'found {", ".join(places.values())} in {options.data_root}')
    if options.val_share is not None:
        places = split_data(places, options, reason, stack)
    return places, reason, notes


def _check_places(experiment: Experiment, options: OwnDataOptions) -> None:
    """Raise FileNotFoundError if a given folder or file does not exist, ValueError for masks of a detector."""
    root = options.data_root
    is_local = root is None or not is_address(root)
    if root is not None and is_local and not os.path.isdir(root):
        raise FileNotFoundError(f'there is no folder {root!r} (--data-root)')
    for name, place in options.places.items():
        option = '--' + name.replace('_', '-')
        if experiment.is_detector and name.endswith('masks'):
            raise ValueError(f'{option} is for segmentation, but this config is for a detector')
        if os.path.exists(_resolved(root or '', place)) or not is_local or is_address(place):
            continue
        if root is None:
            raise FileNotFoundError(f'there is no {place!r} ({option}) in the current folder')
        raise FileNotFoundError(
            f'there is no {place!r} ({option}), neither in {root} nor in the current folder; as for {root}, '
            f'{_content_of(Path(root))}'
        )


def _resolved(root: str | Path, place: str) -> Path:
    """Return the path of a given file or folder, which is below the data root or else in the current folder."""
    below = Path(root, place)
    return below if os.path.exists(below) else Path(place)


def _numbers(option: str, text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(',')]
    except ValueError:
        raise ValueError(f'{option} must be whole numbers such as 11 or 11,12, got {text!r}') from None


def class_names(text: str) -> list[Any]:
    """Return the names of classes in an option: a,b,c, or the path of a file.

    A .txt file has a name in each line. Of a .json file of annotations, all categories are taken. Both keep commas,
    spaces and numbers in names.
    """
    path = Path(text)
    if path.suffix in ('.json', '.txt') and not path.is_file():
        raise FileNotFoundError(f'--classes {text}: there is no such file')
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
    if found and 'val_ann' not in found and not is_split:
        raise ValueError(
            f'{root} has no validation data beside {", ".join(found.values())}; give --val-share 0.2 to take a fifth '
            'of these data, or the paths with --val-ann, --val-images and --val-masks'
        )
    return found, reason


def _annotated(root: Path) -> tuple[dict[str, str], str]:
    """Return the places of annotations in COCO's format and of their images, or {} and why there are none."""
    names = []
    for name in ('train', 'valid', 'val', 'test'):
        if (root / name / _ROBOFLOW).is_file():
            names.append(name)
    if 'train' in names:
        places = {'train_ann': f'train/{_ROBOFLOW}', 'train_images': 'train'}
        if len(names) > 1:
            places |= {'val_ann': f'{names[1]}/{_ROBOFLOW}', 'val_images': names[1]}
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
        none = f'{root} has no .json file of annotations, but {_content_of(root)}{_hint_on_format(root)}'
        return {}, '; '.join(reasons) or none
    file, content = next(iter(contents.items()))
    if not content['images']:
        return {}, f'{file} lists no images'
    first = content['images'][0]['file_name']
    folders = [root, *sorted(root.glob('*')), *sorted(root.glob('*/*'))]
    held = [folder for folder in folders if (folder / first).is_file()]
    if not held:
        hint = hint_on_name(folders, first)
        return {}, f'{file} names {first!r} first, which is in no folder below {root}: there, {_content_of(root)}{hint}'
    annotations = str(file.relative_to(root))
    images = str(held[0].relative_to(root))
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
    """Return the folders of images and of masks, or {} and why there are none."""
    folders = [path.name for path in root.iterdir() if path.is_dir()]
    names = {name.lower(): name for name in folders}
    images = [names[name] for name in _IMAGES if name in names]
    masks = [names[name] for name in _MASKS if name in names]
    if images and masks:
        return {'train_images': images[0], 'train_masks': masks[0]}, ''
    return {}, f'{root} has no folders such as images and masks, but {_content_of(root)}'


def _content_of(root: Path) -> str:
    """Describe what is in a folder, for a message."""
    entries = sorted(root.iterdir())
    if not entries:
        return 'it is empty'
    folders = first_few(f'{path.name}/' for path in entries if path.is_dir())
    return f'it has {folders or "no folders"}, {endings_in(root)}'


def split_data(
    places: Mapping[str, str], options: OwnDataOptions, reason: str, stack: contextlib.ExitStack
) -> dict[str, str]:
    """Split training data, found or given in ``places``, at random, and return the places of both parts.

    The split is always the same. Two files beside the config, ``options.out``, name the images of each part, with their
    annotations for detection, numbered from 1 if any number could not be evaluated. ``stack`` removes them if its block
    raises. ``reason`` says why no places were found.
    """
    if options.out is None:
        raise ValueError('--val-share needs --out, beside which it writes the images of each part')
    share = share_of(options.val_share)
    root = Path(options.data_root or '')
    if 'train_images' not in places or any(name.startswith('val') for name in places):
        raise ValueError(
            f'{reason}{"; " * bool(reason)}--val-share splits training data; give them, without validation data, in a '
            'layout that --data-root finds or with --train-images and --train-ann or --train-masks'
        )
    paths = {name: _resolved(root, place) for name, place in places.items()}
    folder = paths['train_images']
    if 'train_masks' in paths:
        ending = image_endings(folder).most_common()[0][0]
        texts = split_names(_names_below(folder, ending), share, options.val_group, options.out)
    else:
        texts = split_annotations(paths['train_ann'], str(folder), share, options.val_group, options.out)
    write_beside(texts, options.force, stack)
    train_file, val_file = (str(path.resolve()) for path in texts)
    same = {name.replace('train', 'val'): place for name, place in places.items()}
    return {**places, **same, 'train_ann': train_file, 'val_ann': val_file}


def replace_root(experiment: Experiment, data_root: str, splits: Sequence[str] = SPLITS) -> None:
    """Change every string that is the value of a dict's key and begins with the folder of the data sets of splits."""
    roots = {dataset.entry.get('data_root') or '' for dataset in experiment.datasets_of(splits)}
    if len(roots) != 1 or '' in roots:
        found = ', '.join(repr(root) for root in sorted(roots)) or 'no dataset'
        raise ValueError(
            f'the data root can be replaced only if all datasets of a config have the same, got {found}; '
            f'set them one by one, for example --set {splits[0]}_dataloader.dataset.data_root=DIR'
        )
    old = roots.pop()
    new = data_root.rstrip('/') + '/' * old.endswith('/')
    for part in experiment.parts():
        for key, item in list(part.items()):
            if isinstance(item, str) and item.startswith(old):
                part[key] = new + item.removeprefix(old)


def _set_paths(experiment: Experiment, data_root: str | None, places: Mapping[str, str]) -> None:
    """Set the given files and folders in data sets, and in evaluators that read annotations."""
    is_detector = experiment.is_detector
    keys = {'images': 'img_path', 'masks': 'seg_map_path'}
    if is_detector:
        keys = {'images': 'img'}
    if data_root is None:  # make all paths relative to the current folder, as the given places are
        for dataset in experiment.datasets:
            if dataset.annotations:
                dataset.entry.ann_file = dataset.annotations
            if 'data_prefix' in dataset.entry:
                dataset.entry.data_prefix = {key: dataset.folder(key) for key in dataset.entry.data_prefix}
            dataset.entry.data_root = ''
    for name, path in places.items():
        part, _, kind = name.partition('_')
        # A path that exists only in the current folder is made relative to the data root.
        if data_root is not None and os.path.exists(path):
            is_below = os.path.exists(os.path.join(data_root, path))
            path = path if is_below else os.path.relpath(path, data_root)
        splits = ('train',) if part == 'train' else ('val', 'test')
        for dataset in experiment.datasets_of(splits):
            if kind == 'ann':
                dataset.entry.ann_file = path
            else:
                dataset.entry.setdefault('data_prefix', {})[keys[kind]] = path
        for evaluator in dicts([experiment.config.get(f'{split}_evaluator') for split in splits]):
            if kind == 'ann' and 'ann_file' in evaluator:
                evaluator.ann_file = os.path.join(data_root or '', path)


def set_classes(experiment: Experiment, names: Sequence[str]) -> None:
    """Replace the classes of a config in heads, class weights of losses, and data sets."""
    classes = tuple(names)
    if '' in classes or len(set(classes)) < len(classes):
        raise ValueError(f'classes must be distinct names, got {",".join(map(str, classes))!r}')
    if not experiment.is_detector and len(classes) < 2:
        raise ValueError(f'a segmentor needs at least two classes, of which one may be background; got {classes[0]!r}')
    old_count = experiment.class_count
    if experiment.model.get('type') in TEXT_MODELS:
        old_count = experiment.model.bbox_head.num_classes
        _return_names(experiment)
    elif old_count is None:
        raise ValueError('no part of the model has num_classes, so its classes cannot be replaced')
    for part in dicts(experiment.model):
        if part.get('num_classes') == old_count:
            part['num_classes'] = len(classes)
        if is_panoptic(part):
            if part['num_stuff_classes']:
                raise ValueError(
                    'own classes are not supported for panoptic segmentation, whose data separate things and stuff; '
                    'use a recipe for instance or semantic segmentation: `swin-dense zoo instance`, '
                    '`zoo semantic`'
                )
            part['num_things_classes'] = len(classes)
        if 'class_weight' in part:
            part['class_weight'] = _class_weight(part['class_weight'], old_count, len(classes))
    for data in experiment.datasets:
        data.entry['metainfo'] = {'classes': classes, 'palette': make_palette(len(classes))}
    if experiment.is_detector:
        return
    # Masks are read unchanged, unlike those of ADE20K, where 0 is 'other' and classes start at 1.
    for data in experiment.datasets:
        data.entry['type'] = 'BaseSegDataset'
        data.entry['reduce_zero_label'] = False
    for part in experiment.parts():
        if part.get('type') == 'LoadAnnotations':
            part['reduce_zero_label'] = False


def _return_names(experiment: Experiment) -> None:
    """Make the data sets of a model that reads texts hand the names of their classes to it."""
    for data in experiment.datasets:
        keys = [step.get('meta_keys') or () for step in dicts(data.pipeline)]
        if data.kind != 'CocoDataset' or not any('text' in names for names in keys):
            why = f'is a {data.kind}, whose files have texts of their own'
            if data.kind == 'CocoDataset':
                why = 'hands no names of classes to the model (the meta_keys of its pipeline)'
            raise ValueError(
                f'own classes need data sets that name them to a {experiment.model.type}, but {data.address} {why}; '
                'take a recipe that fine-tunes on COCO: grounding_dino_swin-t_finetune_16xb2_1x_coco or '
                'glip_atss_swin-t_a_fpn_dyhead_16xb2_ms-2x_funtune_coco'
            )
        data.entry['return_classes'] = True


def map_values(experiment: Experiment, values: Sequence[int]) -> None:
    """Make every pipeline map mask values to class indices: the first value to class 0, and so on."""
    classes = _count_of_masks(experiment, '--mask-values')
    are_bytes = all(0 <= value <= 255 for value in values)
    if not are_bytes or len(values) != classes or len(set(values)) != classes:
        raise ValueError(
            f'--mask-values takes a different value from 0 to 255 for each class, here {classes}; got '
            f'{",".join(map(str, values))}'
        )
    _insert_step(experiment, {'type': 'MapMaskValues', 'values': list(values)})


def ignore_values(experiment: Experiment, values: Sequence[int]) -> None:
    """Make every pipeline map the given mask values to 255, which losses and metrics ignore."""
    classes = mapped_values(experiment.parts())
    if not classes:
        classes = range(_count_of_masks(experiment, '--ignore'))
    for value in values:
        if value in classes or not 0 <= value <= 255:
            raise ValueError(
                '--ignore takes mask values from 0 to 255 that are no class; the classes have the values '
                f'{", ".join(map(str, classes))}; got {value}'
            )
    _insert_step(experiment, {'type': 'IgnoreMaskValues', 'values': list(values)})


def _count_of_masks(experiment: Experiment, option: str) -> int:
    """Return the number of classes of a segmentor whose masks are the user's own."""
    if experiment.is_detector:
        raise ValueError(f'{option} is for segmentation masks, but this config is for a detector')
    if experiment.class_count is None or any(one.kind != 'BaseSegDataset' for one in experiment.datasets):
        raise ValueError(f'{option} needs masks of your own; name their classes with --classes')
    return experiment.class_count


def _insert_step(experiment: Experiment, step: dict[str, Any]) -> None:
    """Insert a transform before the masks are loaded in every pipeline, in place of one of its type."""
    for pipeline in experiment.pipelines():
        pipeline[:] = [part for part in pipeline if part.get('type') != step['type']]
        position = next(index for index, part in enumerate(pipeline) if loads_masks(part))
        pipeline.insert(position, step)


def _class_weight(weights: Any, old_count: int, count: int) -> Any:
    """Return the class weights of a loss for another number of classes; a last weight for 'no object' is kept."""
    if not isinstance(weights, (list, tuple)):
        return weights
    if len(set(weights[:old_count])) != 1:
        raise ValueError(
            f'a loss of this config has different weights for its {old_count} classes; in the config that you start '
            'from, set class_weight to a list for your classes or to None'
        )
    return [weights[0]] * count + list(weights[old_count:])


def make_palette(count: int) -> list[tuple[int, int, int]]:
    """Return well-separated RGB colours."""
    colours = []
    for index in range(count):
        hue = index * _GOLDEN_RATIO % 1
        red, green, blue = colorsys.hsv_to_rgb(hue, 0.75, 0.9)
        colours.append((round(255 * red), round(255 * green), round(255 * blue)))
    return colours


def _forget_endings(experiment: Experiment) -> None:
    """Remove the endings of the recipe's own data, which :func:`_find_endings` then detects anew."""
    for data in experiment.datasets if not experiment.is_detector else ():
        data.entry.pop('img_suffix', None)
        data.entry.pop('seg_map_suffix', None)


def _find_endings(experiment: Experiment) -> list[str]:
    """Detect and set the file name endings of a segmentor's own data sets, unless the config sets them.

    Return one message for each folder with images that will not be read, because they have another ending than most.
    """
    messages = []
    for data in experiment.datasets:
        if data.kind != 'BaseSegDataset':
            continue
        dataset = data.entry
        images, masks = Path(data.images), Path(data.masks)
        if images.is_dir() and 'img_suffix' not in dataset:
            (dataset.img_suffix, _), *others = image_endings(images).most_common()
            if others:
                unread = ', '.join(f'{count} {ending}' for ending, count in others)
                messages.append(f'in {images}, only images that end in {dataset.img_suffix} are read, not {unread}')
        if images.is_dir() and masks.is_dir() and 'seg_map_suffix' not in dataset:
            dataset.seg_map_suffix = _mask_ending(images, dataset.img_suffix, masks)
    return list(dict.fromkeys(messages))  # validation and test often have the same data


def image_endings(folder: Path) -> Counter[str]:
    """Count the images in a folder, searched recursively, by their ending; those that differ in case are an error."""
    found: Counter[str] = Counter()
    for path in folder.rglob('*.*'):
        if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file():
            found[path.suffix] += 1
    if not found:
        raise ValueError(f'no images found in {folder}, {endings_in(folder)}')
    _check_case(folder, 'images', found)
    return found


def _check_case(folder: Path, kind: str, endings: Counter[str]) -> None:
    """Raise ValueError if some names of files have the most frequent ending, and some that in another case."""
    (most, count), *others = endings.most_common()
    for ending, other in others:
        if ending.lower() == most.lower():
            files = f"find {shlex.quote(str(folder))} -type f -name '*{ending}'"
            rename = f'mv -n "$1" "${{1%{ending}}}{most}"'
            raise ValueError(
                f'in {folder}, {count} {kind} end in {most} and {other} in {ending}, but mmseg reads one ending; '
                f"rename the others: {files} -exec sh -c '{rename}' - {{}} ';'"
            )


def _names_below(folder: Path, ending: str) -> list[str]:
    """Return the paths in a folder, searched recursively, of the files with an ending, without that."""
    names = []
    for path in folder.rglob(f'*{ending}'):
        name = str(path.relative_to(folder))
        names.append(name.removesuffix(ending))
    return sorted(names)


def _mask_ending(images: Path, ending: str, masks: Path) -> str:
    """Return the ending that replaces the image ending in the names of masks, such as '_L.png'."""
    stems = _names_below(images, ending)
    names = sorted(str(path.relative_to(masks)) for path in masks.rglob('*.*'))
    found: Counter[str] = Counter()
    for stem in stems[:_COMPARED]:
        # The stem 'image1' also matches the mask of 'image10', but such wrong endings are less frequent.
        found.update(name.removeprefix(stem) for name in names if name.startswith(stem))
    if not found:
        example = f'images such as {stems[0]}{ending}' if stems else f'no images {ending}'
        raise ValueError(
            f'no image in {images} has a mask in {masks}, {endings_in(masks)}: a mask must have the name of its image, '
            f'except for the ending; got {example} and masks such as {", ".join(names[:3])}'
        )
    _check_case(masks, 'masks', found)
    return min(found, key=lambda rest: (-found[rest], len(rest)))

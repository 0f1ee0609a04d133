"""Adapt a recipe to a user's own data: the layout of files, a split, classes, values of masks and endings of names."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from swin_dense.utils import checks
from swin_dense.utils.addresses import is_address
from swin_dense.workbench.configs.beside import share_of, split_annotations, split_names, write_beside, write_copies
from swin_dense.workbench.configs.endings import find_endings, forget_endings, image_endings, names_below
from swin_dense.workbench.configs.experiment import SPLITS, Experiment, dicts, framework_of
from swin_dense.workbench.configs.image_size import set_image_size
from swin_dense.workbench.configs.layouts import content_of, find_places
from swin_dense.workbench.configs.own_classes import class_names, ignore_values, map_values, set_classes
from swin_dense.workbench.configs.schedule import set_length
from swin_dense.workbench.configs.settings import merge_settings


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
        forget_endings(experiment)
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
        notes += find_endings(experiment)
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
            f'{content_of(Path(root))}'
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
        texts = split_names(names_below(folder, ending), share, options.val_group, options.out)
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

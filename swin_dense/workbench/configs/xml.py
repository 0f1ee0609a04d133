"""Look at annotations in Pascal VOC's format, a file of XML for each image, before mmdet reads them."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from mmengine.registry import DATASETS

from swin_dense.utils.checks import first_few
from swin_dense.workbench.configs.experiment import DataSet
from swin_dense.workbench.configs.images import check_images, endings_in


def check_voc(data: DataSet, every_image: bool = False) -> list[str]:
    """Check all files of a data set of mmdet with its own parser, if they are Pascal VOC's; of others, only say so.

    The default scope of mmengine must be that of the config. With ``every_image``, all images are decoded. Return what
    was looked at, and what is odd but no error; raise ValueError for what is one.
    """
    from mmdet.datasets import XMLDataset

    kind = data.dataset_class
    if not (isinstance(kind, type) and issubclass(kind, XMLDataset)):
        return [f'{data.address}: the annotations of a {data.kind} are not looked at'] if data.kind else []
    built, samples = _parsed(data)
    name = data.annotations or data.address
    classes, count = built.metainfo['classes'], data.experiment.class_count
    if count not in (None, len(classes)):
        names = sorted({label for sample in samples for label in _labels(sample['xml_path'])})
        raise ValueError(
            f'{data.address} has {len(classes)} classes, {first_few(classes)}, but the model has {count}; set the '
            f'names, such as those in the files, with --set "{data.address}.metainfo.classes={names}", and num_classes '
            'of each head to their number'
        )
    files = [sample['img_path'] for sample in samples]
    absent, _, notes_on_images = check_images(files, data.loader, every_image=every_image)
    if absent:
        folder = Path(files[0]).parent
        raise ValueError(
            f'{name} lists {len(samples)} images, of which {len(absent)} are missing: {first_few(absent.values())}; '
            f'mmdet reads names that end in .jpg, in {folder}, {endings_in(folder)}; annotations in the format of COCO '
            'can name other images: docs/own-data.md shows how to convert'
        )
    stated: Counter[str] = Counter()
    used: Counter[str] = Counter()
    for sample in samples:
        stated.update(_labels(sample['xml_path']))
        used.update(classes[one['bbox_label']] for one in sample['instances'])
    others = stated.copy()
    for label in classes:
        del others[label]
    notes = [f'{len(samples)} images, {stated.total()} objects']
    unused = f'of names that are no class: {first_few(f"{label} ({number})" for label, number in others.most_common())}'
    if not used and not data.is_evaluated:
        raise ValueError(
            f'{name}: none of the {stated.total()} objects in {len(samples)} files, such as '
            f'{samples[0]["xml_path"]}, is of a class, {first_few(classes)}{f", but {unused}" if others else ""}; '
            'mmdet compares names to the letter'
        )
    if others:
        notes.append(f'{others.total()} of {stated.total()} objects are not used, {unused}')
    _check_boxes(samples)
    without = [label for label in classes if label not in used]
    if without:
        notes.append(f'{len(without)} of {len(classes)} classes have no box: {first_few(without)}')
    difficult = sum(one['ignore_flag'] for sample in samples for one in sample['instances'])
    if difficult:
        notes.append(f"mmdet does not train on {difficult} of {used.total()} boxes, those marked 'difficult'")
    built.data_list = samples
    kept = len(built.filter_data())
    if data.entry.get('indices') is None:
        data.used_images = kept
    if kept < len(samples):
        left_out = f'{len(samples) - kept} of {len(samples)} images, by filter_cfg={dict(data.entry.filter_cfg)}'
        if not kept:
            raise ValueError(f'{name}: mmdet would leave out {left_out}: look at <size> in {samples[0]["xml_path"]}')
        notes.append(f'mmdet leaves out {left_out}')
    return [f'{name}: {note}' for note in notes + notes_on_images]


def _parsed(data: DataSet) -> tuple[Any, list[Any]]:
    """Return the data set of mmdet, and what it reads for each image; raise ValueError that names a file."""
    built = DATASETS.build({**data.entry, 'pipeline': [], 'lazy_init': True})
    parse = built.parse_data_info

    def parse_or_name(entry: Any) -> Any:
        try:
            return parse(entry)
        except Exception as error:  # mmdet asks for the text of elements that are not there, and for whole numbers
            raise ValueError(
                f'{data.address}: mmdet cannot read {entry["xml_path"]} ({type(error).__name__}: {error}); it needs '
                'size with width and height, and for each object name and bndbox with xmin, ymin, xmax, ymax'
            ) from error

    built.parse_data_info = parse_or_name
    samples = built.load_data_list()
    if not samples:
        raise ValueError(f'{data.annotations} lists no images')
    return built, samples


def _labels(path: str) -> list[str]:
    objects = ElementTree.parse(path).iter('object')
    return [entry.findtext('name', '') for entry in objects]


def _check_boxes(samples: list[Any]) -> None:
    """Raise ValueError for boxes without an area, on which mmdet would train to losses that are no numbers."""
    places = []
    for sample in samples:
        places += [(sample['xml_path'], one['bbox']) for one in sample['instances']]
    boxes = np.array([box for _, box in places]).reshape(-1, 4)
    is_wrong = (boxes[:, 2:] <= boxes[:, :2]).any(1)
    wrong = np.flatnonzero(is_wrong)
    if len(wrong):
        path, (left, top, right, bottom) = places[wrong[0]]
        raise ValueError(
            f'{len(wrong)} of {len(places)} boxes have no area, such as that from {left}, {top} to {right}, {bottom} '
            f'in {path} (counted from 0); write corners in pixels, the smaller ones as xmin and ymin'
        )

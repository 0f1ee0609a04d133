"""Give a recipe a user's own classes, and their values in masks."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swin_dense.workbench.configs.coco import read_coco
from swin_dense.workbench.configs.experiment import (
    TEXT_MODELS,
    Experiment,
    dicts,
    is_panoptic,
    loads_masks,
    mapped_values,
)

_GOLDEN_RATIO = 0.618034


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
    if experiment.class_count is None or any(data.kind != 'BaseSegDataset' for data in experiment.datasets):
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

"""Set a user's classes in all heads, losses and data sets of a config."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from typing import Any

from swin_dense.workbench.configs.experiment import Experiment, dicts, is_panoptic, pipelines

_GOLDEN_RATIO = 0.618034


def set_classes(experiment: Experiment, names: Sequence[str]) -> None:
    """Replace the classes of a config in heads, class weights of losses, and data sets."""
    is_detector = experiment.is_detector
    classes = tuple(names)
    if '' in classes or len(set(classes)) < len(classes):
        raise ValueError(f'classes must be distinct names, got {",".join(map(str, classes))!r}')
    if not is_detector and len(classes) < 2:
        raise ValueError(f'a segmentor needs at least two classes, of which one may be background; got {classes[0]!r}')
    old_count = experiment.class_count
    if old_count is None:
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
    for dataset in [one.entry for one in experiment.datasets]:
        dataset['metainfo'] = {'classes': classes, 'palette': make_palette(len(classes))}
        if not is_detector:  # read masks unchanged, unlike those of ADE20K, where 0 is 'other' and classes start at 1
            dataset['type'] = 'BaseSegDataset'
            dataset['reduce_zero_label'] = False
    for part in [] if is_detector else dicts(list(experiment.config.values())):
        if part.get('type') == 'LoadAnnotations':
            part['reduce_zero_label'] = False


def map_values(experiment: Experiment, values: Sequence[int]) -> None:
    """Make every pipeline map mask values to class indices: the first value to class 0, and so on."""
    classes = _count_of_masks(experiment, '--mask-values')
    if len(set(values)) != classes or len(values) != classes or not all(0 <= value <= 255 for value in values):
        raise ValueError(
            f'--mask-values takes a different value from 0 to 255 for each class, here {classes}; got '
            f'{",".join(map(str, values))}'
        )
    _insert_step(experiment, {'type': 'MapMaskValues', 'values': list(values)})


def ignore_values(experiment: Experiment, values: Sequence[int]) -> None:
    """Make every pipeline map the given mask values to 255, which losses and metrics ignore."""
    classes = mapped_values(list(experiment.config.values())) or range(_count_of_masks(experiment, '--ignore'))
    for value in values:
        if value in classes or not 0 <= value <= 255:
            raise ValueError(
                '--ignore takes mask values from 0 to 255 that are no class; the classes have the values '
                f'{", ".join(map(str, classes))}; got {value}'
            )
    _insert_step(experiment, {'type': 'IgnoreMaskValues', 'values': list(values)})


def mapped_values(part: Any) -> Sequence[int] | None:
    """Return the mask values of the classes, if a part of a config maps them."""
    return next((step['values'] for step in dicts(part) if step.get('type') == 'MapMaskValues'), None)


def _count_of_masks(experiment: Experiment, option: str) -> int:
    """Return the number of classes of a segmentor whose masks are the user's own."""
    if experiment.is_detector:
        raise ValueError(f'{option} is for segmentation masks, but this config is for a detector')
    if experiment.class_count is None or any(one.kind != 'BaseSegDataset' for one in experiment.datasets):
        raise ValueError(f'{option} needs masks of your own; name their classes with --classes')
    return experiment.class_count


def _insert_step(experiment: Experiment, step: dict[str, Any]) -> None:
    """Insert a transform before the masks are loaded in every pipeline, in place of one of its type."""
    for pipeline in pipelines(list(experiment.config.values())):
        pipeline[:] = [part for part in pipeline if part.get('type') != step['type']]
        kinds = [part.get('type') for part in pipeline]
        # Test-time augmentation loads masks inside of a step.
        position = kinds.index('LoadAnnotations') if 'LoadAnnotations' in kinds else 1
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


def make_palette(count: int) -> list[tuple[int, ...]]:
    """Return well-separated RGB colours."""
    hues = [index * _GOLDEN_RATIO % 1 for index in range(count)]
    return [tuple(round(255 * part) for part in colorsys.hsv_to_rgb(hue, 0.75, 0.9)) for hue in hues]

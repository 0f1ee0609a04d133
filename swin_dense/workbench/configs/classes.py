"""Set a user's classes in all heads, losses and data sets of a config."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from swin_dense.workbench.configs.parts import class_count, datasets, dicts, is_panoptic, pipelines

if TYPE_CHECKING:
    from mmengine.config import Config

_GOLDEN_RATIO = 0.618034


def set_classes(config: Config, names: Sequence[str]) -> None:
    """Replace the classes of a config in heads, class weights of losses, and data sets.

    Raises:
        ValueError: the names are too few or not distinct, or the config does not support other classes.
    """
    is_detector = config.default_scope == 'mmdet'
    classes = _checked(names, is_detector)
    old_count = class_count(config.model)
    for part in dicts(config.model):
        if part.get('num_classes') == old_count:
            part['num_classes'] = len(classes)
        if is_panoptic(part):
            if part['num_stuff_classes']:
                raise ValueError(
                    'own classes are not supported for panoptic segmentation, whose data separate things and stuff; '
                    'use a recipe for instance or semantic segmentation: `swin-dense zoo --task instance`, '
                    '`--task semantic`'
                )
            part['num_things_classes'] = len(classes)
        if 'class_weight' in part:
            part['class_weight'] = _class_weight(part['class_weight'], old_count, len(classes))
    for dataset in datasets(config):
        dataset['metainfo'] = {'classes': classes, 'palette': _palette(len(classes))}
        if not is_detector:  # read masks unchanged, unlike those of ADE20K, where 0 is 'other' and classes start at 1
            dataset['type'] = 'BaseSegDataset'
            dataset['reduce_zero_label'] = False
    for part in [] if is_detector else dicts(list(config.values())):
        if part.get('type') == 'LoadAnnotations':
            part['reduce_zero_label'] = False


def ignore_values(config: Config, values: Sequence[int]) -> None:
    """Make every pipeline map the given mask values to 255, which losses and metrics ignore.

    Raises:
        ValueError: the masks are not of a user's own classes, or a value is a class index.
    """
    if config.default_scope == 'mmdet':
        raise ValueError('--ignore is for segmentation masks, but this config is for a detector')
    if any(dataset.get('type') != 'BaseSegDataset' for dataset in datasets(config)):
        raise ValueError('--ignore needs masks of your own; name their classes with --classes')
    classes = class_count(config.model)
    for value in values:
        if not classes <= value <= 255:
            raise ValueError(f'--ignore takes mask values that are no class, here {classes} to 255; got {value}')
    step = {'type': 'IgnoreMaskValues', 'values': list(values)}
    for pipeline in pipelines(list(config.values())):
        if len(pipeline) > 1 and pipeline[1].get('type') == step['type']:
            pipeline[1] = step
        else:
            pipeline.insert(1, step)


def _class_weight(weights: Any, old_count: int, count: int) -> Any:
    """Return the class weights of a loss for another number of classes; a last weight for 'no object' is kept.

    Raises:
        ValueError: the previous classes have different weights.
    """
    if not isinstance(weights, (list, tuple)):
        return weights
    if len(set(weights[:old_count])) != 1:
        raise ValueError(
            f'a loss of this config has different weights for its {old_count} classes; in the config that you start '
            'from, set class_weight to a list for your classes or to None'
        )
    return [weights[0]] * count + list(weights[old_count:])


def _checked(classes: Sequence[str], is_detector: bool) -> tuple[str, ...]:
    names = tuple(name.strip() for name in classes)
    if not all(names) or len(set(names)) < len(names):
        raise ValueError(f'classes must be distinct names, got {",".join(names)!r}')
    if not is_detector and len(names) < 2:
        raise ValueError(f'a segmentor needs at least two classes, of which one may be background; got {names[0]!r}')
    return names


def _palette(count: int) -> list[tuple[int, ...]]:
    """Return ``count`` well-separated RGB colours."""
    hues = ((index * _GOLDEN_RATIO) % 1 for index in range(count))
    return [tuple(round(255 * part) for part in colorsys.hsv_to_rgb(hue, 0.75, 0.9)) for hue in hues]

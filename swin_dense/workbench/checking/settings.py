"""Check settings of a config that no framework checks: channels, windows, names of classes, frozen stages, metrics."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from mmengine.registry import MODELS

from swin_dense.mm import SwinDense
from swin_dense.workbench.configs.experiment import Experiment, dicts

_HEADS = ('decode_head', 'auxiliary_head', 'panoptic_head')  # those that read the backbone if there is no neck
_PADDING = ('Pad', 'ResizeToMultiple')  # transforms that record the size of the padded image


def check_channels(experiment: Experiment) -> None:
    """Raise ValueError if a neck or a head expects other channels than a backbone of this package returns."""
    channels = _returned(experiment)
    if channels is None:
        return
    wrong, settings = [], []
    names = ('neck',) if experiment.model.get('neck') else _HEADS
    for name in names:
        parts = experiment.model.get(name)
        is_list = isinstance(parts, list)
        for index, part in enumerate(parts if is_list else [parts]):
            # Of several necks, only the first reads the backbone.
            if not isinstance(part, dict) or 'in_channels' not in part or (name == 'neck' and index):
                continue
            expected, given = _expected(part, channels), part['in_channels']
            if expected == (given if isinstance(given, int) else list(given)):
                continue
            place = f'model.{name}.{index}' if is_list else f'model.{name}'
            numbers = expected if isinstance(expected, list) else [expected]
            wrong.append(f'{place}.in_channels is {given}')
            settings.append(f'{place}.in_channels={",".join(map(str, numbers))}')
    if wrong:
        maps = ', '.join(map(str, channels))
        raise ValueError(
            f'{", ".join(wrong)}, but the maps of the backbone have {maps} channels; add --set {" ".join(settings)}'
        )


def _returned(experiment: Experiment) -> list[int] | None:
    """Return the channels of each map of the backbone, or None if it is of another package."""
    backbone = experiment.model.get('backbone')
    if not isinstance(backbone, dict) or not backbone.get('type'):
        return None
    with MODELS.switch_scope_and_registry(experiment.scope or 'mmengine') as registry:
        kind = registry.get(backbone['type'])
        if not (isinstance(kind, type) and issubclass(kind, SwinDense)):
            return None
        with torch.device('meta'):
            built = registry.build(backbone)
    return None if built.output_missing_index_as_none else list(built.out_channels)


def _expected(part: Any, channels: list[int]) -> Any:
    selected = part.get('in_index')
    try:
        if isinstance(part['in_channels'], int):
            return channels[-1 if selected is None else selected]
        return channels if selected is None else [channels[index] for index in selected]
    except IndexError:
        raise ValueError(
            f'in_index={selected} of {part.get("type")} selects maps that the backbone does not return; it returns '
            f'{len(channels)}, those of model.backbone.out_indices'
        ) from None


def check_prediction(experiment: Experiment) -> None:
    """Raise ValueError for a segmentor that cannot predict in windows as ``model.test_cfg`` says."""
    model = experiment.model.get('module') or experiment.model  # that of test-time augmentation
    windows = model.get('test_cfg') or {}
    if experiment.scope != 'mmseg' or windows.get('mode') != 'slide':
        return
    crop: Any = windows.get('crop_size')
    stride: Any = windows.get('stride')
    are_pairs = _is_pair(crop) and _is_pair(stride)
    fits = are_pairs and 0 < stride[0] <= crop[0] and 0 < stride[1] <= crop[1]
    if not fits:
        raise ValueError(
            "model.test_cfg.mode='slide' needs the height and width of its windows and the steps between them, which "
            f'may not be larger; got crop_size={crop} and stride={stride}: give, for example, --set '
            'model.test_cfg.crop_size=512,512 model.test_cfg.stride=341,341'
        )
    heads = [part.get('type') for part in dicts(model.get('decode_head'))]
    if 'Mask2FormerHead' in heads:
        _check_padding(experiment, model)


def _check_padding(experiment: Experiment, model: Any) -> None:
    """Raise ValueError if images are padded, as Mask2FormerHead resizes the masks of a window to the padded image."""
    padding = (model.get('data_preprocessor') or {}).get('test_cfg')
    steps = []
    for data in experiment.datasets_of(('val', 'test')):
        for index, step in enumerate(data.pipeline):
            if step.get('type') in _PADDING:
                steps.append(f'{data.address}.pipeline.{index} ({step["type"]})')
    cures = []
    if padding:
        cures.append(
            f'add --set model.data_preprocessor.test_cfg=None, which is {dict(padding)} (a SwinDense takes images of '
            'any size)'
        )
    if steps:
        cures.append(f'remove {", ".join(steps)} from the config')
    if cures:
        raise ValueError(
            "model.test_cfg.mode='slide' does not work with mmseg's Mask2FormerHead if images are padded, because it "
            f'gives the masks of each window the size of the whole image; {"; ".join(cures)}'
        )


def _is_pair(value: Any) -> bool:
    if not isinstance(value, (list, tuple)):
        return False
    return len(value) == 2 and all(isinstance(item, int) for item in value)


def check_names(experiment: Experiment, splits: Sequence[str]) -> None:
    """Raise ValueError for a text in place of a list of classes: the frameworks take each letter for a name."""
    for data in experiment.datasets_of(splits):
        classes = (data.entry.get('metainfo') or {}).get('classes')
        if isinstance(classes, str) and not os.path.isfile(classes):
            names = [name.strip() for name in classes.split(',') if name.strip()]
            raise ValueError(
                f'{data.address}.metainfo.classes is the text {classes!r}, of which each letter would be a class; give '
                f'a list, also of one name: --set "{data.address}.metainfo.classes={names}"'
            )


def notes_on_classes(experiment: Experiment, splits: Sequence[str], trained: Sequence[str] = ()) -> list[str]:
    """Return notes on data sets whose classes have other names than those of the checkpoint, or of the training data.

    A model and its evaluation compare the numbers of classes, never the names. Raise ValueError for the same names in
    another order.
    """
    if experiment.class_count is None:  # a model of texts, which may have other classes in each data set
        return []
    named = [('the checkpoint', tuple(trained))] if trained else []
    compared = splits if trained else ('train', *splits)
    named += [(data.address, data.classes) for data in experiment.datasets_of(compared) if data.classes]
    notes = []
    for place, classes in named[1:]:
        first_place, first = named[0]
        if classes == first or len(classes) != len(first):
            continue
        pairs = enumerate(zip(classes, first, strict=True))
        number, (own, other) = next((index, pair) for index, pair in pairs if pair[0] != pair[1])
        differs = f'class {number}, counted from 0, is {own!r} in {place}, but {other!r} in {first_place}'
        if set(classes) == set(first):
            raise ValueError(
                f'{differs}: a model knows only the numbers of classes, so it would exchange them; give both the '
                'same order, in metainfo.classes and in the categories of files of annotations'
            )
        notes.append(f'{differs}; the model takes them for one class')
    return notes


def notes_on_frozen_stages(experiment: Experiment) -> list[str]:
    """Return a note if a training freezes stages of the backbone that no checkpoint is loaded into."""
    config, model = experiment.config, experiment.model
    backbone = model.get('backbone')
    if not isinstance(backbone, dict):
        return []
    frozen = backbone.get('frozen_stages')
    sources = (backbone.get('init_cfg'), backbone.get('pretrained'), model.get('init_cfg'))
    if not isinstance(frozen, int) or frozen < 0 or any(sources) or config.get('load_from') or config.get('resume'):
        return []
    return [
        f'model.backbone.frozen_stages={frozen}, but no checkpoint is loaded, so that the frozen stages stay random; '
        'train all with --set model.backbone.frozen_stages=-1, or load weights with init_cfg or load_from'
    ]


def notes_on_evaluators(experiment: Experiment, splits: Sequence[str]) -> list[str]:
    """Return notes on figures of single classes that a metric of mmdet stores under one name for boxes and masks."""
    notes = []
    for data in experiment.datasets_of([split for split in splits if split != 'train']):
        for part in data.evaluators:
            metrics = part.get('metric') or []
            if part.get('classwise') and not isinstance(metrics, str) and len(metrics) > 1:
                notes.append(
                    f'{data.split}_evaluator: the logged figures of single classes are those of {metrics[-1]} alone, '
                    f'as {part.type} gives those of {" and ".join(metrics)} the same names; for all, make it a list of '
                    f"one metric each, with metric='{metrics[0]}', prefix='{metrics[0]}' and so on"
                )
    return notes

"""Check configs and data before training or testing, for errors that would otherwise appear late or not at all.

The parts of a model must take the maps that its backbone returns, and the data must be there and be what they seem.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from mmengine.registry import MODELS

from swin_dense.mm import SwinDense
from swin_dense.utils.addresses import is_address
from swin_dense.workbench.building import check_packages
from swin_dense.workbench.configs.experiment import SPLITS, DataSet, Experiment, Found, dicts
from swin_dense.workbench.configs.first_step import check_step
from swin_dense.workbench.configs.losses import check_losses
from swin_dense.workbench.configs.masks import check_masks
from swin_dense.workbench.configs.perfect import Asker
from swin_dense.workbench.configs.question import PerfectScore, Used
from swin_dense.workbench.configs.round_trip import check_objects
from swin_dense.workbench.configs.stated import Source, read_source

_HEADS = ('decode_head', 'auxiliary_head', 'panoptic_head')  # those that read the backbone if there is no neck
_PADDING = ('Pad', 'ResizeToMultiple')  # transforms that record the size of the padded image


@dataclass
class Checked:
    """What a check of data found.

    Attributes:
        errors: what must be corrected, at most one for each data set.
        notes: on the data, and on anything unusual.
        scores: what a perfect model would score on each evaluated split.
        used: how much of the data of each split is used.
        found: the data sets that were checked, and what was found in each.
    """

    errors: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    scores: list[PerfectScore] = field(default_factory=list)
    used: list[Used] = field(default_factory=list)
    found: list[tuple[DataSet, Found]] = field(default_factory=list)

    @property
    def used_images(self) -> dict[str, int]:
        """The number of images that the framework uses, by the addresses of data sets."""
        return {data.address: one.used_images for data, one in self.found if one.used_images is not None}

    def take(self, data: DataSet, found: Found) -> None:
        """Add what a check of a data set has found."""
        self.found.append((data, found))
        self.notes += found.notes

    @contextmanager
    def taking_errors(self) -> Iterator[None]:
        """Add the ValueError of a check to the errors, so that other checks follow."""
        try:
            yield
        except ValueError as error:
            self.errors.append(str(error))

    def raise_errors(self) -> None:
        """Raise ValueError if there are errors, all of them in its message."""
        if self.errors:
            raise ValueError('\n'.join(self.errors))

    def as_dict(self) -> dict[str, Any]:
        """Return everything for JSON."""
        scores = [score.as_dict() for score in self.scores]
        return {'errors': self.errors, 'notes': self.notes, 'scores': scores, 'used': [vars(one) for one in self.used]}


def check_data(
    experiment: Experiment,
    splits: Sequence[str],
    every_image: bool = False,
    trained: Sequence[str] = (),
    take_step: bool = False,
) -> Checked:
    """Look at the model, and at the data that splits read: annotations, names, and a sample of headers and masks.

    The evaluators of the splits are asked what a perfect model would score. Of several processes, one calls this before
    it joins the others, because evaluators would wait for them.

    Args:
        experiment: the config.
        splits: 'train', 'val' and 'test', or some of them.
        every_image: whether to decode every image and mask.
        trained: the names of the classes in the checkpoint that is tested, if it has some.
        take_step: whether to take a step of training with a second model.

    Returns:
        the errors of data, whose ``raise_errors`` raises them, and all else.

    Raises:
        FileNotFoundError: files or folders do not exist.
        ValueError: the model, or the names of its classes, are wrong.
    """
    checked = Checked(notes=_check_settings(experiment, splits, trained))
    asker = Asker(experiment, trained)
    for split in _different_splits(experiment, splits):
        with experiment.in_scope():
            sources = _checked_sources(experiment.datasets_of([split]), checked, every_image)
            if split == 'train' and experiment.scope == 'mmseg' and sources:
                with checked.taking_errors():
                    checked.notes += check_losses(experiment, sources[0])
            if sources and split == 'train':
                asker.take_training(sources)
            elif sources:
                asker.ask(split, sources)
        del sources  # before the next are read
    checked.scores, checked.used = asker.scores, asker.used
    if take_step and not checked.errors:
        with checked.taking_errors(), experiment.in_scope():
            check_step(experiment, [found.samples for data, found in checked.found if data.split == 'train'])
    checked.notes += notes_on_shared_files(checked.found)
    checked.errors += [str(score) for score in checked.scores if score.is_error]
    checked.notes += [str(score) for score in checked.scores if not score.is_perfect and not score.is_error]
    checked.errors, checked.notes = list(dict.fromkeys(checked.errors)), list(dict.fromkeys(checked.notes))
    return checked


def _check_settings(experiment: Experiment, splits: Sequence[str], trained: Sequence[str]) -> list[str]:
    """Return notes on settings; raise for those that are wrong, and for files and folders that do not exist."""
    check_channels(experiment)
    check_prediction(experiment)
    check_names(experiment, splits)
    notes = notes_on_classes(experiment, splits, trained)
    notes += notes_on_frozen_stages(experiment) if 'train' in splits else []
    notes += notes_on_evaluators(experiment, splits)
    check_packages(experiment.config)
    missing = experiment.missing(splits)
    if missing:
        raise FileNotFoundError(
            f'there is no {", no ".join(missing)}; set the location of the data: with the environment variables '
            'COCO_ROOT and ADE20K_ROOT for unchanged recipes, with the options of `swin-dense config` for your own '
            'data, or in any config with --set train_dataloader.dataset.data_root=DIR, and so on'
        )
    return notes


def _different_splits(experiment: Experiment, splits: Sequence[str]) -> list[str]:
    """Return the splits without those that have the data and the evaluator of an earlier one, as test often has."""
    different: dict[str, str] = {}
    for split in (split for split in SPLITS if split in splits):
        datasets = [dataset.entry for dataset in experiment.datasets_of([split])]
        different.setdefault(str([datasets, experiment.config.get(f'{split}_evaluator')]), split)
    return list(different.values())


def _checked_sources(datasets: Sequence[DataSet], checked: Checked, every_image: bool) -> list[Source]:
    """Check the data sets of a split, and return them as they were read; none if one is wrong or was not read."""
    trained = [found for data, found in checked.found if data.split == 'train']
    checks: dict[str, Any] = {'mmdet': check_objects, 'mmseg': partial(check_masks, trained=trained)}
    sources: list[Source | None] = []
    for dataset in datasets:
        source = None
        check = checks.get(dataset.experiment.scope or '')
        with checked.taking_errors():
            if check and not (dataset.experiment.is_detector and is_address(dataset.annotations)):
                read = read_source(dataset)
                checked.take(dataset, check(dataset, read, every_image))
                source = read
        sources.append(source)
    complete = [source for source in sources if source]
    return complete if len(complete) == len(sources) else []


def notes_on_shared_files(found: Sequence[tuple[DataSet, Found]]) -> list[str]:
    """Return notes on images that are both trained on and evaluated."""
    trained = {path for data, one in found if not data.is_evaluated for path in one.files}
    notes = []
    for data, one in found:
        shared = sorted(trained & one.files) if data.is_evaluated else []
        if shared:
            notes.append(
                f'{data.address}: {len(shared)} of {len(one.files)} images are in the training data too, such as '
                f'{shared[0]}, so that its figures are of images that the model has seen'
            )
    return notes


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
    return len(value) == 2 and all(isinstance(one, int) for one in value)

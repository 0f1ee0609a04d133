"""Check configs and data before training or testing, for errors that would otherwise appear late or not at all.

The parts of a model must take the maps that its backbone returns, and the data must be there and be what they seem.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from swin_dense.utils.addresses import is_address
from swin_dense.workbench.building import check_packages
from swin_dense.workbench.checking.first_step import check_step
from swin_dense.workbench.checking.found import Found
from swin_dense.workbench.checking.losses import check_losses
from swin_dense.workbench.checking.masks import check_masks
from swin_dense.workbench.checking.perfect import Asker
from swin_dense.workbench.checking.question import PerfectScore, Used
from swin_dense.workbench.checking.round_trip import check_objects
from swin_dense.workbench.checking.settings import (
    check_channels,
    check_names,
    check_prediction,
    notes_on_classes,
    notes_on_evaluators,
    notes_on_frozen_stages,
)
from swin_dense.workbench.checking.stated import Source, read_source
from swin_dense.workbench.configs.experiment import SPLITS, DataSet, Experiment


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
        return {data.address: result.used_images for data, result in self.found if result.used_images is not None}

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
        return {
            'errors': self.errors,
            'notes': self.notes,
            'scores': scores,
            'used': [vars(used) for used in self.used],
        }


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
    trained = {path for data, result in found if not data.is_evaluated for path in result.files}
    notes = []
    for data, result in found:
        shared = sorted(trained & result.files) if data.is_evaluated else []
        if shared:
            notes.append(
                f'{data.address}: {len(shared)} of {len(result.files)} images are in the training data too, such as '
                f'{shared[0]}, so that its figures are of images that the model has seen'
            )
    return notes

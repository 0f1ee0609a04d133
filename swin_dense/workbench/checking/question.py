"""A question to the evaluators of a split: the images to ask about, the best answers for them, and what is said."""

from __future__ import annotations

import copy
import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from mmcv.ops import batched_nms
from mmengine.evaluator import DumpResults, Evaluator
from mmengine.registry import DATASETS, EVALUATOR, METRICS

from swin_dense.workbench.checking import hints
from swin_dense.workbench.checking.images import sample_evenly
from swin_dense.workbench.checking.stated import Source, StatedObject
from swin_dense.workbench.configs.coco import shown
from swin_dense.workbench.configs.experiment import Experiment, dicts
from swin_dense.workbench.configs.quietly import silent

MOST_IMAGES = 1000  # of a large split that are asked about
MOST_WITH_MASKS = 200
MOST_LABEL_MAPS = 50
_PERFECT = 0.9995  # metrics round to three decimals
_FIGURES = ('mAP', 'mIoU', 'mDice', 'mFscore')  # the figures of mmdet's and mmseg's metrics that stand for all
_KNOWN = ('CocoMetric', 'VOCMetric', 'IoUMetric')


@dataclass
class Missed:
    """Objects that count as missed, or answers that count as wrong, for one reason.

    Attributes:
        count: their number; 0 if it is not known.
        reason: why, in words that follow the number.
        example: an entry of the annotations, or None.
        cure: the setting or edit that cures it, or ''.
        is_error: whether the data or the config are the cause, rather than a limit of the metric or the model.
        are_answers: whether these are answers.
    """

    count: int
    reason: str
    example: Any
    cure: str
    is_error: bool
    are_answers: bool = False

    def __str__(self) -> str:
        example = '' if self.example is None else f', such as {shown(self.example)}'
        cure = f' ({self.cure})' if self.cure else ''
        unit = 'answers ' if self.are_answers else ''
        return f'{self.count or "some"} {unit}{self.reason}{example}{cure}'


@dataclass
class PerfectScore:
    """What the evaluators of a split say about the answers of a perfect model.

    Attributes:
        split: 'val' or 'test'.
        scores: the figures that stand for the others, by name; of a metric of one's own, all.
        images: the number of images of the split, of which ``asked`` were asked about.
        objects: the number of objects that the metric counts, or of pixels; ``unit`` says which.
        missed: those that count as missed, and answers that count as wrong, by reason.
        problem: why there are no figures, or ''.
        is_known: whether the best value of the figures is known to be 1, or 100.
        is_blind: whether wrong answers get the same figures.
    """

    split: str
    scores: dict[str, float] = field(default_factory=dict)
    images: int = 0
    asked: int = 0
    objects: int = 0
    unit: str = 'objects'
    missed: list[Missed] = field(default_factory=list)
    problem: str = ''
    is_known: bool = True
    is_blind: bool = False

    @property
    def is_perfect(self) -> bool:
        return not self.is_blind and bool(self.scores) and all(map(is_perfect_figure, self.scores.values()))

    @property
    def is_error(self) -> bool:
        """Whether the data or the config are the reason why a perfect model would not be perfect."""
        if self.is_perfect or self.is_blind or not self.is_known:
            return False
        return any(missed.is_error for missed in self.missed) or not self.missed

    def __str__(self) -> str:
        if self.problem:
            return f'{self.split}: {self.problem}'
        low = {key: score for key, score in self.scores.items() if not is_perfect_figure(score)} or self.scores
        has_slices = len({*map(_short, low)}) < len(low)  # one figure for each of several data sets
        figures = (
            ', '.join(f'{key if has_slices else _short(key)} {score:.3f}' for key, score in low.items()) or 'nothing'
        )
        text = f'{self.split}: a perfect model would score {figures}'
        if self.asked < self.images:
            text += f' (on a sample of {self.asked} of its {self.images} images)'
        if self.is_perfect:
            return text
        if self.is_blind:
            return f'{text}; so would a model that finds nothing, so these figures cannot compare models'
        if not self.is_known:
            return f'{text}; whether that is the best value of these figures is not known'
        if not self.objects and not self.missed:
            return (
                f'{text}, because the data have no {self.unit} of a class to find; evaluate data that have some, or '
                f'only write the predictions, with format_only=True of {self.split}_evaluator'
            )
        lost = '; '.join(str(group) for group in self.missed if not group.are_answers)
        wrong = '; '.join(str(group) for group in self.missed if group.are_answers)
        parts = [f'it misses {lost}'] * bool(lost) + [f'counted as wrong are {wrong}'] * bool(wrong)
        reasons = '; '.join(parts) or f'it misses some {hints.UNKNOWN}'
        total = f'of {self.objects} {self.unit}, ' if self.objects else ''
        return f'{text}: {total}{reasons}'

    def as_dict(self) -> dict[str, Any]:
        """Return everything for JSON."""
        content = {**vars(self), 'is_perfect': self.is_perfect, 'is_error': self.is_error}
        content['missed'] = [{**vars(group), 'example': shown(group.example)} for group in self.missed]
        return content


@dataclass
class Used:
    """How much of the data of a split is used, to train or to evaluate.

    Attributes:
        split: 'train', 'val' or 'test'.
        images: the number of images that the annotations state, of which ``used_images`` are used.
        objects: the number of objects that they state, of which ``used_objects`` are trained on or counted; None for
            masks of pixels.
    """

    split: str
    images: int = 0
    used_images: int = 0
    objects: int | None = None
    used_objects: int | None = None


def used_of(split: str, sources: Sequence[Source]) -> Used:
    """Return how much of the data sets of a split is used to train."""
    used = Used(split)
    for source in sources:
        used.images += len(source.stated.files)
        used.used_images += len({sample.get('img_path') for sample in source.samples})
        if any('instances' in sample for sample in source.loaded):
            instances = [instance for sample in source.samples for instance in sample.get('instances') or ()]
            kept = sum(not instance.get('ignore_flag') for instance in instances)
            used.objects = (used.objects or 0) + sum(len(file.objects) for file in source.stated.files.values())
            used.used_objects = (used.used_objects or 0) + kept
    return used


@dataclass
class Part:
    """A data set of a split, reduced to the images to ask about.

    Attributes:
        source: what it states, in whole.
        built: the data set of the framework, with ``samples`` alone.
        img_ids: the ids of these images, and of some that the data set leaves out.
    """

    source: Source
    built: Any
    samples: list[Any]
    img_ids: list[Any]


class Question:
    """The evaluators of a split, the images to ask about, and the best answers for them.

    Args:
        experiment: the config.
        split: 'val' or 'test'.
        sources: the data sets of the split, in their order.
        train: the data set of the training whose settings say how masks are read.
        numbers: the label of each class, by name, as the training data number them.
        folder: where evaluators write what they write.

    Attributes:
        parts: the data sets, reduced.
        is_sampled: whether they have more images than are asked about.
        answers: the objects to answer, by file, each once.
        empty: the numbers, by ``id``, of those whose mask covers no pixel.
        suppressed: the numbers, by ``id``, of those that the model's suppression of overlaps removes.
        nms: the config of this suppression, or None; ``nms_address`` is its setting.
        limit: the number of objects that the model returns of an image, or None; ``limit_address`` is its setting.
        score_address: the setting of a least score that no answer reaches, or ''.
        meta: the description of the data sets that the evaluators get.
        originals: the files of annotations by those that take their place for a sample.
    """

    def __init__(
        self,
        experiment: Experiment,
        split: str,
        sources: Sequence[Source],
        train: Source,
        numbers: dict[Any, int],
        folder: str,
    ) -> None:
        self.experiment, self.split, self.train, self.numbers = experiment, split, train, numbers
        self.entry = evaluator_entry(experiment, split)
        for part in dicts(self.entry):  # no answers beside those of the user
            for key in {'outfile_prefix', 'output_dir'} & {*part}:
                part[key] = os.path.join(folder, 'answers')
        self.limit_address, self.limit = _limit_of(experiment.model)
        self.nms_address, self.nms = _nms_of(experiment.model)
        least = _of_test_cfg(experiment.model, ('score_thr',))
        self.score_address = next((address for address, score in least.items() if score and score >= 1), '')
        self.suppressed: set[int] = set()
        self._answered: dict[str, list[StatedObject]] = {}
        self.with_masks = 'segm' in str([part.get('metric') for part in self.metrics()])
        self.answers: dict[str, dict[Any, StatedObject]] = defaultdict(dict)
        self.empty: set[int] = set()
        for source in sources:
            for file in source.stated.files.values():
                for obj in file.objects:
                    if not obj.is_ignored and obj.label in numbers:
                        self.answers[file.path][obj.label, obj.box] = obj
        most = MOST_WITH_MASKS if self.with_masks else MOST_IMAGES
        if experiment.scope == 'mmseg':
            most = MOST_LABEL_MAPS
        share = max(1, most // len(sources))
        self.is_sampled = any(len(source.samples) > share for source in sources)
        self.parts = [self._part(source, share) for source in sources]
        self.meta = self._merged()
        self.originals: dict[str, str] = {}
        for number, part in enumerate(self.parts if self.is_sampled else ()):
            self._reduce(part, os.path.join(folder, f'{number}.json'))

    def metrics(self) -> list[Any]:
        """Return the entries of the metrics, in the order in which the evaluator has them."""
        return [part for part in dicts(self.entry) if 'type' in part and 'metrics' not in part]

    def answered(self, path: str) -> list[StatedObject]:
        """Return the objects that the model returns for a file: after suppressing overlaps, and within its limits."""
        if path not in self._answered:
            objects = [*self.answers[path].values()]
            kept = _not_suppressed(objects, self.numbers, self.nms) if self.nms and len(objects) > 1 else objects
            self.suppressed |= {id(obj) for obj in objects} - {id(obj) for obj in kept}
            self._answered[path] = [] if self.score_address else kept[: self.limit]
        return self._answered[path]

    def built(self) -> Evaluator:
        """Return the evaluators as mmengine's Runner builds them."""
        entry = copy.deepcopy(self.entry)
        has_class = isinstance(entry, dict) and 'metrics' in entry
        with silent():
            evaluator = EVALUATOR.build({'type': 'Evaluator', **entry}) if has_class else Evaluator(entry)
            evaluator.dataset_meta = self.meta
        return evaluator

    def evaluate(self, samples: Iterable[Any]) -> dict[str, float]:
        """Return the figures of the evaluators for samples with answers, as the framework gives them."""
        evaluator = self.built()
        for index, metric in enumerate(evaluator.metrics if self.is_sampled else ()):
            if hasattr(metric, 'img_ids'):  # CocoMetric's, all of its file if None
                own = [self.parts[index]] if is_of_one_part(evaluator) else self.parts
                metric.img_ids = list(dict.fromkeys(key for part in own for key in part.img_ids))
        return _figures(evaluator, samples)

    def is_perfect_alone(self, sample: Any) -> bool:
        """Return whether the evaluators say 1 for one sample with its answers."""
        evaluator = self.built()
        for metric in evaluator.metrics:
            if hasattr(metric, 'img_ids'):
                metric.img_ids = [sample.img_id]
        figures, _ = headline(_figures(evaluator, [sample]), self.entry)
        return all(map(is_perfect_figure, figures.values()))

    def _part(self, source: Source, most: int) -> Part:
        samples, built = source.samples, source.built
        if len(samples) > most:
            asked = self._asked_about(source, most)
            samples, built = [samples[index] for index in asked], built.get_subset(asked)
        kept = {sample.get('img_path') for sample in source.samples}
        left_out = [file for path, file in source.stated.files.items() if path not in kept and file.objects]
        ids = [sample.get('img_id') for sample in samples]
        ids += [image['id'] for file in left_out[: most // 4] for image in file.images]
        return Part(source, built, samples, ids)

    def _reduce(self, part: Part, path: str) -> None:
        """Let the evaluators that compare with the file of a data set read the images to ask about alone."""
        name, categories = part.source.data.annotations, part.source.stated.categories
        entries = [entry for entry in self.metrics() if is_same_file(entry.get('ann_file'), name)]
        if not entries or not categories:
            return
        kept = {*part.img_ids}
        content: dict[str, list[Any]] = {'images': [], 'annotations': []}
        content['categories'] = [{'id': key, 'name': name} for key, name in categories.items()]
        for file in part.source.stated.files.values():
            content['images'] += [image for image in file.images if image['id'] in kept]
            content['annotations'] += [obj.entry for obj in file.objects if obj.entry['image_id'] in kept]
        with open(path, 'w', encoding='utf-8') as stream:
            json.dump(content, stream)
        self.originals[path] = name
        for entry in entries:
            entry['ann_file'] = path

    def _asked_about(self, source: Source, most: int) -> list[int]:
        """Return the images to ask about: of files that several name, with most objects, of each class, and others."""
        paths = [sample['img_path'] for sample in source.samples]
        times = Counter(paths)
        several = [index for index, path in enumerate(paths) if times[path] > 1]
        fullest = sorted(range(len(paths)), key=lambda index: -len(self.answers[paths[index]]))
        first: dict[Any, int] = {}
        for index, path in enumerate(paths):
            file = source.stated.files.get(path)
            for obj in file.objects if file else ():
                first.setdefault(obj.label if obj.id else ('without a number', obj.id), index)
        evenly = sample_evenly(range(len(paths)), most // 2)
        found = dict.fromkeys([*several[: most // 4], *fullest[: most // 8], *first.values(), *evenly])
        return sorted([*found][:most])

    def _merged(self) -> Any:
        """Return the description of the data sets, as their wrapper makes it of those that were built."""
        built = {id(part.source.data.entry): part.built for part in self.parts}

        def filled(value: Any) -> Any:
            if id(value) in built:
                return built[id(value)]
            if isinstance(value, dict):
                return {key: [] if key == 'pipeline' else filled(item) for key, item in value.items()}
            return [filled(item) for item in value] if isinstance(value, (list, tuple)) else value

        whole = filled(self.experiment.config[f'{self.split}_dataloader'].dataset)
        if isinstance(whole, dict):
            with silent():
                whole = DATASETS.build(whole)
        return whole.metainfo


def evaluator_entry(experiment: Experiment, split: str) -> Any:
    """Return a copy of the entry of a split's evaluators that give figures; None if there are none."""
    entry = copy.deepcopy(experiment.config.get(f'{split}_evaluator'))
    if not entry or isinstance(entry, Evaluator):
        return None
    if isinstance(entry, dict) and 'metrics' in entry:
        return entry
    kept = []
    for part in entry if isinstance(entry, (list, tuple)) else [entry]:
        is_entry = isinstance(part, dict) and isinstance(part.get('type'), str)
        with METRICS.switch_scope_and_registry(experiment.scope) as registry:
            kind = registry.get(part['type']) if is_entry else None
        writes_only = part.get('format_only') or (isinstance(kind, type) and issubclass(kind, DumpResults))
        if is_entry and not writes_only:
            kept.append(part)
    return kept or None


def are_known(entry: Any) -> bool:
    """Return whether all metrics are those of mmdet and mmseg that compare what is answered here."""
    kinds = [str(part['type']).rpartition('.')[2] for part in dicts(entry) if 'type' in part and 'metrics' not in part]
    return all(kind in _KNOWN for kind in kinds)


def is_same_file(one: Any, other: str) -> bool:
    """Return whether two paths are those of one file; addresses are not compared."""
    return bool(one) and os.path.realpath(one) == os.path.realpath(other)


def is_of_one_part(evaluator: Any) -> bool:
    """Return whether each metric gets the samples of one data set, as in mmdet's MultiDatasetsEvaluator."""
    return hasattr(evaluator, 'dataset_prefixes')


def headline(figures: dict[str, float], entry: Any) -> tuple[dict[str, float], bool]:
    """Return the figures that stand for the others, and whether their best value is known, of an evaluator's entry."""
    if not figures:
        return {}, are_known(entry)
    known = {key: value for key, value in figures.items() if _short(key).rpartition('_')[2] in _FIGURES}
    return (known, True) if known else (figures, any(map(is_perfect_figure, figures.values())))


def _figures(evaluator: Evaluator, samples: Iterable[Any]) -> dict[str, float]:
    count = 0
    with silent():
        for count, sample in enumerate(samples, 1):  # noqa: B007
            evaluator.process([sample])
        figures = evaluator.evaluate(count)
    return {key: float(value) for key, value in figures.items() if isinstance(value, (int, float, np.number))}


def _short(key: str) -> str:
    return key.rpartition('/')[2]


def is_perfect_figure(score: float) -> bool:
    """Return whether a figure is 1, or 100, as far as metrics print it."""
    return _PERFECT <= score <= 1 or score >= 100 * _PERFECT


def _of_test_cfg(model: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return settings of a detector's ``test_cfg`` by their addresses; not those of its proposals."""
    model = model.get('module') or model  # that of test-time augmentation
    test_cfg = model.get('test_cfg') or {}
    found = {}
    for key, part in {'': test_cfg, **test_cfg}.items():
        for name in names if isinstance(part, dict) and key != 'rpn' else ():
            found['.'.join(['model.test_cfg', *[key] * bool(key), name])] = part.get(name)
    return found


def _limit_of(model: Any) -> tuple[str, int | None]:
    """Return the setting of the model that returns fewest objects of an image, and the number."""
    found = _of_test_cfg(model, ('max_per_img', 'max_per_image'))
    limits = {address: limit for address, limit in found.items() if isinstance(limit, int) and limit >= 0}
    return min(limits.items(), key=lambda item: item[1]) if limits else ('', None)


def _nms_of(model: Any) -> tuple[str, Any]:
    """Return the setting of the model that suppresses overlapping boxes, and its value."""
    found = _of_test_cfg(model, ('nms',))
    return next(((address, nms) for address, nms in found.items() if isinstance(nms, dict)), ('', None))


def _not_suppressed(objects: Sequence[StatedObject], numbers: dict[Any, int], nms: Any) -> list[StatedObject]:
    """Return the objects whose boxes mmcv's suppression keeps, as mmdet's detectors call it, in their order."""
    boxes = torch.tensor([obj.box for obj in objects], dtype=torch.float32)
    labels = torch.tensor([numbers[obj.label] for obj in objects])
    _, kept = batched_nms(boxes, torch.ones(len(objects)), labels, dict(nms))
    return [objects[index] for index in sorted(kept.tolist())]

"""What a perfect model would score on the evaluated data of a config, by the config's own evaluators.

A model sees a file, not an id, and returns the classes as the training data number them. Its best answer for a file is
every distinct object that the annotations state for it, cut at the edges of the image, as many as ``model.test_cfg``
lets through; for masks of pixels, the labels that the training settings make of them. If the evaluators do not say 1
(mmseg's 100), no training can reach it, and ``hints.py`` tells why, as far as it is known.
"""

from __future__ import annotations

import copy
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from mmengine.dataset import Compose
from mmengine.structures import InstanceData, PixelData
from pycocotools import mask as mask_tools

from swin_dense.mm.mask_values import IGNORED_LABEL
from swin_dense.utils.checks import described
from swin_dense.workbench.checking import hints
from swin_dense.workbench.checking.hints import Case
from swin_dense.workbench.checking.missed import add_missed, explain
from swin_dense.workbench.checking.question import (
    PerfectScore,
    Question,
    Used,
    are_known,
    evaluator_entry,
    headline,
    is_of_one_part,
    is_perfect_figure,
    used_of,
)
from swin_dense.workbench.checking.samples import loading_steps
from swin_dense.workbench.checking.stated import Source, Stated, StatedObject
from swin_dense.workbench.configs.coco import shown
from swin_dense.workbench.configs.experiment import DataSet, Experiment, dicts

_SCORE = 0.9  # of each answer
_MOST_PAIRS = 200  # of a label and an answer that the evaluators of pixels are asked about one by one


class Asker:
    """Asks the evaluators of a config, split by split, so that the memory of a split is free before the next.

    Args:
        experiment: the config; the default scope of mmengine must be its own.
        trained: the names of the classes in the checkpoint that is tested, which number them; without, the training
            data do.

    Attributes:
        used: how much of the data of each split is used.
        scores: what a perfect model would score on each evaluated split.
    """

    def __init__(self, experiment: Experiment, trained: Sequence[Any] = ()) -> None:
        self.experiment = experiment
        self.numbers: dict[Any, int] = {name: index for index, name in enumerate(trained)}
        self.train: Source | None = None
        self.used: list[Used] = []
        self.scores: list[PerfectScore] = []

    def take_training(self, sources: Sequence[Source]) -> None:
        """Take the numbers of the classes, and how masks are read, from the data sets of the training."""
        self.used.append(used_of('train', sources))
        first = sources[0]
        self.numbers = self.numbers or first.numbers
        # One sample has the settings of all; the others need not stay in memory.
        self.train = replace(first, built=None, stated=Stated(first.stated.name), loaded=[], samples=first.samples[:1])

    def ask(self, split: str, sources: Sequence[Source]) -> None:
        """Ask about a split, given all of its data sets in the order of the config."""
        if not evaluator_entry(self.experiment, split):
            return
        own = sources[0].numbers
        has_numbers = bool(self.numbers) and self.experiment.class_count is not None  # a model of texts has others
        numbers = _aligned(self.numbers, own) if has_numbers else own
        score = ask_evaluators(self.experiment, split, sources, self.train or sources[0], numbers)
        if score:
            self.scores.append(score)
            used = used_of(split, sources)
            if used.objects is not None:
                used.used_objects = score.objects if score.asked == score.images else None
            self.used.append(used)


def _aligned(numbers: dict[Any, int], own: dict[Any, int]) -> dict[Any, int]:
    """Return numbers of classes with those whose name alone differs, which a model takes for one class."""
    names = {index: name for name, index in numbers.items()}
    others = {name: index for name, index in own.items() if name not in numbers and names.get(index) not in own}
    return {**numbers, **(others if len(own) == len(numbers) else {})}


def ask_evaluators(
    experiment: Experiment, split: str, sources: Sequence[Source], train: Source, numbers: dict[Any, int]
) -> PerfectScore | None:
    """Give the evaluators of a split the answers of a perfect model; the default scope must be that of the config.

    Args:
        experiment: the config.
        split: 'val' or 'test'.
        sources: all data sets of the split, in the order of the config.
        train: a data set of the training, whose settings say how masks are read.
        numbers: the label of each class, by name, as the training data number them.

    Returns:
        None if the evaluators give no figures.
    """
    score = PerfectScore(split, images=sum(len(source.samples) for source in sources))
    with tempfile.TemporaryDirectory() as folder:
        try:
            question = Question(experiment, split, sources, train, numbers, folder)
            ask = _ask_about_pixels if experiment.scope == 'mmseg' else _ask_about_objects
            ask(question, score)
        except Exception as error:  # of any evaluator, data set or transform
            is_of_answers = isinstance(error, ImportError) or 'pred_' in str(error)  # that are not made here
            score.is_known = are_known(evaluator_entry(experiment, split)) and not is_of_answers
            fails = f'the evaluator fails on the answers of a perfect model {_reason(error, sources)}'
            score.problem = fails if score.is_known else f'the score of a perfect model is not known: {fails}'
    if not (score.scores or score.problem or score.is_known):
        score.problem = 'the score of a perfect model is not known: the evaluator returns no figures'
    return score


def _reason(error: Exception, sources: Sequence[Source]) -> str:
    """Return why an evaluator fails, with an annotation that lacks what it asks for."""
    names = ', '.join(dict.fromkeys(source.stated.name for source in sources))
    example = ''
    if isinstance(error, KeyError):
        objects = (obj for source in sources for obj in source.stated.objects())
        key = str(error.args[:1] and error.args[0])
        without = next((obj.entry for obj in objects if key.isidentifier() and key not in obj.entry), None)
        example = f', such as for {shown(without)}' if without else ''
    return f'on {names} ({described(error)}{example}){hints.hint_on(error, hints.HINTS_ON_EVALUATION)}'


# Boxes and masks of objects.


def _ask_about_objects(question: Question, score: PerfectScore) -> None:
    load_masks = _mask_loader(question.train.data) if question.with_masks else None
    samples: list[list[Any]] = []  # of each data set
    for part in question.parts:
        pack = _packer(part.source.data)
        samples.append([_with_answers(pack(sample), sample, question, load_masks) for sample in part.samples])
        for path in {sample['img_path'] for sample in part.samples}:
            file = part.source.stated.files.get(path)
            objects = file.objects if file else []
            score.objects += sum(obj.label in part.source.numbers and not obj.is_ignored for obj in objects)
    given = [sample for ones in samples for sample in ones]
    orders = [given]
    if len(samples) > 1 and not is_of_one_part(question.built()):  # answers that are wrong may come last, or first
        orders.append(given[::-1])
    asked = [headline(question.evaluate(order), question.entry) for order in orders]
    score.scores, score.is_known = min(asked, key=lambda found: min(found[0].values(), default=0.0))
    if not are_known(question.entry):
        score.is_blind = _is_same(score.scores, question, map(_without_answers, given))
    score.asked = sum(len(part.samples) for part in question.parts)
    if score.is_known and not score.is_perfect:
        explain(question, samples, score)


def _without_answers(sample: Any) -> Any:
    nothing = copy.copy(sample)
    nothing.pred_instances = sample.pred_instances[:0]
    return nothing


def _is_same(figures: dict[str, float], question: Question, others: Iterable[Any]) -> bool:
    """Return whether evaluators of one's own give the same figures for other answers."""
    try:
        again, _ = headline(question.evaluate(others), question.entry)
    except Exception:  # of any evaluator: it may need an answer
        return False
    return bool(figures) and again == figures


def _with_answers(packed: Any, sample: Any, question: Question, load_masks: Any) -> Any:
    """Return a sample, as the framework packs it, with the answers for its file."""
    objects = question.answered(sample['img_path'])
    height, width = packed.metainfo.get('ori_shape') or (np.inf, np.inf)
    boxes = torch.tensor([obj.box for obj in objects], dtype=torch.float64).reshape(-1, 4)
    boxes[:, 0::2].clamp_(0, width)
    boxes[:, 1::2].clamp_(0, height)
    packed.pred_instances = InstanceData(
        bboxes=boxes,
        scores=torch.full((len(objects),), _SCORE),
        labels=torch.tensor([question.numbers[obj.label] for obj in objects], dtype=torch.long),
    )
    if load_masks:
        masks = load_masks(objects, int(height), int(width))
        question.empty |= {id(obj) for obj, mask in zip(objects, masks, strict=True) if not mask_tools.area(mask)}
        packed.pred_instances.masks = masks
    return packed


def _mask_loader(data: DataSet) -> Callable[[list[StatedObject], int, int], list[Any]] | None:
    """Return a function that makes run lengths of answers as the training data load masks; None if they load none."""
    steps = [dict(step) for step in loading_steps(data) if step.get('with_mask')]
    if not steps:
        return None
    pipeline = Compose([{**copy.deepcopy(steps[0]), 'with_seg': False}])

    def load(objects: list[StatedObject], height: int, width: int) -> list[Any]:
        if not objects:
            return []
        instances: list[dict[str, Any]] = []
        for obj in objects:
            mask = {'mask': copy.deepcopy(obj.mask)} if obj.mask else {}  # as mmdet's data sets yield it
            instances.append({'bbox': obj.box, 'bbox_label': 0, 'ignore_flag': 0, **mask})
        shape = (height, width)
        results = {'instances': instances, 'ori_shape': shape, 'img_shape': shape, 'height': height, 'width': width}
        masks = pipeline(results)['gt_masks'].to_ndarray()
        return [mask_tools.encode(np.asfortranarray(mask)) for mask in masks]

    return load


def _packer(data: DataSet) -> Callable[[Any], Any]:
    """Return a function that packs the dict of an image as the pipeline of its data set does, without its pixels."""
    packing = [step for step in dicts(data.pipeline) if str(step.get('type')).rpartition('.')[2].startswith('Pack')]
    if not packing:
        raise ValueError(f'{data.address}.pipeline has no step that packs a sample')
    pipeline = Compose([copy.deepcopy(dict(step)) for step in (*loading_steps(data), packing[-1])])
    load_image = Compose([copy.deepcopy(dict(data.loader))])
    is_detector = data.experiment.is_detector

    def pack(sample: Any) -> Any:
        results = copy.deepcopy(sample)
        if is_detector and 'height' not in results:
            results = load_image(results)
            results.pop('img')
        shape = results.get('ori_shape') or (results.get('height'), results.get('width'))
        results |= {'ori_shape': shape, 'img_shape': shape, 'scale_factor': (1.0, 1.0), 'flip': False}
        packed = pipeline(results)['data_samples']
        if is_detector:
            from mmdet.models.utils.misc import samplelist_boxtype2tensor

            samplelist_boxtype2tensor([packed])  # as a detector does before it predicts
        return packed

    return pack


# Masks of pixels.


def _ask_about_pixels(question: Question, score: PerfectScore) -> None:
    taught = Compose([copy.deepcopy(dict(step)) for step in loading_steps(question.train.data)])
    given = question.train.samples[0] if question.train.samples else {}
    settings = {key: given[key] for key in ('reduce_zero_label', 'label_map', 'seg_fields') if key in given}
    classes = question.experiment.class_count or IGNORED_LABEL  # a model that does not state it has any label
    pairs: Counter[tuple[int, int]] = Counter()  # pixels by their label, and as the training data would have them
    example = None

    def samples() -> Iterator[Any]:
        nonlocal example
        for part in question.parts:
            pack = _packer(part.source.data)
            for sample in part.samples:
                packed = pack(sample)
                answers = taught({**copy.deepcopy(sample), **copy.deepcopy(settings)})['gt_seg_map']
                labels = packed.gt_sem_seg.data.squeeze(0).numpy()
                found, counts = np.unique(np.stack([labels, answers]).reshape(2, -1), axis=1, return_counts=True)
                pairs.update(dict(zip(map(tuple, found.T.tolist()), counts.tolist(), strict=True)))
                example = _with_map(packed, labels, answers, classes)
                yield example

    score.unit = 'pixels'
    score.scores, score.is_known = headline(question.evaluate(samples()), question.entry)
    score.asked = sum(len(part.samples) for part in question.parts)
    if not are_known(question.entry) and example:
        labels = example.gt_sem_seg.data.squeeze(0).numpy()
        figures, _ = headline(question.evaluate([example]), question.entry)
        score.is_blind = _is_same(figures, question, [_with_map(example, labels, 1 - (labels > 0), classes)])
    if not score.is_known or score.is_perfect or score.is_blind:
        return
    address = question.parts[0].source.data.address
    cases = []
    for pair, count in pairs.most_common(_MOST_PAIRS):
        label, answer = (np.full((2, 2), value) for value in pair)
        figures, _ = headline(question.evaluate([_with_map(example, label, answer, classes)]), question.entry)
        is_counted = not all(map(math.isnan, figures.values()))
        score.objects += count * is_counted
        if is_counted and not all(map(is_perfect_figure, figures.values())):
            case = Case(kind='pixels', pixel_classes=pair, class_count=classes, split=question.split, address=address)
            cases.append((case, count))
    add_missed(cases, score)


def _with_map(packed: Any, labels: np.ndarray, answers: np.ndarray, classes: int) -> Any:
    """Return a sample with a map of labels and one of answers, of which a model has those of its classes alone."""
    sample = copy.copy(packed)
    sample.gt_sem_seg = PixelData(data=torch.from_numpy(labels.astype(np.int64))[None])
    answers = np.where((answers >= 0) & (answers < classes), answers, 0)
    sample.pred_sem_seg = PixelData(data=torch.from_numpy(answers.astype(np.int64))[None])
    return sample

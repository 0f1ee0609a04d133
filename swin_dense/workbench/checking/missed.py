"""Which objects an evaluation counts as missed although a perfect model found all, and why."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from swin_dense.workbench.checking import hints
from swin_dense.workbench.checking.hints import Case
from swin_dense.workbench.checking.question import Missed, PerfectScore, Question, is_of_one_part, is_same_file
from swin_dense.workbench.checking.stated import StatedFile, StatedObject
from swin_dense.workbench.configs.coco import read_coco
from swin_dense.workbench.configs.experiment import dicts
from swin_dense.workbench.configs.quietly import quiet

_MOST_ALONE = 100  # images that are asked about one by one


def explain(question: Question, samples: Sequence[Sequence[Any]], score: PerfectScore) -> None:
    """Fill in the objects that count as missed, by reason; ``samples`` are those of each data set, with answers."""
    evaluator = question.built()
    finder = _Finder(question)
    missed: list[tuple[Case, int]] = []
    wrong: list[tuple[Case, int]] = []
    has_answers = any(len(sample.pred_instances) for ones in samples for sample in ones)
    for index, (metric, entry) in enumerate(zip(evaluator.metrics, question.metrics(), strict=True)):
        own = [index] if is_of_one_part(evaluator) else range(len(question.parts))
        if has_answers and entry.get('ann_file') and hasattr(metric, 'proposal_nums'):
            given = [sample for number in own for sample in samples[number]]
            found = _compared_by_coco(finder, metric, entry, own, given, score)
        else:
            found = _unanswered(finder, samples, own), []
        if (len(found[0]), len(found[1])) > (len(missed), len(wrong)):
            missed, wrong = found
    add_missed(missed, score)
    # The answer for an object that is missed is wrong, too.
    known = [(case, count) for case, count in wrong if hints.explained(case).text != hints.UNKNOWN]
    add_missed(known if missed else wrong, score, are_answers=True)
    if not score.missed:
        compared = [getattr(metric, 'proposal_nums', ()) for metric in evaluator.metrics]
        whole = replace(finder.case(None, None), compared=max(compared, key=len, default=()))
        if hints.explained(whole).text != hints.UNKNOWN:
            add_missed([(whole, 0)], score)


def add_missed(cases: Iterable[tuple[Case, int]], score: PerfectScore, are_answers: bool = False) -> None:
    """Add objects or pixels, with their numbers, to those that a score misses, by reason."""
    by_reason: dict[str, list[tuple[Case, int]]] = {}
    for case, count in cases:
        reason = hints.explained(case).text.format(**vars(case))
        by_reason.setdefault(reason, []).append((case, count))
    found = []
    for reason, counted in by_reason.items():
        fullest = max((case for case, _ in counted), key=lambda case: case.stated)  # the cure must be enough for it
        explanation = hints.explained(fullest)
        example = next((case.obj.entry for case, _ in counted if case.obj), None)
        total = sum(count for _, count in counted)
        is_error = explanation.is_error(total / max(score.objects, 1))
        found.append(Missed(total, reason, example, explanation.cure.format(**vars(fullest)), is_error, are_answers))
    score.missed += sorted(found, key=lambda finding: (not finding.is_error, -finding.count))


class _Finder:
    """Finds what is stated for what an evaluation returns, with its context."""

    def __init__(self, question: Question) -> None:
        self.question = question
        parts = question.parts
        entries = [entry['ann_file'] for entry in dicts(question.entry) if entry.get('ann_file')]
        entries = [question.originals.get(file, file) for file in entries]
        read = {os.path.realpath(part.source.data.annotations) for part in parts}
        ids = [sample.get('img_id') for part in parts for sample in part.samples]
        has_slices = any('dataset_prefixes' in entry for entry in dicts(question.entry))
        self.kept = [{sample.get('img_path') for sample in part.source.samples} for part in parts]
        self.times = Counter(sample.get('img_path') for part in parts for sample in part.source.samples)
        self.whole = Case(
            limit=question.limit,
            limit_address=question.limit_address,
            score_address=question.score_address,
            nms_address=question.nms_address,
            labels=question.numbers,
            others=[file for file in entries if os.path.realpath(file) not in read],
            images=len(ids),
            image_ids=len(ids) if len(parts) == 1 or has_slices else len({*ids}),
            split=question.split,
            address=parts[0].source.data.address,
            name=parts[0].source.stated.name,
        )

    def case(self, file: StatedFile | None, obj: StatedObject | None, number: int = 0, **fields: Any) -> Case:
        """Return an object of the data set of a number that counts as missed; None where nothing is known."""
        if file is None:
            return replace(self.whole, **fields)
        question, source = self.question, self.question.parts[number].source
        answers = question.answers[file.path]
        key = (obj.label, obj.box) if obj else None
        return replace(
            self.whole,
            obj=obj,
            file=file,
            stated=len(answers),
            of_class=sum(obj is not None and other.label == obj.label for other in answers.values()),
            is_left_out=file.path not in self.kept[number],
            is_empty=id(answers.get(key)) in question.empty,
            is_suppressed=id(answers.get(key)) in question.suppressed,
            times=sum((other.label, other.box) == key for other in file.objects),
            ids=max(len(file.images), self.times[file.path]),
            own_labels=source.numbers,
            address=source.data.address,
            name=source.stated.name,
            **fields,
        )


def _compared_by_coco(
    finder: _Finder, metric: Any, entry: Any, own: Sequence[int], samples: Sequence[Any], score: PerfectScore
) -> tuple[list[tuple[Case, int]], list[tuple[Case, int]]]:
    """Return the objects that pycocotools matches with no answer, and the answers that it matches with no object.

    mmdet's metric does not return the matches, so that pycocotools is asked for them, as the metric asks it.
    """
    question = finder.question
    parts = [question.parts[number] for number in own]
    truth = _truth(entry, parts, question.is_sampled)
    files: dict[Any, tuple[StatedFile, int]] = {}
    objects: dict[Any, StatedObject] = {}
    compared = question.originals.get(entry['ann_file'], entry['ann_file'])
    for number in own:
        source = question.parts[number].source
        is_read = is_same_file(compared, source.data.annotations)
        for stated in source.stated.files.values():
            for image in stated.images:
                files.setdefault(image['id'], (stated, number))
            if is_read:
                objects |= {obj.id: obj for obj in stated.objects}
    cat_ids = truth.getCatIds(catNms=list(parts[0].source.built.metainfo['classes']))
    most = min(hints.MOST_OF_A_CLASS, max(metric.proposal_nums))
    worst: tuple[list[Case], list[Case], int] = ([], [], 0)
    for kind in metric.metrics:
        answers = [answer for sample in samples for answer in _coco_answers(sample, cat_ids, kind)]
        if not answers or kind not in ('bbox', 'segm'):
            continue
        missed: list[Case] = []
        wrong: list[Case] = []
        counted = 0
        for image in _evaluated_images(truth, answers, kind, cat_ids, metric):
            file, number = files.get(image['image_id']) or (None, 0)
            unmatched, without_object = _unmatched(image, most)
            missed += [finder.case(file, objects.get(key), number, kind=kind, most=most) for key in unmatched]
            wrong += [finder.case(file, None, number, kind=kind, most=most)] * without_object
            counted += sum(not is_ignored for is_ignored in image['gtIgnore'])
        worst = max(worst, (missed, wrong, counted), key=lambda found: (len(found[0]), len(found[1]), found[2]))
    missed, wrong, score.objects = worst
    return [(case, 1) for case in missed], [(case, 1) for case in wrong]


def _truth(entry: Any, parts: Sequence[Any], is_sampled: bool) -> Any:
    """Return pycocotools' form of the annotations that a metric reads, of the images asked about if it is a sample."""
    content = read_coco(entry['ann_file'], entry.get('backend_args'))
    if is_sampled:
        kept = {key for part in parts for key in part.img_ids}
        for section, key in (('images', 'id'), ('annotations', 'image_id')):
            content[section] = [entry for entry in content.get(section) or [] if entry[key] in kept]
    truth: Any = COCO()
    truth.dataset = content
    with quiet():
        truth.createIndex()
    return truth


def _evaluated_images(
    truth: Any, answers: Sequence[Any], kind: str, cat_ids: Sequence[Any], metric: Any
) -> Iterator[dict[str, Any]]:
    """Yield what pycocotools finds for each image and class, with the limits of a metric and objects of any area."""
    with quiet():
        evaluation = COCOeval(truth, truth.loadRes(answers), kind)
        evaluation.params.catIds, evaluation.params.imgIds = cat_ids, truth.getImgIds()
        evaluation.params.maxDets = sorted(metric.proposal_nums)
        evaluation.params.iouThrs = np.atleast_1d(metric.iou_thrs)
        evaluation.params.areaRng, evaluation.params.areaRngLbl = [[0, 1e10]], ['all']
        evaluation.evaluate()
    yield from filter(None, evaluation.evalImgs)


def _unmatched(image: dict[str, Any], most: int) -> tuple[list[Any], int]:
    """Return the ids of objects that no answer matches at the strictest threshold, and the number of wrong answers."""
    matches = image['dtMatches'][-1, :most]
    is_wrong = (matches == 0) & ~image['dtIgnore'][-1, :most].astype(bool)
    ids = [key for key, is_ignored in zip(image['gtIds'], image['gtIgnore'], strict=True) if not is_ignored]
    # pycocotools states the match with an object whose id is 0 as no match.
    return [key for key in ids if key == 0 or key not in matches], int(is_wrong.sum())


def _coco_answers(sample: Any, cat_ids: Sequence[Any], kind: str) -> Iterator[Any]:
    """Yield the answers in a sample in the format of COCO's results."""
    predicted = sample.pred_instances
    for index, (box, label) in enumerate(zip(predicted.bboxes.tolist(), predicted.labels.tolist(), strict=True)):
        left, top, right, bottom = box
        place = {'bbox': [left, top, right - left, bottom - top]}
        if kind == 'segm':
            place = {'segmentation': predicted.masks[index]}
        yield {'image_id': sample.img_id, 'category_id': cat_ids[label], 'score': 0.9, **place}


def _unanswered(finder: _Finder, samples: Sequence[Sequence[Any]], own: Sequence[int]) -> list[tuple[Case, int]]:
    """Return the objects that were not answered in images about which the evaluators, asked alone, do not say 1.

    If all were answered, return those that an explanation holds for, or else one of an unknown number.
    """
    question = finder.question
    unanswered: list[Case] = []
    others: list[Case] = []
    for number in own:
        source = question.parts[number].source
        for sample in samples[number][:_MOST_ALONE]:
            file = source.stated.files.get(sample.img_path)
            is_single = len(question.parts) == 1 and len(sample.pred_instances)
            if file is None or (is_single and question.is_perfect_alone(sample)):
                continue
            answered = {id(obj) for obj in question.answered(file.path)}
            for obj in file.objects:
                if not obj.is_ignored:
                    cases = others if id(obj) in answered else unanswered
                    cases.append(finder.case(file, obj, number))
    explained = [case for case in others if hints.explained(case).text != hints.UNKNOWN]
    known = unanswered or explained
    return [(case, 1) for case in known] or [(case, 0) for case in others[:1]]

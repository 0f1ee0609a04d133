"""What an evaluation by pycocotools needs of annotations, and the objects that it counts as missed."""

from __future__ import annotations

import os
from collections import Counter

from swin_dense.utils.addresses import is_address
from swin_dense.workbench.configs.stated import Source, StatedObject, shown


def check_evaluable(source: Source) -> None:
    """Raise ValueError for annotations that pycocotools cannot evaluate."""
    if not source.data.is_evaluated or not source.stated.categories:
        return

    def fault(one: StatedObject) -> str:
        if type(one.id) is not int:
            return 'pycocotools needs whole numbers as ids'
        if one.id == 0:
            return (
                "number them from 1, because COCO's evaluation takes 0 for 'no match' and counts this object as missed"
            )
        return 'write iscrowd, 0 for a single object' if one.entry.get('iscrowd') is None else ''

    objects = list(source.stated.objects())
    faults = [(one, why) for one in objects if (why := fault(one))]
    if faults:
        first, advice = faults[0]
        count = sum(why == advice for _, why in faults)
        raise ValueError(
            f'{source.stated.name}: {count} of {len(objects)} annotations are wrong, such as {shown(first.entry)}: '
            f'{advice}'
        )


def notes_on_evaluation(source: Source) -> list[str]:
    """Return notes on objects that COCO's evaluation counts as missed whatever a model finds."""
    data = source.data
    if not data.is_evaluated or not source.stated.categories:
        return []
    path = data.annotations
    notes = []
    for evaluator in data.evaluators:
        compared = evaluator.get('ann_file')
        if not compared or is_address(compared):
            continue
        if os.path.realpath(compared) != os.path.realpath(path):
            notes.append(
                f'{data.address} reads {path}, but its evaluator compares with {compared}: --set '
                f'{data.split}_evaluator.ann_file={path} compares with the same'
            )
    # The parts of a detector that limit what it returns; proposals do not.
    test_cfg = data.experiment.model.get('test_cfg') or {}
    parts = {'model.test_cfg': test_cfg}
    for key, part in test_cfg.items():
        if isinstance(part, dict) and key != 'rpn':
            parts[f'model.test_cfg.{key}'] = part
    limits = {}
    for address, part in parts.items():
        for key in ('max_per_img', 'max_per_image'):
            if isinstance(part.get(key), int):
                limits[f'{address}.{key}'] = part[key]
    objects = [one for one in source.stated.objects() if not one.is_ignored and one.label in source.numbers]
    counts = Counter(one.entry['image_id'] for one in objects)
    for address, limit in limits.items():
        crowded = [count for count in counts.values() if count > limit >= 0]
        if crowded:
            missed = sum(crowded) - limit * len(crowded)
            notes.append(
                f'{path}: {len(crowded)} of {len(counts)} images have more objects than the {limit} that the model '
                f'returns, so that {missed} count as missed: --set {address}={max(crowded)}'
            )
    return notes

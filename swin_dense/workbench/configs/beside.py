"""Files of annotations that `swin-dense config` writes beside a config: the parts of a split, and readable copies."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from swin_dense.utils import checks
from swin_dense.utils.addresses import is_address
from swin_dense.utils.atomic import check_destination, remove, write_bytes, write_text
from swin_dense.workbench.configs.coco import SPLIT_OF, encoding_of, read_coco, turn_of
from swin_dense.workbench.configs.experiment import Experiment, dicts
from swin_dense.workbench.configs.files import name_on_disk


def write_beside(texts: Mapping[Path, str], force: bool, stack: contextlib.ExitStack) -> None:
    """Write text files, none of which may exist without ``force``; ``stack`` undoes it if its block raises."""
    before = {}
    for path in texts:
        check_destination(path, force)
        before[path] = path.read_bytes() if path.exists() else None

    def restore(kind: Any, *_: Any) -> None:
        for path, content in before.items() if kind else ():
            if content is None:
                remove(path)
            else:  # of a config that stays
                write_bytes(path, content)

    stack.push(restore)
    for path, text in texts.items():
        write_text(path, text)


def write_copies(experiment: Experiment, out: Path, force: bool, stack: contextlib.ExitStack) -> list[str]:
    """Write a copy of each file of annotations that mmdet or pycocotools cannot read as it is, and use it.

    The copies are beside the config ``out``; :func:`corrected` makes them. Return a note on each.
    """
    notes = []
    copies: dict[str, str] = {}
    numbers: Counter[str] = Counter()
    for data in experiment.datasets:
        path = Path(data.annotations)
        if data.kind != 'CocoDataset' or is_address(data.annotations) or not path.is_file():
            continue
        if data.annotations not in copies:
            content = read_coco(path)
            is_evaluated = any(one.is_evaluated for one in experiment.datasets if one.annotations == data.annotations)
            said = corrected(content, encoding_of(path), data.images, is_evaluated)
            copies[data.annotations] = data.annotations
            if said:
                number = numbers[data.split] or ''
                numbers[data.split] += 1
                copy = out.with_suffix(f'.{data.split}{number}.json')
                content.setdefault(SPLIT_OF, str(path.resolve()))
                write_beside({copy: json.dumps(content)}, force, stack)
                copies[data.annotations] = str(copy.resolve())
                notes.append(f'{copy} is a copy of {path} that the frameworks can read: {", ".join(said)}')
        if copies[data.annotations] != data.annotations:
            for evaluator in dicts(experiment.config.get(f'{data.split}_evaluator')):
                compared = evaluator.get('ann_file')
                if compared and os.path.realpath(compared) == os.path.realpath(data.annotations):
                    evaluator.ann_file = copies[data.annotations]
            data.entry.ann_file = copies[data.annotations]
    return notes


def corrected(content: Any, encoding: str, images: str, is_evaluated: bool) -> list[str]:
    """Correct the content of a file of annotations in place, keep its meaning, and return what the new content has.

    Annotations that pycocotools could not evaluate by their ids are numbered from 1, boxes hold the rectangles that
    CVAT turns after it has written them, and names of files get the Unicode form that they have on the disk.
    """
    said = []
    if encoding != 'utf-8':
        said.append(f'UTF-8 without a byte order mark instead of {encoding}')
    if 'annotations' in content and content['annotations'] is None:
        content['annotations'] = []
        said.append('an empty list of annotations instead of null')
    annotations = content.get('annotations') or []
    ids = [entry['id'] for entry in annotations]
    # COCO's evaluation takes 0 for 'no match', and needs whole numbers.
    are_positive = all(type(number) is int and number > 0 for number in ids)
    if is_evaluated and not are_positive and len({*ids}) == len(ids):
        content['annotations'] = _numbered(annotations)
        said.append('annotations numbered from 1')
    turned = [entry for entry in content.get('annotations') or () if _is_turned_by_cvat(entry)]
    for entry in turned:
        entry['bbox'] = _around_turned(entry['bbox'], entry['attributes'].pop('rotation'))
    if turned:
        said.append(f'{len(turned)} boxes around rectangles that CVAT turned (attributes.rotation)')
    renamed = 0
    for image in content['images']:
        name = name_on_disk(images, image['file_name'])
        renamed += name != image['file_name']
        image['file_name'] = name
    if renamed:
        said.append(f'names of files in the Unicode form that they have on the disk ({renamed})')
    return said


def _is_turned_by_cvat(annotation: Any) -> bool:
    attributes, box = annotation.get('attributes'), annotation.get('bbox')
    has_turn = isinstance(attributes, dict) and bool(turn_of({'attributes': attributes})) and 'rotation' in attributes
    return has_turn and not annotation.get('segmentation') and isinstance(box, list) and len(box) == 4


def _around_turned(box: Sequence[float], degrees: float) -> list[float]:
    """Return the box, as x, y, width and height, around a rectangle that is turned about its centre."""
    x, y, width, height = box
    cosine, sine = abs(math.cos(math.radians(degrees))), abs(math.sin(math.radians(degrees)))
    outer_width, outer_height = width * cosine + height * sine, width * sine + height * cosine
    return [x + (width - outer_width) / 2, y + (height - outer_height) / 2, outer_width, outer_height]


def _numbered(annotations: Sequence[Any]) -> list[Any]:
    return [{**one, 'id': number} for number, one in enumerate(annotations, 1)]


def split_annotations(path: Path, images: str, share: float, group: str | None, out: Path) -> dict[Path, str]:
    """Return the texts of two files beside the config ``out`` that list the images of each part, with annotations."""
    content = read_coco(path)
    content[SPLIT_OF] = str(path.resolve())
    corrected(content, encoding_of(path), images, is_evaluated=True)
    # The entries of one file, under several ids, are in one part.
    names = [image['file_name'] for image in content['images']]
    train_images, val_images = halves(content['images'], groups_of(names, group), share)
    val_ids = {image['id'] for image in val_images}
    annotations = content.get('annotations') or []
    if len({entry['id'] for entry in annotations}) < len(annotations):
        annotations = _numbered(annotations)
    # Annotations of no image stay in the training part, where they are found.
    of_train = [entry for entry in annotations if entry['image_id'] not in val_ids]
    of_val = [entry for entry in annotations if entry['image_id'] in val_ids]
    parts = {'train': (train_images, of_train), 'val': (val_images, of_val)}
    return {
        out.with_suffix(f'.{part}.json'): json.dumps({**content, 'images': images, 'annotations': annotations})
        for part, (images, annotations) in parts.items()
    }


def split_names(names: Sequence[str], share: float, group: str | None, out: Path) -> dict[Path, str]:
    """Return the texts of two files beside the config ``out`` that list the names of each part."""
    parts = zip(('train', 'val'), halves(names, groups_of(names, group), share), strict=True)
    return {out.with_suffix(f'.{part}.txt'): ''.join(f'{name}\n' for name in listed) for part, listed in parts}


def groups_of(names: Sequence[str], pattern: str | None) -> list[str]:
    """Return the group of each name: the match of the pattern or of its parenthesis; without one, the name."""
    if pattern is None:
        return list(names)
    try:
        found = [re.search(pattern, name) for name in names]
    except re.error as error:
        raise ValueError(
            f'--val-group must be a regular expression such as "video\\d+", got {pattern!r}: {error}'
        ) from None
    without = [name for name, match in zip(names, found, strict=True) if not match]
    if without:
        raise ValueError(
            f'--val-group {pattern!r} must match in the name of every image, but {len(without)} of {len(names)} have '
            f'no match, such as {without[0]}'
        )
    return [match[1] if match.re.groups else match[0] for match in found if match]


def halves(images: Sequence[Any], groups: Sequence[str], share: float) -> tuple[list[Any], list[Any]]:
    """Return images for training, and a random share of them for validation, both in their order.

    Images of one group are in one part, so that the share is reached or exceeded.
    """
    names = list(dict.fromkeys(groups))
    sizes = dict.fromkeys(names, 0)
    for name in groups:
        sizes[name] += 1
    wanted = max(1, round(share * len(images)))
    drawn: set[str] = set()
    count = 0
    for index in np.random.default_rng(0).permutation(len(names)):
        if count >= wanted:
            break
        drawn.add(names[index])
        count += sizes[names[index]]
    if count >= len(images):
        kind = f'{len(images)} images' if len(names) == len(images) else f'{len(names)} groups of images'
        raise ValueError(f'--val-share {share} of {kind} leaves none for training')
    parts: tuple[list[Any], list[Any]] = ([], [])
    for image, name in zip(images, groups, strict=True):
        parts[name in drawn].append(image)
    return parts


def share_of(value: Any) -> float:
    """Return the value of ``--val-share``."""
    share = checks.number('--val-share', value)
    if not 0 < share < 1:
        raise ValueError(f'--val-share must be between 0 and 1, got {share}')
    return share

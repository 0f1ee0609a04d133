"""Predictions of detectors in COCO's formats, which evaluation and labelling tools read."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from swin_dense.utils import checks
from swin_dense.workbench.runtime import masks

RECORD_FORMAT = 1  # version of records, in `format`; raised when an earlier version of this package would misread one


class Coco:
    """Collects records of detectors, and returns them as results and as annotations of COCO.

    Args:
        classes: class names by label.
        known: annotations of COCO, as loaded from JSON, whose ids of images and categories are used; None counts both
            from 1.

    Raises:
        ValueError: ``known`` is not in COCO's format, or lacks one of the classes.
    """

    def __init__(self, classes: Sequence[str], known: Mapping[str, Any] | None = None) -> None:
        self._categories: list[dict[str, Any]] = [{'id': i, 'name': name} for i, name in enumerate(classes, 1)]
        self._known: dict[str, list[dict[str, Any]]] | None = None  # images by the last part of their file name
        if known is not None:
            _check_coco(known)
            by_name = {category['name']: category for category in known['categories']}
            missing = [name for name in classes if name not in by_name]
            if missing:
                raise ValueError(
                    f'the annotations have no category {missing[0]!r}, which the model predicts; they have '
                    f'{", ".join(by_name)}'
                )
            self._categories = [by_name[name] for name in classes]
            self._known = {}
            for image in known['images']:
                self._known.setdefault(PurePath(image['file_name']).name, []).append(image)
        self._images: list[dict[str, Any]] = []
        self._annotations: list[dict[str, Any]] = []
        self._entries: dict[str, dict[str, Any]] = {}  # id and file name, by image
        self._owners: dict[str, str] = {}  # images by file name

    def entry_of(self, image: str, name: str | None = None) -> dict[str, Any] | None:
        """Return ``id`` and ``file_name`` of an image, or None if it is not among the known annotations.

        A known entry is that of an image if its file name ends the path of the image, or ends in ``name``. Of several
        entries, it is the one whose file name is ``name``, else that has the most folders in common with the path.

        Args:
            image: path of the image.
            name: its path below the folder of the data set; None is its file name.

        Raises:
            ValueError: several known entries fit equally well, or the entry is that of another image too.
        """
        if image not in self._entries:
            name = name or PurePath(image).name
            entry: dict[str, Any] | None = {'id': len(self._entries) + 1, 'file_name': name}
            if self._known is not None:
                entry = _fitting(self._known.get(PurePath(image).name, []), image, name)
            if entry is None:
                return None
            self._entries[image] = {key: entry[key] for key in ('id', 'file_name')}
            other = self._owners.setdefault(entry['file_name'], image)
            if other != image:
                raise ValueError(
                    f'{other} and {image} are both {entry["file_name"]}, so one would replace the other; leave one out'
                )
        return self._entries[image]

    def add(self, record: Mapping[str, Any], name: str | None = None) -> None:
        """Add the record of an image, from ``Prediction.record`` or the JSON of ``swin-dense predict``.

        Args:
            record: the record.
            name: see :meth:`entry_of`.

        Raises:
            ValueError: the record has no instances, or is of version 0.1 or of a later version of this package, or
                there is not one entry for its image.
        """
        checks.file_format(f'the record of {record["image"]}', record, RECORD_FORMAT)
        if 'instances' not in record:
            raise ValueError("COCO's format lists instances, but this model predicts none; use a detector")
        if 'height' not in record:
            raise ValueError(
                f'the record of {record["image"]} has no height and width, as in version 0.1; predict again'
            )
        entry = self.entry_of(record['image'] or f'{len(self._images) + 1}', name)
        if entry is None:
            raise ValueError(
                f'the annotations have no image {name or record["image"]}; give those of this folder, or none'
            )
        number = entry['id']
        self._images.append({**entry, 'height': record['height'], 'width': record['width']})
        for instance in record['instances']:
            x1, y1, x2, y2 = instance['box']
            annotation = {
                'id': len(self._annotations) + 1,
                'image_id': number,
                'category_id': self._categories[instance['label']]['id'],
                'bbox': [x1, y1, x2 - x1, y2 - y1],
                'score': instance['score'],
                'iscrowd': 0,
                'area': (x2 - x1) * (y2 - y1),
            }
            if 'mask' in instance:
                annotation.update(segmentation=instance['mask'], area=masks.area(instance['mask']))
            self._annotations.append(annotation)

    def results(self) -> list[dict[str, Any]]:
        """Return the list that ``pycocotools.coco.COCO.loadRes`` reads."""
        kept = ('image_id', 'category_id', 'bbox', 'score', 'segmentation')
        return [{key: one[key] for key in kept if key in one} for one in self._annotations]

    def annotations(self) -> dict[str, Any]:
        """Return a data set with the predictions as annotations, to be corrected in a labelling tool."""
        return {'images': self._images, 'annotations': self._annotations, 'categories': self._categories}


def _check_coco(known: Any) -> None:
    """Raise ValueError if the content of a file is not annotations of COCO."""
    needed = {'images': {'id', 'file_name'}, 'categories': {'id', 'name'}}
    for name, keys in needed.items():
        entries = known.get(name) if isinstance(known, Mapping) else None
        if not isinstance(entries, list) or any(not isinstance(one, Mapping) or keys - one.keys() for one in entries):
            raise ValueError(
                f"the annotations are not in COCO's format: they must have {name}, a list of objects with "
                f'{" and ".join(sorted(keys))}'
            )


def _fitting(entries: Sequence[dict[str, Any]], image: str, name: str) -> dict[str, Any] | None:
    """Return the entry of an image among those with its last name; see :meth:`Coco.entry_of`."""
    path, own = PurePath(os.path.abspath(image)).parts, PurePath(name).parts
    found: dict[float, list[dict[str, Any]]] = {}
    for entry in entries:
        parts = PurePath(entry['file_name']).parts
        if parts == own:
            found.setdefault(math.inf, []).append(entry)
        elif _in_common(parts, path) == len(parts) or _in_common(parts, own) == len(own):
            found.setdefault(_in_common(parts, path), []).append(entry)
    if not found:
        return None
    best, *others = found[max(found)]
    if others:
        raise ValueError(
            f'{image} may be {best["file_name"]} or {others[0]["file_name"]} of the annotations; give the folder '
            'that the names in the annotations start from'
        )
    return best


def _in_common(first: Sequence[str], second: Sequence[str]) -> int:
    """Return how many parts at the end of two paths are equal."""
    pairs = zip(reversed(first), reversed(second), strict=False)
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))

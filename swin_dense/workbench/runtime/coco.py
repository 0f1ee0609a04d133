"""Predictions of detectors in COCO's formats, which evaluation and labelling tools read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
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
        ValueError: ``known`` lacks one of the classes.
    """

    def __init__(self, classes: Sequence[str], known: Mapping[str, Any] | None = None) -> None:
        self._image_ids: dict[str, int] | None = None
        self._categories: list[dict[str, Any]] = [{'id': i, 'name': name} for i, name in enumerate(classes, 1)]
        if known is not None:
            by_name = {category['name']: category for category in known['categories']}
            missing = [name for name in classes if name not in by_name]
            if missing:
                raise ValueError(
                    f'the annotations have no category {missing[0]!r}, which the model predicts; they have '
                    f'{", ".join(by_name)}'
                )
            self._categories = [by_name[name] for name in classes]
            self._image_ids = {Path(image['file_name']).name: image['id'] for image in known['images']}
        self._images: list[dict[str, Any]] = []
        self._annotations: list[dict[str, Any]] = []

    def add(self, record: Mapping[str, Any]) -> None:
        """Add the record of an image, from ``Prediction.record`` or the JSON of ``swin-dense predict``.

        Raises:
            ValueError: the record has no instances, or is of version 0.1 or of a later version of this package, or its
                image is not among the known annotations.
        """
        checks.file_format(f'the record of {record["image"]}', record, RECORD_FORMAT)
        if 'instances' not in record:
            raise ValueError("COCO's format lists instances, but this model predicts none; use a detector")
        if 'height' not in record:
            raise ValueError(
                f'the record of {record["image"]} has no height and width, as in version 0.1; predict again'
            )
        name = Path(record['image'] or f'{len(self._images) + 1}').name
        number = len(self._images) + 1
        if self._image_ids is not None:
            if name not in self._image_ids:
                raise ValueError(f'the annotations have no image {name}; give those of this folder, or none')
            number = self._image_ids[name]
        self._images.append({'id': number, 'file_name': name, 'height': record['height'], 'width': record['width']})
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

"""Support for segmentation masks of mmseg whose values are no class indices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

IGNORED_LABEL = 255  # losses and metrics of mmseg ignore this label


class MapMaskValues:
    """Map mask values to class indices, for masks such as those of 0 and 255.

    Values that are not listed never become a class: those below the number of classes are mapped to 255, which losses
    and metrics ignore; larger ones stay, and are an error of the loss unless :class:`IgnoreMaskValues` lists them.

    Must come before ``LoadAnnotations``, which applies the mapping. Has no effect in a pipeline without it.

    Args:
        values: pixel value in the mask files of each class, in the order of the classes, 0 to 255.
    """

    def __init__(self, values: Sequence[int]) -> None:
        self.values = tuple(values)

    def __call__(self, results: dict[str, Any]) -> dict[str, Any]:
        """Add the values to ``label_map``, which ``LoadAnnotations`` applies."""
        results['label_map'] = {**(results.get('label_map') or {}), **self._labels()}
        return results

    def _labels(self) -> dict[int, int]:
        labels = dict.fromkeys(range(len(self.values)), IGNORED_LABEL)
        labels.update({value: index for index, value in enumerate(self.values)})
        return labels

    def __repr__(self) -> str:
        return f'{type(self).__name__}(values={self.values})'


class IgnoreMaskValues(MapMaskValues):
    """Map mask values that are no class to 255, which losses and metrics ignore, as :class:`MapMaskValues` does."""

    def _labels(self) -> dict[int, int]:
        return dict.fromkeys(self.values, IGNORED_LABEL)

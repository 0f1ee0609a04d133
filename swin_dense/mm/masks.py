"""Masks whose values are not all classes, for segmentors of mmseg."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmengine.registry import TRANSFORMS

IGNORED = 255  # by the losses and metrics of mmseg


@TRANSFORMS.register_module()
class IgnoreMaskValues:
    """Turn values of masks that are no class into 255, which losses and metrics leave out.

    Stands before ``LoadAnnotations`` in a pipeline, which does the turning, and in a pipeline without does nothing.

    Args:
        values: of pixels in the mask files.
    """

    def __init__(self, values: Sequence[int]) -> None:
        self.values = tuple(values)

    def __call__(self, results: dict[str, Any]) -> dict[str, Any]:
        """Add the values to what ``LoadAnnotations`` turns into other labels."""
        results['label_map'] = {**(results.get('label_map') or {}), **dict.fromkeys(self.values, IGNORED)}
        return results

    def __repr__(self) -> str:
        return f'{type(self).__name__}(values={self.values})'

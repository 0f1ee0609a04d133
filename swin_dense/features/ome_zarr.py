"""Read and write the OME-Zarr (OME-NGFF) metadata of the levels of an image in a zarr group."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from swin_dense.utils import checks
from swin_dense.utils.pixels import ImageError

AXES = ('c', 'y', 'x')
_VERSION = '0.5'
_OLDEST_AXES = 'tczyx'  # fixed before version 0.3, so not stored in the metadata


def describe_levels(strides: Iterable[int]) -> dict[str, Any]:
    """Return the group attributes that declare arrays (C, H, W), named by their strides, as levels of one image.

    The unit is one pixel of the input image. A cell of stride s covers s pixels, so the centre of the first cell lies
    (s - 1) / 2 pixels from the centre of the first pixel.

    Source: https://ngff.openmicroscopy.org/0.5
    """
    datasets = [
        {
            'path': str(stride),
            'coordinateTransformations': [
                {'type': 'scale', 'scale': [1.0, float(stride), float(stride)]},
                {'type': 'translation', 'translation': [0.0, (stride - 1) / 2, (stride - 1) / 2]},
            ],
        }
        for stride in sorted(strides)
    ]
    axes = [{'name': name, 'type': 'channel' if name == 'c' else 'space'} for name in AXES]
    multiscale = {'name': 'feature pyramid', 'axes': axes, 'datasets': datasets}
    return {'ome': {'version': _VERSION, 'multiscales': [multiscale]}}


class Plane:
    """One plane of the image in a zarr group, at the highest resolution; slicing reads pixels (h, w) or (h, w, C).

    Args:
        group: an OME-Zarr group up to version 0.5, or the root of a bioformats2raw output, whose first image is read.
        page: index of the plane, counted from 0 over the depth and then over time; None for the only one.
    """

    def __init__(self, group: Any, page: int | None) -> None:
        if 'bioformats2raw.layout' in group.attrs.get('ome', group.attrs):
            group = group['0']
        multiscales = group.attrs.get('ome', group.attrs).get('multiscales')
        if not multiscales:
            raise ImageError(
                'it is a zarr group without an OME-Zarr image; give the path of an image or array inside it'
            )
        array = group[multiscales[0]['datasets'][0]['path']]
        axes = multiscales[0].get('axes') or _OLDEST_AXES
        axes = [axis if isinstance(axis, str) else axis['name'] for axis in axes]
        if len(axes) != len(array.shape) or axes[-2:] != ['y', 'x'] or 0 in array.shape:
            raise ImageError(f'it has the axes {"".join(axes)} for an array of shape {array.shape}, which is invalid')
        self._has_channels = 'c' in axes
        others = [axis for axis, name in enumerate(axes[:-2]) if name != 'c']
        planes = [array.shape[axis] for axis in others]
        count = math.prod(planes)
        if page is None and count > 1:
            given = checks.argument('page', ...)
            raise ImageError(f'it has {count} pages; give {given}, counted from 0, to read one of them')
        if page is not None and page >= count:
            raise ImageError(f'it has {count} pages, counted from 0, got {checks.argument("page", page)}')
        self._index: list[Any] = [slice(None)] * (len(axes) - 2)
        positions = np.unravel_index(page or 0, planes) if planes else ()
        for axis, position in zip(others, positions, strict=True):
            self._index[axis] = int(position)
        self._array = array
        self.shape = (array.shape[-2], array.shape[-1])

    def __getitem__(self, box: tuple[slice, slice]) -> np.ndarray:
        pixels = np.asarray(self._array[(*self._index, *box)])
        return np.moveaxis(pixels, 0, 2) if self._has_channels else pixels

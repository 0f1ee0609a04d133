"""Read and write the OME-Zarr (OME-NGFF) metadata of the levels of an image in a zarr group."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from swin_dense.features.decode import ImageError
from swin_dense.ops.windows import Pair

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


def open_plane(group: Any, page: int, name: str) -> tuple[Pair, Callable[[int, int, int, int], np.ndarray]]:
    """Open one plane of the image in a zarr group, at the highest resolution.

    Args:
        group: an OME-Zarr group up to version 0.5, or the root of a bioformats2raw output, whose first image is read.
        page: index of the plane, counted from 0 over the depth and then over time.
        name: name of the image for messages.

    Returns:
        (height, width), and a function from (top, left, bottom, right), half open, to pixels (h, w) or (h, w, C).

    Raises:
        ImageError: the group contains no image, or the page does not exist.
    """
    if 'bioformats2raw.layout' in group.attrs.get('ome', group.attrs):
        group = group['0']
    multiscales = group.attrs.get('ome', group.attrs).get('multiscales')
    if not multiscales:
        raise ImageError(
            f'{name} is a zarr group without an OME-Zarr image; give the path of an image or array inside it'
        )
    array = group[multiscales[0]['datasets'][0]['path']]
    axes = multiscales[0].get('axes') or _OLDEST_AXES
    axes = [axis if isinstance(axis, str) else axis['name'] for axis in axes]
    if len(axes) != len(array.shape) or axes[-2:] != ['y', 'x'] or 0 in array.shape:
        raise ImageError(f'{name} has the axes {"".join(axes)} for an array of shape {array.shape}, which is invalid')
    channel = axes.index('c') if 'c' in axes else None
    others = [axis for axis in range(len(axes) - 2) if axis != channel]
    planes = [array.shape[axis] for axis in others]
    if not 0 <= page < math.prod(planes):
        raise ImageError(f'{name} has {math.prod(planes)} pages, counted from 0, got page={page}')
    index: list[Any] = [slice(None)] * len(axes)
    for axis, position in zip(others, np.unravel_index(page, planes) if planes else (), strict=True):
        index[axis] = int(position)

    def read(top: int, left: int, bottom: int, right: int) -> np.ndarray:
        pixels = np.asarray(array[(*index[:-2], slice(top, bottom), slice(left, right))])
        return pixels if channel is None else np.moveaxis(pixels, 0, 2)

    return (array.shape[-2], array.shape[-1]), read

"""OME-Zarr (OME-NGFF): what a zarr group says of the levels of an image in it, written and read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from swin_dense.features.decode import ImageError
from swin_dense.ops.windows import Pair

AXES = ('c', 'y', 'x')
_VERSION = '0.5'
_OLDEST_AXES = 'tczyx'  # of every image before version 0.3, which does not say it


def describe_levels(strides: Iterable[int]) -> dict[str, Any]:
    """Return the attributes of a group that make its arrays, (C, H, W) under the names of their strides, one image.

    The unit is the pixel of the image that the features are of: the centre of the first cell of stride s lies in the
    midst of s pixels, (s - 1) / 2 beyond the centre of the first.

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
    """Return the (height, width) of the image of a zarr group at its highest resolution, and what reads a part of it.

    Args:
        group: of OME-Zarr up to 0.5, or the root of what bioformats2raw writes, of which the first image is taken.
        page: which of the planes that time and depth number, the depth first, counted from 0.
        name: for messages.

    Returns:
        The size, and a function of (top, left, bottom, right), half open, to pixels (h, w) or (h, w, C).

    Raises:
        ImageError: the group holds no image, or not this page.
    """
    if 'bioformats2raw.layout' in group.attrs.get('ome', group.attrs):
        group = group['0']
    multiscales = group.attrs.get('ome', group.attrs).get('multiscales')
    if not multiscales:
        raise ImageError(
            f'{name} is a zarr group that holds no image of OME-Zarr; give the path of an image or an array in it'
        )
    array = group[multiscales[0]['datasets'][0]['path']]
    axes = multiscales[0].get('axes') or _OLDEST_AXES
    axes = [axis if isinstance(axis, str) else axis['name'] for axis in axes]
    if len(axes) != len(array.shape) or axes[-2:] != ['y', 'x'] or 0 in array.shape:
        raise ImageError(f'{name} has the axes {"".join(axes)} for an array of the shape {array.shape}')
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

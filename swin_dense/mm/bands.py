"""Read images of any bands in a pipeline of mmdet or mmsegmentation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from swin_dense.images.normalization import Normalization, band_count, resolve_normalization
from swin_dense.images.pixels import ImageError, Pixels, naming
from swin_dense.images.reading import pixels_of


class LoadBands:
    """Load an image of any bands, such as a GeoTIFF, and normalise it; use it in place of ``LoadImageFromFile``.

    ``normalization`` is a dict of the arguments of :class:`swin_dense.features.Normalization`, or a name for
    :func:`swin_dense.features.preset`. The data preprocessor must not normalise again:
    ``data_preprocessor=dict(mean=None, std=None, bgr_to_rgb=False)``.

    Without ``bands``, all bands are read: as many as ``mean``, ``std`` or ``scale`` has numbers. Without such a list,
    the number is unknown, and an image whose last band is declared as opacity is an error, because programs such as
    GDAL declare the fourth band of any image so.

    Adds ``img`` (H, W, C) in float32, ``img_shape`` and ``ori_shape``; reads ``img_path``, or the stored values of an
    image (H, W, C) in ``img``.
    """

    def __init__(self, normalization: Mapping[str, Any] | Normalization | str) -> None:
        if isinstance(normalization, Mapping):
            normalization = Normalization(**normalization)
        self.normalization = resolve_normalization(normalization)

    def __call__(self, results: dict[str, Any]) -> dict[str, Any]:
        """Return the results with the image."""
        source = results.get('img', results.get('img_path'))
        with naming(source):
            img = self.read(pixels_of(source))
        return {**results, 'img': img, 'img_shape': img.shape[:2], 'ori_shape': img.shape[:2]}

    def read(self, pixels: Pixels) -> np.ndarray:
        """Return the normalised channels of decoded pixels, (H, W, C), float32."""
        img = self.normalization.prepare(self.stored(pixels))
        return np.ascontiguousarray(img.permute(1, 2, 0).numpy())

    def stored(self, pixels: Pixels) -> Tensor:
        """Return the bands of decoded pixels that are read, (C, H, W), with their values before normalisation."""
        how = self.normalization
        count = band_count(pixels, how.bands)
        lists = [numbers for numbers in (how.mean, how.std, how.scale) if isinstance(numbers, Sequence)]
        if how.bands is None and lists:
            count = len(lists[0])
        elif how.bands is None and pixels.has_alpha:
            raise ImageError(
                f'the last of its {count + 1} bands is declared as opacity (alpha), as GDAL does for near infrared '
                f'too; give normalization= of LoadBands bands={tuple(range(count))} to leave it out, or '
                f'bands={tuple(range(count + 1))} to read it'
            )
        return how.stored(pixels, count)

    def __repr__(self) -> str:
        return f'{type(self).__name__}({self.normalization})'

"""Predict an image, and write the results into files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from swin_dense.utils import checks
from swin_dense.utils.atomic import remove, write_json, written_whole
from swin_dense.utils.errors import is_out_of_memory
from swin_dense.utils.pixels import ImageError, name_of
from swin_dense.workbench.runtime.geotiff import label_file
from swin_dense.workbench.runtime.model import Prediction

_LARGEST_JPEG = 65500  # pixels of a side


def predict(
    predictor: Any, image: str, outputs: Mapping[str, Path], tile: int | None, overlap: int | None
) -> dict[str, Any]:
    """Predict an image, write the results, the JSON last, so that it marks complete results, and return the record.

    Args:
        predictor: a ``runtime.Model`` or a ``workbench.predict.Predictor``, which have the same methods.
        image: the file of the image.
        outputs: the file of each result: 'json', 'painted.jpg', 'labels.png', 'labels.tif' and 'panoptic.png'.
        tile: side of a tile in pixels; None for the whole image.
        overlap: overlap of tiles in pixels.
    """
    outputs['json'].parent.mkdir(parents=True, exist_ok=True)
    for path in outputs.values():  # those of an earlier run would seem to be of this one if the image fails
        remove(path)
    if tile is None:
        prediction = predictor.predict(image)
        _write_pictures(outputs, prediction)
    else:
        from PIL import Image

        Image.MAX_IMAGE_PIXELS = None  # PIL's limit, which images that need tiles exceed
        with label_file(outputs['labels.tif'], image) as make_labels:
            prediction = predictor.predict_tiles(image, tile, overlap, make_labels)
    write_json(outputs['json'], prediction.record)
    return prediction.record


def _write_pictures(outputs: Mapping[str, Path], prediction: Prediction) -> None:
    from PIL import Image  # not needed for arrays

    pictures = {}
    if prediction.painted is not None and max(prediction.painted.shape) <= _LARGEST_JPEG:
        pictures['painted.jpg'] = prediction.painted
    if prediction.labels is not None:  # PNG has integers of 8 and 16 bits
        dtype = 'uint8' if prediction.labels.max() < 256 else 'uint16'
        pictures['labels.png'] = prediction.labels.astype(dtype)
    if prediction.panoptic is not None:
        ids = np.where(
            np.isin(prediction.panoptic, [one['id'] for one in prediction.record['segments']]), prediction.panoptic, 0
        )
        pictures['panoptic.png'] = np.stack([ids % 256, ids // 256 % 256, ids // 256**2], 2).astype(np.uint8)
    for ending, pixels in pictures.items():
        with written_whole(outputs[ending]) as unfinished:
            Image.fromarray(pixels).save(unfinished.path, quality=95)


def reason(image: str, error: Exception) -> str:
    """Return why an image cannot be read or predicted."""
    if isinstance(error, (ImageError, FileNotFoundError)):
        return str(error)
    text = str(error) if isinstance(error, ValueError) else f'{type(error).__name__}: {error}'
    if is_out_of_memory(error):
        text = f'there is too little memory to predict it; use {checks.argument("tile", ...)}, or smaller tiles: {text}'
    return f'{name_of(image)}: {" ".join(text.split())}'

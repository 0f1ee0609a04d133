"""Predict an image that is too large for memory, or whose objects are too small for a resized one, tile by tile.

    python examples/predict_large.py scene.tif map.tif model.onnx               # a segmentor: a georeferenced map
    python examples/predict_large.py scene.tif found.json mine.py epoch_12.pth  # a detector: results of COCO

A model is a file of `swin-dense export`, for which the scene has three bands of 8 bits in the order RGB, or a config of
mmdet or mmsegmentation, of any bands, and a checkpoint. Needs rasterio, which reads GeoTIFF, JPEG, PNG and more, and
supervision for a detector.

Each tile passes the test pipeline of the model with its Resize: choose tiles of about the size of the training images.
With tiles and overlaps of multiples of 224, a Swin of window 7 divides a tile into the windows of the whole image. An
object that is no larger than the overlap lies whole in some tile.
"""

import json
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import rasterio
from rasterio.enums import ColorInterp, MaskFlags
from rasterio.windows import Window

from swin_dense import runtime
from swin_dense.utils.atomic import atomic_path, write_text

TILE, OVERLAP = 896, 224  # in pixels


def map_classes(model: Any, scene: str, out: str) -> None:
    """Write the class of each pixel as a GeoTIFF with the georeference of the scene.

    The largest value marks pixels without data in any of the bands that the model reads.
    """
    dtype = np.min_scalar_type(len(model.classes))
    no_data = np.iinfo(dtype).max
    with atomic_path(Path(out)) as unfinished, rasterio.open(scene) as image:
        whole = Window(0, 0, image.width, image.height)
        bands = range(image.count) if model.bands is None else model.bands
        place = {'crs': image.crs, 'transform': image.transform}
        stored = {'driver': 'GTiff', 'tiled': True, 'compress': 'deflate', 'bigtiff': 'if_safer'}
        band = {'width': image.width, 'height': image.height, 'count': 1, 'dtype': dtype, 'nodata': no_data}
        with rasterio.open(unfinished, 'w', **band, **place, **stored) as written:
            for top, left in product(range(0, image.height, TILE), range(0, image.width, TILE)):
                kept = Window(left, top, TILE, TILE).intersection(whole)
                side = TILE + 2 * OVERLAP
                seen = Window(left - OVERLAP, top - OVERLAP, side, side).intersection(whole)
                labels = model.predict(channels_last(image.read(window=seen)), paint=False).labels
                labels = np.where(has_data(image, bands, seen), labels, no_data).astype(dtype)
                row, column = top - seen.row_off, left - seen.col_off
                written.write(labels[row : row + kept.height, column : column + kept.width], 1, window=kept)


def has_data(image: Any, bands: Sequence[int], window: Window) -> np.ndarray:
    """Return where any of the bands, counted from 0, has data: (h, w), bool.

    A band of opacity is a mask unless it is one of them: GDAL declares the fourth band of any image of 8 bits so, also
    near infrared. The mask of rasterio's ``dataset_mask`` would be that band.
    """
    is_opacity_read = any(image.colorinterp[band] == ColorInterp.alpha for band in bands)
    found = np.zeros((window.height, window.width), bool)
    for band in bands:
        if is_opacity_read and MaskFlags.alpha in image.mask_flag_enums[band]:
            return np.ones_like(found)
        found |= image.read_masks(band + 1, window=window) > 0
    return found


def detect(model: Any, scene: str, out: str) -> None:
    """Write the instances in pixels of the scene, as a list that ``loadRes`` of pycocotools reads for image 1.

    Parts of an object that lies in two tiles are merged if they cover half of the smaller one, as in SAHI.
    """
    import supervision as sv
    from pycocotools import mask as run_lengths

    def detections(pixels: np.ndarray) -> sv.Detections:
        found = model(pixels)['instances']
        if not found:
            return sv.Detections.empty()
        masks = [run_lengths.decode(one['mask']) for one in found if 'mask' in one]
        return sv.Detections(
            xyxy=np.array([one['box'] for one in found], np.float32),
            confidence=np.array([one['score'] for one in found], np.float32),
            class_id=np.array([one['label'] for one in found]),
            mask=np.array(masks, bool) if masks else None,
        )

    slicer = sv.InferenceSlicer(
        detections,
        slice_wh=TILE + OVERLAP,
        overlap_wh=OVERLAP,
        overlap_filter=sv.OverlapFilter.NON_MAX_MERGE,
        overlap_metric=sv.OverlapMetric.IOS,
        compact_masks=True,  # or each mask would take a byte for every pixel of the scene
    )
    with rasterio.open(scene) as image:
        found = slicer(image)
    results = []
    for box, mask, score, label, _, _ in found:
        left, top, right, bottom = box.tolist()
        result = {'image_id': 1, 'category_id': int(label) + 1, 'score': float(score)}
        result['bbox'] = [left, top, right - left, bottom - top]
        if mask is not None:
            encoded = run_lengths.encode(np.asfortranarray(mask, np.uint8))
            result['segmentation'] = {**encoded, 'counts': encoded['counts'].decode()}
        results.append(result)
    write_text(Path(out), json.dumps(results))


def channels_last(bands: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(np.moveaxis(bands, 0, 2))


def load(files: list[str]) -> Any:
    if len(files) == 1:
        return runtime.load(files[0])
    from mmengine.config import Config

    from swin_dense.workbench.predict import Predictor

    return Predictor(Config.fromfile(files[0]), files[1])


if __name__ == '__main__':
    scene, out, *files = sys.argv[1:]
    model = load(files)
    predict = detect if model.is_detector else map_classes
    predict(model, scene, out)

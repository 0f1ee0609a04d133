"""Predict an image that is too large for memory, or whose objects are too small for a resized one, tile by tile.

    python examples/predict_large.py scene.tif out.tif model.onnx              # a segmentor: a georeferenced map
    python examples/predict_large.py scene.tif out.json mine.py epoch_12.pth   # a detector: results of COCO

A model is a file of `swin-dense export`, or a config, of any bands, and a checkpoint. A segmentor needs rasterio, a
detector supervision.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from pycocotools import mask

from swin_dense import runtime

TILE, OVERLAP = 1024, 256  # for a segmentor, multiples of 224 give a tile the windows of the image
NO_DATA = 255


def map_of_classes(model: Any, scene: str, out: str) -> None:
    import rasterio
    from rasterio.windows import Window

    with rasterio.open(scene) as image:
        profile = {**image.profile, 'driver': 'GTiff', 'count': 1, 'dtype': 'uint8', 'nodata': NO_DATA}
        profile.pop('photometric', None)
        with rasterio.open(out, 'w', **profile) as written:
            for top in range(0, image.height, TILE):
                for left in range(0, image.width, TILE):
                    bottom, right = min(top + TILE, image.height), min(left + TILE, image.width)
                    above, before = max(top - OVERLAP, 0), max(left - OVERLAP, 0)
                    seen = Window.from_slices(
                        (above, min(bottom + OVERLAP, image.height)), (before, min(right + OVERLAP, image.width))
                    )
                    pixels = np.ascontiguousarray(np.moveaxis(image.read(window=seen), 0, 2))
                    labels = np.where(
                        image.dataset_mask(window=seen), model.outputs(model.read(pixels)).labels, NO_DATA
                    )
                    kept = labels[top - above : bottom - above, left - before : right - before]
                    written.write(kept.astype('uint8'), 1, window=Window(left, top, right - left, bottom - top))


def detections(model: Any, scene: str, out: str) -> None:
    import cv2
    import supervision as sv

    def of_tile(pixels: np.ndarray) -> sv.Detections:
        found = model(np.ascontiguousarray(pixels[:, :, ::-1]))['instances']
        return sv.Detections(
            xyxy=np.array([one['box'] for one in found], np.float32).reshape(-1, 4),
            confidence=np.array([one['score'] for one in found], np.float32),
            class_id=np.array([one['label'] for one in found], int),
            mask=np.array([mask.decode(one['mask']) for one in found], bool) if found and 'mask' in found[0] else None,
        )

    slicer = sv.InferenceSlicer(of_tile, slice_wh=(TILE, TILE), overlap_wh=(OVERLAP, OVERLAP))
    found = slicer(cv2.imread(scene))
    boxes = [[float(x), float(y), float(right - x), float(bottom - y)] for x, y, right, bottom in found.xyxy]
    rows = zip(boxes, found.confidence.tolist(), found.class_id.tolist(), strict=True)
    listed = [{'image_id': 1, 'bbox': box, 'score': score, 'category_id': label + 1} for box, score, label in rows]
    Path(out).write_text(json.dumps(listed))


if __name__ == '__main__':
    scene, out, *files = sys.argv[1:]
    if len(files) == 1:
        model = runtime.load(*files)
    else:
        from mmengine.config import Config

        from swin_dense.workbench.predict import Predictor

        model = Predictor(Config.fromfile(files[0]), files[1])
    (detections if model.is_detector else map_of_classes)(model, scene, out)

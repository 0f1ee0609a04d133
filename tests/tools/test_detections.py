"""benchmarks/detections.py with predictions of a known place."""

import json
import sys

import numpy as np
import pytest
from PIL import Image

coco_masks = pytest.importorskip('pycocotools.mask')
detections = pytest.importorskip('benchmarks.detections', exc_type=ImportError)  # of a library that it draws with

LEFT, TOP, RIGHT, BOTTOM = 10, 20, 30, 60


def found(photograph):
    """Return one instance: a full rectangle."""
    mask = np.zeros(photograph.shape[:2], np.uint8, 'F')
    mask[TOP:BOTTOM, LEFT:RIGHT] = 1
    one = {'box': [LEFT, TOP, RIGHT, BOTTOM], 'score': 0.9, 'mask': coco_masks.encode(mask)}
    return {'instances': [one]}


def test_boxes_and_masks_lie_on_the_pixels_that_they_name():
    """``imshow`` centres pixel 0 at 0, so an object that begins with pixel 10 begins at 9.5."""
    axis = detections.plt.figure().add_subplot()
    detections.draw(axis, found(np.zeros((80, 70, 3), np.uint8))['instances'])
    (rectangle,), (picture,) = axis.patches, axis.images
    assert rectangle.get_bbox().extents.tolist() == [LEFT - 0.5, TOP - 0.5, RIGHT - 0.5, BOTTOM - 0.5]
    rows, columns = np.nonzero(picture.get_array()[..., 3])
    assert tuple(picture.get_extent()) == (-0.5, 69.5, 79.5, -0.5)
    assert (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1) == (LEFT, TOP, RIGHT, BOTTOM)


def test_the_picture_has_the_chosen_photographs_and_counts(tmp_path, monkeypatch):
    names = [f'{beginning}0.png' for beginning in detections.VALIDATION] + ['another.png']
    (tmp_path / 'val').mkdir()
    for name in names:
        Image.new('RGB', (90, 80)).save(tmp_path / 'val' / name)
    images = [{'id': index, 'file_name': name} for index, name in enumerate(names)]
    annotations = [{'image_id': 0}, {'image_id': 0}, {'image_id': 1}]
    (tmp_path / 'val.json').write_text(json.dumps({'images': images, 'annotations': annotations}))
    titles = list(detections.read(tmp_path))
    assert [title.rpartition(': ')[2] for title in titles] == ['2 nuclei', '1 nuclei', 'another laboratory and stain']
    monkeypatch.setattr(detections.runtime, 'load', lambda model, score: found)
    monkeypatch.setattr(sys, 'argv', ['detections.py', 'model.onnx', str(tmp_path), '--out', str(tmp_path / 'a.png')])
    detections.main()
    assert Image.open(tmp_path / 'a.png').convert('L').getextrema() == (0, 255)

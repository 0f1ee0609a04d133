"""Boxes and masks that were written as other numbers than those of their format are told by what fits."""

from types import SimpleNamespace

import numpy as np
import pytest
from pycocotools.mask import encode

from swin_dense.workbench.checking.readings import check_places, places_of
from swin_dense.workbench.checking.stated import StatedFile, StatedObject

COUNT = 40
SIZES = [(160, 90), (80, 120), (200, 140)]


def sound(overhang=0):
    """Return random boxes (left, top, right, bottom), of which the first reach beyond their image, and sizes."""
    generator = np.random.default_rng(1)
    sizes = np.array(SIZES)[generator.integers(0, 3, COUNT)]
    low = generator.random((COUNT, 2)) * (sizes - 50)
    boxes = np.hstack([low, low + 20 + 30 * generator.random((COUNT, 2))])
    boxes[:overhang, 2] = sizes[:overhang, 0] + 9
    return boxes, sizes


def checked(boxes, sizes, polygons=None, categories=True):
    """Check boxes as they are stated, with corners of masks or with segmentations, and return what is said."""
    files = {}
    for index, (box, (width, height)) in enumerate(zip(boxes, sizes, strict=True)):
        entry = {'bbox': box.tolist()}
        if polygons is not None:
            entry['segmentation'] = polygons[index]
        if categories:
            box = [*box[:2], *(box[:2] + box[2:])]
        file = files[f'{index}.jpg'] = StatedFile(f'{index}.jpg', [{'width': width, 'height': height}])
        file.objects.append(StatedObject(file.path, 'a', tuple(box), entry))
    stated = SimpleNamespace(name='a.json', categories={1: 'a'} if categories else {}, files=files)
    source = SimpleNamespace(stated=stated)
    places = places_of(source, [one for file in files.values() for one in file.objects])
    try:
        check_places(source, places)
    except ValueError as error:
        return str(error)
    return ''


def sides(boxes):
    return np.hstack([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]])


def polygons_of(boxes):
    return [[[left, top, right, top, right, bottom, left, bottom]] for left, top, right, bottom in boxes.tolist()]


def by_rows(boxes, sizes):
    """Return run lengths along rows, of masks that fill their boxes."""
    segmentations = []
    for box, (width, height) in zip(boxes.round().astype(int), sizes, strict=True):
        mask = np.zeros((height, width), np.uint8)
        mask[box[1] : box[3], box[0] : box[2]] = 1
        along_rows = mask.ravel().reshape(mask.shape, order='F')
        text = encode(np.asfortranarray(along_rows))['counts'].decode()
        segmentations.append({'size': [int(height), int(width)], 'counts': text})
    return segmentations


@pytest.mark.parametrize('overhang', [0, 3, 30])
@pytest.mark.parametrize('with_masks', [False, True])
def test_sound_boxes_are_read_as_they_are(overhang, with_masks):
    boxes, sizes = sound(overhang)
    polygons = polygons_of(boxes) if with_masks else None
    assert checked(sides(boxes), sizes, polygons) == ''
    assert checked(boxes, sizes, categories=False) == ''


CENTRES = 'boxes are read as centre x, centre y, width, height'


@pytest.mark.parametrize(
    ('damage', 'said'),
    [
        (lambda box, size: box, 'boxes are read as x1, y1, x2, y2; write x, y, width, height'),
        (lambda box, size: sides(box) + np.hstack([sides(box)[:, 2:] / 2, 0 * size]), f'{CENTRES}; write x, y'),
        (lambda box, size: sides(box)[:, [1, 0, 3, 2]], 'boxes are read as y, x, height, width; write x, y'),
        (lambda box, size: box[:, [1, 0, 3, 2]], 'boxes are read as y1, x1, y2, x2; write x, y, width, height'),
        (lambda box, size: sides(box) / np.hstack([size, size]), 'as x, y, width, height in shares of the image'),
        (lambda box, size: box / np.hstack([size, size]), 'as x1, y1, x2, y2 in shares of the image; write x, y'),
    ],
)
@pytest.mark.parametrize('with_masks', [False, True])
def test_boxes_of_other_numbers(damage, said, with_masks):
    boxes, sizes = sound()
    told = checked(damage(boxes, sizes), sizes, polygons_of(boxes) if with_masks else None)
    assert f'but all do if {said}' in told or f'but all do if boxes are read {said}' in told


@pytest.mark.parametrize(
    ('damage', 'said'),
    [
        (lambda box: box[:, [1, 0, 3, 2]], 'y1, x1, y2, x2'),
        (lambda box: sides(box), 'x, y, width, height'),
    ],
)
def test_corners_of_other_numbers(damage, said):
    boxes, sizes = sound()
    assert f'boxes are read as {said}; write x1, y1, x2, y2' in checked(damage(boxes), sizes, categories=False)


def test_masks_of_other_numbers():
    boxes, sizes = sound()
    along_columns = polygons_of(boxes[:, [1, 0, 3, 2]])
    for segmentations in (along_columns, by_rows(boxes, sizes)):
        assert 'masks are read as y, x, or RLE along rows; write x, y' in checked(sides(boxes), sizes, segmentations)
    shares = polygons_of(boxes / np.hstack([sizes, sizes]))
    assert 'masks are read as shares of the image; write pixels' in checked(sides(boxes), sizes, shares)


def test_boxes_of_another_image():
    """Of an image that is smaller, or of the next one: no reading fits."""
    boxes, sizes = sound()
    said = checked(sides(boxes), sizes // 2)
    assert 'lie outside of their image; write those of this image' in said
    boxes[3:] = np.array([1, 1, 9, 9])
    assert checked(sides(boxes), sizes // 2) == ''


def test_noise_does_not_hide_the_reading():
    boxes, sizes = sound()
    boxes[0] = [-50, 4, 10, 10]
    assert 'but all but 1 do if boxes are read as x1, y1, x2, y2' in checked(boxes, sizes)

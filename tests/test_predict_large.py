"""examples/predict_large.py gives each pixel and each object of a scene once, at its place, whatever the tiles are."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from tests.conftest import IfInstalled, needs
from tests.examples import load_example

pytestmark = [needs('rasterio'), needs('supervision')]
coco_mask = IfInstalled('pycocotools.mask')
cv2 = IfInstalled('cv2')
rasterio = IfInstalled('rasterio')
HEIGHT, WIDTH = 200, 260
# x1, y1, x2, y2 of objects: inside a tile of 64 pixels, across one of its borders, across a corner, at the edge.
BOXES = [
    (5, 6, 25, 20),
    (50, 10, 80, 40),
    (110, 100, 140, 141),
    (180, 120, 212, 150),
    (230, 170, 260, 200),
]


class Segmentor:
    """Gives a pixel the class that is stored in its first band."""

    classes = ('a', 'b', 'c')
    bands = None
    is_detector = False
    largest = 0

    def predict(self, pixels, paint):
        self.largest = max(self.largest, *pixels.shape[:2])
        return SimpleNamespace(labels=pixels[:, :, 0].astype(np.int32))


class Detector:
    """Finds each connected region that is not black, of the class that is its colour."""

    is_detector = True

    def __call__(self, pixels):
        _, regions = cv2.connectedComponents((pixels[:, :, 0] > 0).astype(np.uint8))
        masks = [regions == one for one in range(1, regions.max() + 1)]
        return {'instances': [self.instance(pixels, mask) for mask in masks]}

    def instance(self, pixels, mask):
        """Score a part of an object higher than the whole, which must replace it nevertheless."""
        from swin_dense.workbench.runtime.instances import encode_rle  # which the core lacks

        rows, columns = mask.nonzero()
        return {
            'box': [int(columns.min()), int(rows.min()), int(columns.max()) + 1, int(rows.max()) + 1],
            'score': 0.9 - mask.sum() / 1e4,
            'label': int(pixels[rows[0], columns[0], 0]) - 1,
            'mask': encode_rle(mask),
        }


@pytest.fixture
def example(monkeypatch):
    example = load_example('predict_large')
    monkeypatch.setattr(example, 'TILE', 64)
    monkeypatch.setattr(example, 'OVERLAP', 48)
    return example


@pytest.fixture
def scene(tmp_path):
    return tmp_path / 'scene.tif'


def write(path, bands, **options):
    count, height, width = bands.shape
    size = {'width': width, 'height': height, 'count': count, 'dtype': bands.dtype}
    with rasterio.open(
        path,
        'w',
        driver='GTiff',
        **size,
        **options,
    ) as file:
        file.write(bands)


def mapped(example, model, scene):
    example.map_classes(model, str(scene), str(scene.with_name('map.tif')))
    return rasterio.open(scene.with_name('map.tif'))


def detected(example, scene):
    out = scene.with_name('found.json')
    example.detect(Detector(), str(scene), str(out))
    return json.loads(out.read_text())


def test_a_map_has_the_class_of_every_pixel_and_the_place_of_the_scene(example, scene):
    bands = np.random.default_rng(0).integers(0, 3, (3, HEIGHT, WIDTH), dtype=np.uint16)
    bands[:, 30:40, 50:90] = 9  # no data
    place = {'crs': 'EPSG:32632', 'transform': rasterio.transform.from_origin(6e5, 5e6, 10, 10)}
    write(scene, bands, nodata=9, **place)
    model = Segmentor()
    with mapped(example, model, scene) as written:
        assert np.array_equal(written.read(1), np.where(bands[0] == 9, 255, bands[0]))
        assert (written.crs, written.transform) == (place['crs'], place['transform'])
        assert (written.nodata, written.dtypes) == (255, ('uint8',))
    assert model.largest == 64 + 2 * 48
    assert sorted(path.name for path in scene.parent.iterdir()) == ['map.tif', 'scene.tif']


SHOWN = {'photometric': 'MINISBLACK'}  # without it, GDAL declares the fourth band of 8 bits as opacity


@pytest.mark.parametrize(
    ('read', 'options', 'has_data'),
    [
        ((0, 1, 2, 3), {}, lambda bands: bands[0] >= 0),
        ((0, 1, 2), {}, lambda bands: bands[3] > 0),
        ((0, 1, 2, 3), {'nodata': 0}, lambda bands: bands.any(0)),
        ((0, 1, 2, 3), {'nodata': 0, **SHOWN}, lambda bands: bands.any(0)),
        ((1, 2), {'nodata': 0, **SHOWN}, lambda bands: bands[1:3].any(0)),
        (None, SHOWN, lambda bands: bands[0] >= 0),
    ],
)
def test_a_band_that_the_model_reads_is_no_mask(example, scene, read, options, has_data):
    bands = np.random.default_rng(0).integers(1, 3, (4, 40, 50), dtype=np.uint8)
    for band in range(4):
        bands[band, 8 * band :, 10 * band :] = 0  # a pixel lacks the first band alone, the first two, and so on
    bands[3, 5:9] = 0  # water in near infrared
    write(scene, bands, **options)
    model = Segmentor()
    model.bands = read
    with mapped(example, model, scene) as written:
        assert np.array_equal(written.read(1), np.where(has_data(bands), bands[0], 255))


def test_the_mask_of_a_scene_is_one_whatever_the_model_reads(example, scene):
    bands = np.ones((4, 40, 50), np.uint8)
    mask = np.random.default_rng(0).random((40, 50)) < 0.5
    write(scene, bands)
    with rasterio.open(scene, 'r+') as file:
        file.write_mask(mask)
    with mapped(example, Segmentor(), scene) as written:
        assert np.array_equal(written.read(1), np.where(mask, 1, 255))


def test_a_map_of_more_classes_than_a_byte_holds_and_a_scene_without_objects(example, scene):
    bands = np.arange(300, dtype=np.uint16).reshape(1, 15, 20)
    write(scene, bands)
    model = Segmentor()
    model.classes = range(300)
    with mapped(example, model, scene) as written:
        assert np.array_equal(written.read(), bands)
    write(scene, np.zeros((3, HEIGHT, WIDTH), np.uint8))
    assert detected(example, scene) == []


def test_an_object_across_tiles_is_found_once_and_whole(example, scene):
    bands = np.zeros((3, HEIGHT, WIDTH), np.uint8)
    for index, (left, top, right, bottom) in enumerate(BOXES):
        bands[:, top:bottom, left:right] = 1 + index % 2
    write(scene, bands, crs='EPSG:32632')
    found = sorted(detected(example, scene), key=lambda one: one['bbox'])
    assert [one['image_id'] for one in found] == [1] * len(BOXES)
    assert [one['category_id'] for one in found] == [1, 2, 1, 2, 1]
    for one, (left, top, right, bottom) in zip(found, BOXES, strict=True):
        assert one['bbox'] == [left, top, right - left, bottom - top]
        expected = np.zeros((HEIGHT, WIDTH), bool)
        expected[top:bottom, left:right] = True
        assert np.array_equal(coco_mask.decode(one['segmentation']), expected)

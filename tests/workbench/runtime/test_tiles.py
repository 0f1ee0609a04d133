"""Predictions in tiles equal those of the whole image, and are read and written by regions."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swin_dense.utils.pixels import ImageError
from swin_dense.workbench.runtime import geotiff, masks, model, pictures, tiles
from swin_dense.workbench.runtime.masks import Instances
from tests.conftest import ROOT, IfInstalled, needs

coco_mask = IfInstalled('pycocotools.mask')
cv2, tifffile = IfInstalled('cv2'), IfInstalled('tifffile')
SIDES = st.integers(1, 900)


@given(SIDES, SIDES, st.integers(20, 300), st.integers(0, 120), st.sampled_from([1, 20]))
def test_windows_cover_the_image_once_and_have_one_size(height, width, tile, overlap, step):
    covered, sizes = np.zeros((height, width), int), set()
    tile, overlap = tile // step * step, overlap // step * step
    for window in tiles.plan((height, width), tile, overlap, is_detector=step == 1):
        (top, left, bottom, right), (above, before, below, behind) = window.kept, window.read
        covered[top:bottom, left:right] += 1
        assert above == 0 or top - above >= overlap
        assert before == 0 or left - before >= overlap
        assert below == height or below - bottom >= overlap
        assert behind == width or behind - right >= overlap
        assert above % step == before % step == 0
        sizes.add((below - above, behind - before))
    assert (covered == 1).all()
    if step == 1:
        assert sizes == {(min(height, tile + 2 * overlap), min(width, tile + 2 * overlap))}


class IdealDetector:
    """Finds what a tile shows of known objects, with small errors that differ from tile to tile.

    In front of every object is a smaller one of its class, with an IoU of 0.36.
    """

    def __init__(self, seed, size, largest, count=80):
        self.random = np.random.default_rng(seed)
        height, width = size
        centres = self.random.uniform([20, 20], [width - 20, height - 20], (count, 2))
        sides = self.random.uniform(8, largest, (count, 2))
        self.boxes = np.concatenate([centres - sides / 2, centres + sides / 2], 1).clip(0, [width, height] * 2)
        corner, sides = self.boxes[:, :2], self.boxes[:, 2:] - self.boxes[:, :2]
        smaller = np.concatenate([corner + 0.3 * sides, corner + 0.9 * sides], 1)
        self.boxes = np.concatenate([self.boxes, smaller])
        self.labels = np.tile(self.random.integers(0, 3, count), 2)
        self.scores = self.random.uniform(0.3, 1, 2 * count)

    def __call__(self, tile):
        top, left, bottom, right = tile.read
        visible = self.boxes.clip([left, top] * 2, [right, bottom] * 2) - [left, top] * 2
        is_seen = ((visible[:, 2:] - visible[:, :2]) > 2).all(1)
        boxes = visible[is_seen] + self.random.normal(0, 0.3, (is_seen.sum(), 4))
        scores = self.scores[is_seen] * self.random.uniform(0.9, 1, is_seen.sum())
        full = [np.zeros((bottom - top, right - left), bool) for _ in boxes]
        for mask, (x1, y1, x2, y2) in zip(full, boxes.round().astype(int).clip(0), strict=True):
            mask[y1:y2, x1:x2] = True
        return Instances(boxes.astype(np.float32), scores.astype(np.float32), self.labels[is_seen], full)


@pytest.mark.parametrize('seed', range(5))
def test_objects_up_to_the_overlap_are_found_once_and_whole(seed):
    size, overlap = (700, 900), 40 + 10 * seed
    detector = IdealDetector(seed, size, overlap)
    windows = tiles.plan(size, 200, overlap, True)
    boxes, scores, labels, run_lengths = tiles.instances(windows, size, detector)
    assert (np.diff(scores) <= 0).all()
    distances = np.abs(boxes[:, None] - detector.boxes).max(2) + 1000 * (labels[:, None] != detector.labels)
    assert distances.min(1).max() < 2.5
    assert sorted(distances.argmin(1)) == list(range(len(detector.boxes)))
    for box, encoded in zip(boxes, run_lengths, strict=True):
        mask = coco_mask.decode(encoded).astype(bool)
        assert mask.shape == size
        assert masks.area(encoded) == mask.sum()
        rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
        corners = [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]
        assert np.abs(box.clip(0) - corners).max() <= 1


def test_what_one_tile_finds_is_never_merged():
    """Two objects of a class that overlap, as a model without NMS finds them, lie in one tile."""
    boxes = np.array([[90, 90, 110, 110], [92, 90, 112, 110]], np.float32)
    found = Instances(boxes, np.array([0.9, 0.8], np.float32), np.zeros(2, int))
    windows = tiles.plan((200, 200), 100, 50, True)
    nothing = Instances(boxes[:0], found.scores[:0], found.labels[:0])
    kept, *_ = tiles.instances(windows, (200, 200), lambda tile: found if tile is windows[0] else nothing)
    np.testing.assert_array_equal(kept, boxes)


def merged(boxes, scores, found_by, size=(100, 200), overlap=50):
    """Return the indices of the boxes that remain; ``found_by`` has the tiles that find each."""
    boxes, scores = np.array(boxes, np.float32), np.array(scores, np.float32)
    windows = tiles.plan(size, 100, overlap, True)

    def predict(window):
        own = [i for i, numbers in enumerate(found_by) if windows.index(window) in numbers]
        corner = [window.read[1], window.read[0]] * 2
        visible = boxes[own].clip(corner, [window.read[3], window.read[2]] * 2) - corner
        return Instances(visible.astype(np.float32), scores[own], np.zeros(len(own), int))

    return sorted(int(np.abs(boxes - box).sum(1).argmin()) for box in tiles.instances(windows, size, predict)[0])


WIDE, NARROW = [70, 20, 128, 60], [90, 30, 121, 60]  # both reach over the border at 100; their IoU is 0.4


@pytest.mark.parametrize('scores', [(0.8, 0.6), (0.6, 0.8)])
def test_two_tiles_that_disagree_on_the_extent_of_an_object_find_it_once(scores):
    for tile in (0, 1):
        assert merged([WIDE, NARROW], scores, [{tile}, {1 - tile}]) == [np.argmax(scores)]


def test_a_fragment_that_ends_at_the_border_of_its_tile_goes():
    assert merged([[75, 20, 130, 60], [75, 20, 100, 60]], [0.8, 0.6], [{1}, {0}], size=(100, 170), overlap=0) == [0]


def test_the_tile_of_the_better_detection_decides_whether_there_are_two():
    found_by = [{0}, {1}, {1}]  # the wide one by both
    assert merged([WIDE, WIDE, NARROW], (0.8, 0.7, 0.6), found_by) == [0]
    assert merged([WIDE, WIDE, NARROW], (0.7, 0.8, 0.6), found_by) == [0, 2]


@pytest.mark.parametrize('scores', [(0.8, 0.6), (0.6, 0.8)])
def test_a_small_object_in_front_of_a_large_one_of_its_class_stays(scores):
    assert merged([WIDE, NARROW], scores, [{0, 1}, {0, 1}]) == [0, 1]
    assert merged([WIDE, [72, 30, 90, 60]], scores, [{1}, {0}]) == [0, 1]  # lies in its tile, away from the border


@pytest.mark.parametrize(('scores', 'remaining'), [((0.9, 0.8, 0.7, 0.6), [0, 1]), ((0.7, 0.8, 0.9, 0.6), [0, 2])])
def test_the_part_that_a_tile_sees_is_the_object(scores, remaining):
    """The middle tile sees the columns 70 to 230: less than half of the large object, and the small one in front."""
    small, large, part = [185, 30, 215, 60], [170, 20, 298, 90], [170, 20, 230, 90]
    found_by = [{1}, {2}, {1}, {2}]
    assert merged([small, large, part, small], scores, found_by, size=(100, 300), overlap=30) == remaining


SIDE = st.tuples(st.integers(60, 99), st.integers(101, 140))


@given(SIDE, SIDE, st.integers(0, 40), st.integers(50, 90), st.integers(0, 40), st.integers(50, 90))
def test_doubles_are_those_that_pycocotools_measures(one, other, top, bottom, above, below):
    boxes = np.array([[one[0], top, one[1], bottom], [other[0], above, other[1], below]], float)
    coco = np.concatenate([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], 1)
    iou, covered = (coco_mask.iou(coco, coco, [is_crowd] * 2) for is_crowd in (0, 1))  # a crowd's: of the first's area
    expected = [0] if iou[0, 1] >= 0.5 or max(covered[0, 1], covered[1, 0]) >= 0.8 else [0, 1]
    if all(box[2] > 104 and box[0] < 96 for box in boxes):
        centres = boxes[:, [0, 2]].mean(1)
        beyond = np.array([centres[0] - 100, 100 - centres[1]]) / coco[:, 2]  # of the left tile, and of the right one
        if (beyond < 0.25).all():
            assert merged(boxes, [0.9, 0.8], [{0}, {1}]) == expected


def test_what_is_dropped_as_a_double_drops_nothing_itself():
    """The middle box, of the right tile, is a double of the left one; the right one overlaps only the middle one."""
    boxes = [[76, 20, 116, 60], [84, 20, 124, 60], [89, 20, 129, 60]]
    assert merged(boxes, [0.9, 0.8, 0.7], [{0}, {1}, {0}]) == [0, 2]


@given(st.integers(1, 300), st.integers(1, 300), st.integers(10, 90), st.integers(0, 40))
@settings(max_examples=30)
def test_classes_are_those_of_the_whole_image(height, width, tile, overlap):
    whole = np.random.default_rng(0).integers(0, 7, (height, width))
    out = np.full((height, width), 255, np.uint8)
    windows = tiles.plan((height, width), tile, overlap, False)

    def predict(part):
        top, left, bottom, right = part.read
        return whole[top:bottom, left:right]

    counts = tiles.labels(windows, predict, out)
    np.testing.assert_array_equal(out, whole)
    np.testing.assert_array_equal(counts, np.bincount(whole.ravel()))
    assert sum(one['share'] for one in model.shares(counts, 'abcdefg')) == pytest.approx(1)


@given(st.data())
def test_a_mask_in_an_image_is_encoded_as_pycocotools_does(data):
    height, width = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 12))
    h, w = data.draw(st.integers(0, height)), data.draw(st.integers(0, width))
    top, left = data.draw(st.integers(0, height - h)), data.draw(st.integers(0, width - w))
    density = data.draw(st.sampled_from([0, 0.3, 0.9, 1]))
    part = np.random.default_rng(0).random((h, w)) < density
    full = np.zeros((height, width), np.uint8, order='F')
    full[top : top + h, left : left + w] = part
    encoded = masks.run_lengths(part, (top, left), (height, width))
    assert encoded['counts'] == coco_mask.encode(full)['counts'].decode()
    assert masks.area(encoded) == full.sum()


GEOREFERENCE = [
    (33550, 'd', 3, (10.0, 10.0, 0.0), True),
    (33922, 'd', 6, (0.0, 0.0, 0.0, 600000.0, 5400000.0, 0.0), True),
    (34735, 'H', 8, (1, 1, 0, 1, 3072, 0, 1, 32632), True),
    (34737, 's', 4, 'UTM|', True),
]


def test_a_map_of_classes_keeps_the_georeference(tmp_path):
    image, path = tmp_path / 'scene.tif', tmp_path / 'scene.labels.tif'
    tifffile.imwrite(image, np.zeros((60, 50, 3), np.uint8), extratags=GEOREFERENCE, photometric='rgb')
    labels = np.random.default_rng(0).integers(0, 9, (60, 50))
    with geotiff.label_file(path, image) as make:
        out = make((60, 50), np.uint8)
        out[:40, :] = labels[:40]
        assert not path.exists()
        out[40:, :] = labels[40:]
    with tifffile.TiffFile(path) as file, tifffile.TiffFile(image) as original:
        np.testing.assert_array_equal(file.asarray(), labels)
        assert file.asarray().dtype == np.uint8
        assert file.geotiff_metadata == original.geotiff_metadata
        assert file.geotiff_metadata['ProjectedCSTypeGeoKey'] == 32632


def test_a_map_of_classes_is_not_kept_after_an_error(tmp_path):
    (tmp_path / 'photo.png').write_bytes(b'no TIFF')

    def write():
        with geotiff.label_file(tmp_path / 'a.tif', tmp_path / 'photo.png') as make:
            make((6, 5), np.uint16)[:, :] = 3
            raise KeyError

    with pytest.raises(KeyError):
        write()
    assert [path.name for path in tmp_path.iterdir()] == ['photo.png']


READ_BY_REGIONS = {
    'tiles': {'tile': (16, 16)},
    'strips': {'compression': 'zlib'},
    'separate bands': {'planarconfig': 'separate'},
    'JPEG': {'tile': (16, 16), 'photometric': 'ycbcr', 'compression': 'jpeg'},
}


@needs('zarr')
@needs('imagecodecs')
@pytest.mark.parametrize('options', READ_BY_REGIONS.values(), ids=READ_BY_REGIONS)
def test_a_tiff_is_read_by_regions_as_opencv_reads_it_whole(tmp_path, options, monkeypatch):
    pixels, path = np.random.default_rng(0).integers(0, 255, (61, 45, 3), dtype=np.uint8), tmp_path / 'a.tif'
    stored = pixels.transpose(2, 0, 1) if 'planarconfig' in options else pixels
    tifffile.imwrite(path, stored, **{'photometric': 'rgb', **options})
    monkeypatch.setattr(pictures, 'read', None)
    with pictures.open_large(path) as image:
        assert image.size == (61, 45)
        np.testing.assert_array_equal(image.read(7, 3, 50, 41), cv2.imread(str(path))[7:50, 3:41, ::-1])


WITHOUT_TORCH = """
import sys
sys.modules.update(dict.fromkeys(['torch', 'mmengine', 'mmcv', 'cv2', 'onnx']))
sys.argv = ['swin-dense']
import numpy as np
from swin_dense.workbench.runtime import pictures
assert 'PIL' not in sys.modules
with pictures.open_large(np.zeros((6, 5, 3), np.uint8)) as image:
    image.read(0, 0, 6, 5)
assert 'PIL' not in sys.modules  # for arrays, numpy suffices
with pictures.open_large(sys.stdin.read()) as image:
    assert image.read(7, 3, 50, 41).any() and not isinstance(image._pixels.values, np.ndarray)
"""


@needs('zarr')
def test_a_tiff_is_read_by_regions_without_torch(tmp_path):
    path = str(tmp_path / 'a.tif')
    tifffile.imwrite(path, np.full((61, 45, 3), 9, np.uint8), photometric='rgb', tile=(16, 16))
    subprocess.run([sys.executable, '-c', WITHOUT_TORCH], cwd=ROOT, input=path, text=True, check=True)


@pytest.mark.parametrize('photometric', ['minisblack', 'miniswhite'])
def test_three_bands_that_are_no_colours_are_not_read_as_rgb(tmp_path, photometric):
    tifffile.imwrite(tmp_path / 'a.tif', np.zeros((6, 5, 3), np.uint8), photometric=photometric, planarconfig='contig')
    with pytest.raises(ImageError, match='not an image of a supported format'), pictures.open_large(tmp_path / 'a.tif'):
        pass


@needs('zarr')
@needs('imagecodecs')
def test_a_damaged_region_names_the_file(tmp_path):
    path = tmp_path / 'a.tif'
    tifffile.imwrite(path, np.zeros((64, 64, 3), np.uint8), photometric='rgb', tile=(32, 32), compression='zlib')
    with tifffile.TiffFile(path) as file:
        start = file.pages[0].dataoffsets[3]
    with path.open('r+b') as file:
        file.seek(start)
        file.write(b'damaged')
    with pictures.open_large(path) as image:
        np.testing.assert_array_equal(image.read(0, 0, 32, 64), 0)
        with pytest.raises(ImageError, match=r'a\.tif.*cannot be decoded'):
            image.read(20, 20, 40, 40)


@pytest.mark.parametrize(('tile', 'overlap', 'name'), [(0, 0, 'tile'), (64, -1, 'overlap')])
def test_wrong_sizes_are_refused(tile, overlap, name):
    with pytest.raises(ValueError, match=f'{name} must be at least'):
        tiles.plan((100, 100), tile, overlap, True)

"""Predictions in tiles equal those of the whole image, and are read and written by regions."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swin_dense.runtime import geotiff, masks, model, pictures, tiles
from swin_dense.utils.tiles import plan_windows
from tests.conftest import IfInstalled, needs

coco_mask = IfInstalled('pycocotools.mask')
tifffile = IfInstalled('tifffile')
SIDES = st.integers(1, 900)


@given(SIDES, SIDES, st.integers(20, 300), st.integers(0, 120), st.sampled_from([1, 20]))
def test_windows_cover_the_image_once_and_have_one_size(height, width, tile, overlap, step):
    covered, sizes = np.zeros((height, width), int), set()
    tile, overlap = tile // step * step, overlap // step * step
    for window in plan_windows((height, width), tile, overlap, step):
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
    """Finds what a tile shows of known objects, with small errors that differ from tile to tile."""

    def __init__(self, seed, size, largest, count=80):
        self.random = np.random.default_rng(seed)
        height, width = size
        centres = self.random.uniform([20, 20], [width - 20, height - 20], (count, 2))
        sides = self.random.uniform(8, largest, (count, 2))
        self.boxes = np.concatenate([centres - sides / 2, centres + sides / 2], 1).clip(0, [width, height] * 2)
        self.labels = self.random.integers(0, 3, count)
        self.scores = self.random.uniform(0.3, 1, count)

    def __call__(self, tile):
        top, left, bottom, right = tile.read
        visible = self.boxes.clip([left, top] * 2, [right, bottom] * 2) - [left, top] * 2
        is_seen = ((visible[:, 2:] - visible[:, :2]) > 2).all(1)
        boxes = visible[is_seen] + self.random.normal(0, 0.3, (is_seen.sum(), 4))
        scores = self.scores[is_seen] * self.random.uniform(0.9, 1, is_seen.sum())
        full = [np.zeros((bottom - top, right - left), bool) for _ in boxes]
        for mask, (x1, y1, x2, y2) in zip(full, boxes.round().astype(int).clip(0), strict=True):
            mask[y1:y2, x1:x2] = True
        return boxes.astype(np.float32), scores.astype(np.float32), self.labels[is_seen], full


@pytest.mark.parametrize('seed', range(5))
def test_objects_up_to_the_overlap_are_found_once_and_whole(seed):
    size, overlap = (700, 900), 40 + 10 * seed
    detector = IdealDetector(seed, size, overlap)
    tiling = tiles.Tiling(200, overlap)
    boxes, scores, labels, run_lengths = tiles.instances(tiling.windows(size, True), size, detector)
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
    found = boxes, np.array([0.9, 0.8], np.float32), np.zeros(2, int), []
    windows = tiles.Tiling(100, 50).windows((200, 200), True)
    nothing = boxes[:0], found[1][:0], found[2][:0], []
    kept, *_ = tiles.instances(windows, (200, 200), lambda tile: found if tile is windows[0] else nothing)
    np.testing.assert_array_equal(kept, boxes)


def test_what_is_dropped_as_a_double_drops_nothing_itself():
    """The middle box, of the right tile, is a double of the left one; the right one overlaps only the middle one."""
    boxes = np.array([[76, 20, 116, 60], [89, 20, 129, 60], [84, 20, 124, 60]], np.float32)
    windows = tiles.Tiling(100, 50).windows((200, 200), True)
    found = boxes[:2], np.array([0.9, 0.7], np.float32), np.zeros(2, int), []
    double = boxes[2:] - np.float32([windows[1].read[1], 0] * 2), np.array([0.8], np.float32), np.zeros(1, int), []
    nothing = boxes[:0], found[1][:0], found[2][:0], []
    outputs = dict(zip(windows, [found, double], strict=False))
    kept, *_ = tiles.instances(windows, (200, 200), lambda tile: outputs.get(tile, nothing))
    np.testing.assert_array_equal(kept, boxes[:2])


@given(st.integers(1, 300), st.integers(1, 300), st.integers(10, 90), st.integers(0, 40))
@settings(max_examples=30)
def test_classes_are_those_of_the_whole_image(height, width, tile, overlap):
    whole = np.random.default_rng(0).integers(0, 7, (height, width))
    out = np.full((height, width), 255, np.uint8)
    windows = tiles.Tiling(tile, overlap).windows((height, width), False)

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


@needs('zarr')
@pytest.mark.parametrize('options', [{'tile': (16, 16)}, {'compression': 'zlib'}, {'planarconfig': 'separate'}])
def test_a_tiff_is_read_by_regions_as_it_is_read_whole(tmp_path, options):
    pixels = np.random.default_rng(0).integers(0, 255, (61, 45, 3), dtype=np.uint8)
    stored = pixels.transpose(2, 0, 1) if 'planarconfig' in options else pixels
    tifffile.imwrite(tmp_path / 'a.tif', stored, photometric='rgb', **options)
    with pictures.regions(tmp_path / 'a.tif') as image:
        assert image.shape == (61, 45, 3)
        np.testing.assert_array_equal(image[7:50, 3:41], pixels[7:50, 3:41])
        assert isinstance(image, np.ndarray) == ('planarconfig' in options)  # which is read whole


@pytest.mark.parametrize(('tile', 'overlap', 'name'), [(0, 0, 'tile'), (64, -1, 'overlap')])
def test_wrong_sizes_are_refused(tile, overlap, name):
    with pytest.raises(ValueError, match=f'{name} must be at least'):
        tiles.Tiling(tile, overlap)

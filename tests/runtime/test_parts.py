"""The runtime processes images and masks as OpenCV, mmcv, mmdet and pycocotools do."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from PIL import Image

from swin_dense.runtime import masks, painting, pictures
from tests.conftest import IfInstalled, photograph

cv2 = IfInstalled('cv2')
coco_mask = IfInstalled('pycocotools.mask')
mmcv = IfInstalled('mmcv')
SIDES = st.integers(1, 90)


@given(SIDES, SIDES, SIDES, SIDES)
def test_pictures_are_resized_as_opencv_does(height, width, new_height, new_width):
    pixels = photograph(height, width)
    expected = cv2.resize(pixels, (new_width, new_height), interpolation=cv2.INTER_LINEAR)
    np.testing.assert_array_equal(pictures.resized(pixels, new_height, new_width), expected)


def test_a_picture_of_half_the_size():
    pixels = photograph(60, 90)
    np.testing.assert_array_equal(pictures.resized(pixels, 30, 45), cv2.resize(pixels, (45, 30)))


@pytest.mark.parametrize('size', [(480, 640), (641, 427), (2, 300), (33, 32)])
@pytest.mark.parametrize('keep_ratio', [True, False])
@pytest.mark.parametrize('options', [{'scale': (1333, 800)}, {'scale': (90, 50)}, {'scale_factor': (0.7, 1.3)}])
def test_sizes_are_those_of_the_frameworks(size, keep_ratio, options):
    resize = mmcv.transforms.Resize(**options, keep_ratio=keep_ratio)
    expected = resize({'img': np.zeros((*size, 3), np.uint8)})['img_shape']
    facts = {'scale': None, 'scale_factor': None, **options, 'keep_ratio': keep_ratio}
    assert pictures.size_in_model(*size, facts) == expected
    assert pictures.size_in_model(*size, None) == size


@pytest.mark.parametrize('suffix', ['png', 'jpg'])
def test_pictures_are_read_as_the_frameworks_read_them(tmp_path, suffix):
    path = tmp_path / f'a b.{suffix}'
    exif = Image.Exif()
    exif[274] = 6  # to be shown rotated by 90 degrees
    Image.fromarray(photograph(50, 70)).save(path, exif=exif)
    np.testing.assert_array_equal(pictures.read(path), mmcv.imread(str(path))[:, :, ::-1])
    assert pictures.read(path).shape == (70, 50, 3)


@pytest.mark.parametrize(
    ('picture', 'error', 'message'),
    [
        (np.zeros((4, 4), np.uint8), ValueError, r'shape \(H, W, 3\), got \(4, 4\)'),
        (np.zeros((0, 4, 3), np.uint8), ValueError, r'got \(0, 4, 3\)'),
        (np.zeros((4, 4, 3), np.float32), TypeError, 'uint8, got float32'),
    ],
)
def test_invalid_image_arrays(picture, error, message):
    with pytest.raises(error, match=message):
        pictures.read(picture)


BOX = st.tuples(*[st.floats(0, 60, width=32)] * 4)


@given(BOX, st.integers(20, 60), st.integers(20, 60), st.integers(0, 9))
def test_masks_are_pasted_as_mmdet_does(corners, height, width, seed):
    mmdet_head = pytest.importorskip('mmdet.models.roi_heads.mask_heads.fcn_mask_head')
    torch = pytest.importorskip('torch')
    x, y = sorted(corners[:2]), sorted(corners[2:])
    box = np.clip([x[0], y[0], x[1], y[1]], 0, [width, height] * 2).astype(np.float32)
    assume((box[2:] - box[:2]).min() >= 0.1)
    probabilities = np.random.default_rng(seed).random((28, 28), np.float32)
    values, where = mmdet_head._do_paste_mask(
        torch.from_numpy(probabilities)[None, None], torch.from_numpy(box)[None], height, width
    )
    expected = np.zeros((height, width), np.float32)
    expected[where] = values[0].numpy()
    mask = masks.pasted(probabilities, box, 0.5, height, width)
    is_clear = np.abs(expected - 0.5) > 1e-4
    np.testing.assert_array_equal(mask[is_clear], (expected >= 0.5)[is_clear])


@given(st.integers(1, 40), st.integers(1, 40), st.floats(0, 1), st.integers(0, 9))
def test_run_lengths_are_those_of_pycocotools(height, width, share, seed):
    mask = np.random.default_rng(seed).random((height, width)) < share
    expected = coco_mask.encode(np.asfortranarray(mask.astype(np.uint8)))
    assert masks.run_lengths(mask) == {'size': expected['size'], 'counts': expected['counts'].decode()}


def test_run_lengths_of_a_large_mask():
    mask = np.zeros((3000, 4000), bool)
    mask[:, 1000:3000:7] = True
    expected = coco_mask.encode(np.asfortranarray(mask.astype(np.uint8)))
    assert masks.run_lengths(mask)['counts'] == expected['counts'].decode()


def test_painted_pictures_show_instances_and_segments():
    pixels = photograph(60, 90)
    mask = np.zeros((60, 90), bool)
    mask[30:40, 50:60] = True
    found = [{'class': 'disc', 'label': 1, 'score': 0.9, 'box': [50.0, 30.0, 60.0, 40.0]}]
    palette = [[0, 0, 0], [0, 255, 0]]
    painted = painting.instances(pixels, found, [mask], palette)
    assert painted.shape == pixels.shape
    assert (painted[30, 50:60] == [0, 255, 0]).all()
    np.testing.assert_array_equal(painted[:20], pixels[:20])
    np.testing.assert_array_equal(painting.instances(pixels, [], [], palette), pixels)
    labels = np.zeros((60, 90), int)
    labels[10:] = 1
    segments = painting.segments(pixels, labels, palette)
    np.testing.assert_array_equal(segments[0, 0], pixels[0, 0] // 2)
    np.testing.assert_array_equal(segments[20, 20, 1], (pixels[20, 20, 1] * 0.5 + 127.5).astype(int))

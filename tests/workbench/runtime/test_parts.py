"""The runtime processes images and masks as OpenCV, mmcv, mmdet and pycocotools do."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from PIL import Image

from swin_dense.workbench.runtime import instances, painting, pictures
from tests.conftest import IfInstalled, photograph

cv2 = IfInstalled('cv2')
coco_mask = IfInstalled('pycocotools.mask')
mmcv = IfInstalled('mmcv')
SIDES = st.integers(1, 90)


@pytest.mark.parametrize(
    'size',
    [
        (480, 640),
        (641, 427),
        (2, 300),
        (33, 32),
    ],
)
@pytest.mark.parametrize('keep_ratio', [True, False])
@pytest.mark.parametrize(
    'options',
    [
        {'scale': (1333, 800)},
        {'scale': (90, 50)},
        {'scale_factor': (0.7, 1.3)},
    ],
)
def test_sizes_are_those_of_the_frameworks(size, keep_ratio, options):
    resize = mmcv.transforms.Resize(**options, keep_ratio=keep_ratio)
    expected = resize({'img': np.zeros((*size, 3), np.uint8)})
    facts = {'scale': None, 'scale_factor': None, **options, 'keep_ratio': keep_ratio}
    assert pictures.size_in_model(*size, facts) == expected['img_shape']
    assert pictures.size_in_model(*size, None) == size


@pytest.mark.parametrize('suffix', ['png', 'jpg'])
def test_pictures_are_read_as_the_frameworks_read_them(tmp_path, suffix):
    path = tmp_path / f'a b.{suffix}'
    exif = Image.Exif()
    exif[274] = 6  # to be shown rotated by 90 degrees
    Image.fromarray(photograph(50, 70)).save(path, exif=exif)
    np.testing.assert_array_equal(pictures.read(path), mmcv.imread(str(path))[:, :, ::-1])
    assert pictures.read(path).shape == (70, 50, 3)
    content = path.read_bytes()
    for body in (content, bytearray(content), memoryview(content)):
        np.testing.assert_array_equal(pictures.read(body), pictures.read(path))
    image = Image.fromarray(photograph(50, 70))
    for shown in (image, image.convert('L')):
        np.testing.assert_array_equal(pictures.read(shown), np.asarray(shown.convert('RGB')))


@pytest.mark.parametrize('orientation', range(1, 9))
@pytest.mark.parametrize(
    ('suffix', 'mode'),
    [('jpg', 'RGB'), ('png', 'RGB'), ('png', 'RGBA'), ('png', 'LA'), ('png', 'P'), ('png', 'I;16'), ('tif', 'I;16')],
)
def test_a_pil_image_is_read_as_its_file(tmp_path, suffix, mode, orientation):
    path = tmp_path / f'photo.{suffix}'
    exif = Image.Exif()
    exif[274] = orientation
    image = Image.fromarray(photograph(50, 70))
    if mode == 'I;16':
        grey = np.asarray(image.convert('L'))
        image = Image.fromarray(grey.astype(np.uint16) * 257)
    else:
        image = image.convert(mode)
    compression = {'compression': 'tiff_lzw'} if suffix == 'tif' else {}  # PIL turns others only if they are compressed
    image.save(path, exif=exif, **compression)
    np.testing.assert_array_equal(pictures.read(Image.open(path)), mmcv.imread(str(path))[:, :, ::-1])


@pytest.mark.parametrize('mode', ['I', 'F'])
def test_pil_images_of_an_unknown_range_are_refused(mode):
    with pytest.raises(pictures.ImageError, match=rf'mode {mode} .* pixels of 32 bits have no known range'):
        pictures.read(Image.fromarray(photograph(5, 7)).convert(mode))


def test_a_damaged_pil_image_is_refused(tmp_path):
    whole, half = tmp_path / 'whole.jpg', tmp_path / 'half.jpg'
    Image.fromarray(photograph(50, 70)).save(whole)
    half.write_bytes(whole.read_bytes()[:900])
    with pytest.raises(pictures.ImageError, match=r'PIL image of mode RGB .*damaged or truncated'):
        pictures.read(Image.open(half))


def test_an_image_of_too_many_pixels_names_the_example_that_predicts_it(tmp_path, monkeypatch):
    path = tmp_path / 'large.png'
    Image.fromarray(photograph(50, 70)).save(path)
    monkeypatch.setattr(Image, 'MAX_IMAGE_PIXELS', 1000)
    with pytest.raises(
        pictures.ImageError, match=r'large\.png.* exceeds limit .*examples/predict_large\.py to predict'
    ):
        pictures.read(path)


def test_damaged_and_missing_files(tmp_path):
    whole, path = tmp_path / 'whole.jpg', tmp_path / 'half.jpg'
    Image.fromarray(photograph(50, 70)).save(whole)
    for content in (whole.read_bytes()[:900], b'', b'no image'):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"half.jpg': .*(cannot be|not an image)"):
            pictures.read(path)
    for missing in ('nowhere.jpg', tmp_path):
        with pytest.raises(FileNotFoundError, match='there is no file'):
            pictures.read(missing)


@pytest.mark.parametrize(
    ('picture', 'error', 'message'),
    [
        (b'bytes', ValueError, 'image of 5 bytes: the content is not an image'),
        (None, TypeError, 'got NoneType'),
        (np.zeros((4, 4), np.uint8), ValueError, r'shape \(H, W, 3\), got \(4, 4\)'),
        (np.zeros((0, 4, 3), np.uint8), ValueError, r'got \(0, 4, 3\)'),
        (np.zeros((4, 4, 3), np.float32), TypeError, 'uint8, got float32'),
    ],
)
def test_invalid_image_arrays(picture, error, message):
    with pytest.raises(error, match=message):
        pictures.read(picture)


@given(
    st.tuples(*[st.floats(0, 60, width=32)] * 4),
    st.tuples(st.integers(20, 60), st.integers(20, 60)),
    st.integers(0, 9),
)
def test_masks_are_pasted_as_mmdet_does(corners, size, seed):
    mmdet_head = pytest.importorskip('mmdet.models.roi_heads.mask_heads.fcn_mask_head')
    torch = pytest.importorskip('torch')
    left, right = sorted(corners[:2])
    top, bottom = sorted(corners[2:])
    height, width = size
    box = np.clip([left, top, right, bottom], 0, [width, height] * 2).astype(np.float32)
    assume((box[2:] - box[:2]).min() >= 0.1)
    probabilities = np.random.default_rng(seed).random((1, 28, 28), np.float32)
    boxes = torch.from_numpy(box[None])
    values, where = mmdet_head._do_paste_mask(
        torch.from_numpy(probabilities)[None],
        boxes,
        *size,
    )
    expected = np.zeros(size, np.float32)
    expected[where] = values[0].numpy()
    mask = instances.pasted(probabilities[0], box, 0.5, *size)
    is_clear = np.abs(expected - 0.5) > 1e-4
    np.testing.assert_array_equal(mask[is_clear], (expected >= 0.5)[is_clear])


@pytest.mark.parametrize(('name', 'text'), [('猫', 'class 3 50'), ('traffic light', 'traffic light 50')])
def test_names_that_the_font_lacks_are_painted_as_numbers(monkeypatch, name, text):
    drawn = []
    monkeypatch.setattr('cv2.putText', lambda image, text, *options: drawn.append(text))
    found = {
        'class': name,
        'label': 3,
        'score': 0.5,
        'box': [1, 1, 9, 9],
    }
    painting.instances(
        photograph(20, 30),
        [found],
        [],
        [[0, 0, 0]] * 4,
    )
    assert drawn == [text]


PALETTE = [[0, 0, 0], [0, 255, 0]]


@given(st.integers(0, 255), st.integers(0, 255), st.booleans())
def test_painted_pixels_are_the_mean_of_pixel_and_colour(pixel, colour, is_instance):
    pixels, mask = np.full((2, 2, 3), pixel, np.uint8), np.eye(2, dtype=bool)
    if is_instance:
        found = {'class': 'ball', 'label': 0, 'score': 0.9, 'box': [50.0, 50.0, 60.0, 60.0]}
        painted = painting.instances(pixels, [found], [mask], [[colour] * 3])
    else:
        painted = painting.segments(pixels, np.where(mask, 0, 7), [[colour] * 3])
    assert (painted[mask] == (pixel + colour) // 2).all()
    assert (painted[~mask] == pixel).all()


def test_painted_pictures_show_instances_and_segments():
    pixels, mask = photograph(60, 90), np.zeros((60, 90), bool)
    mask[30:40, 50:60] = True
    found = {
        'class': 'ball',
        'label': 1,
        'score': 0.9,
        'box': [50.0, 30.0, 60.0, 40.0],
    }
    painted = painting.instances(pixels, [found], [mask], PALETTE)
    assert painted.shape == pixels.shape
    assert (painted[30, 50:60] == [0, 255, 0]).all()
    np.testing.assert_array_equal(painted[:20], pixels[:20])
    np.testing.assert_array_equal(painting.instances(pixels, [], [], PALETTE), pixels)
    labels = np.zeros((60, 90), int)
    labels[10:] = 1
    painted = painting.segments(pixels, labels, PALETTE)
    np.testing.assert_array_equal(painted[0, 0], pixels[0, 0] // 2)
    np.testing.assert_array_equal(painted[20, 20, 1], int(pixels[20, 20, 1] * 0.5 + 127.5))

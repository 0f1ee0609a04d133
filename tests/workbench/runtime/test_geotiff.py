"""What a GeoTIFF declares beside its pixels: its place on the earth, and which pixels have no data."""

import json

import numpy as np
import pytest
from PIL import Image

from swin_dense import runtime
from swin_dense.__main__ import main
from tests.commands.files import write_file
from tests.conftest import IfInstalled

tifffile = IfInstalled('tifffile')
RPC = tuple(float(number) for number in range(92))


def write_scene(path, value, dtype='uint8', planar='contig'):
    """Write a scene whose left third has no data; return its pixels, and which have data."""
    pixels = np.random.default_rng(0).integers(1, 250, (40, 60, 3)).astype(dtype)
    no_data = np.zeros((40, 60), bool)
    no_data[:, :20] = True
    pixels[no_data] = value
    pixels[5, 50] = (value, 9, 9)  # one band has the value: that pixel has data
    stored = pixels if planar == 'contig' else pixels.transpose(2, 0, 1)
    tags = [(42113, 's', 0, str(value), True), (50844, 'd', 92, RPC, True)]
    tifffile.imwrite(path, stored, photometric='rgb', planarconfig=planar, tile=(16, 16), extratags=tags)
    return pixels, ~no_data


@pytest.mark.parametrize('value', [0, 255])
@pytest.mark.parametrize('planar', ['contig', 'separate'])
@pytest.mark.parametrize('tile', [[], ['--tile', '16', '--overlap', '8']], ids=['whole', 'tiles'])
def test_pixels_without_data_have_no_class(tmp_path, value, planar, tile):
    pixels, has_data = write_scene(tmp_path / 'a.tif', value, planar=planar)
    model, out = write_file(tmp_path / 'model.onnx'), tmp_path / 'out'
    assert main(['predict', *model, str(tmp_path / 'a.tif'), '--out', str(out), *tile]) == 0
    found = tifffile.imread(out / 'a.labels.tif') if tile else np.asarray(Image.open(out / 'a.labels.png'))
    expected = np.where(has_data, pixels[:, :, ::-1].argmax(2), 255)
    np.testing.assert_array_equal(found, expected)
    segments = json.loads((out / 'a.json').read_text())['segments']
    for one in segments:
        assert one['share'] == pytest.approx((expected[has_data] == one['label']).mean())
    assert sum(one['share'] for one in segments) == pytest.approx(1)
    if tile:
        with tifffile.TiffFile(out / 'a.labels.tif') as file:
            assert float(file.pages[0].tags[42113].value) == 255
            assert file.pages[0].tags[50844].value == RPC
    else:
        painted = np.asarray(Image.open(out / 'a.painted.jpg')).astype(int)
        assert np.abs(painted[:, :16] - value).max() < 20  # which are left as they are


def test_an_image_without_any_data(tmp_path):
    tifffile.imwrite(
        tmp_path / 'a.tif', np.zeros((20, 30, 3), np.uint8), photometric='rgb', extratags=[(42113, 's', 0, '0', True)]
    )
    model = runtime.load(*write_file(tmp_path / 'model.onnx'))
    assert model(tmp_path / 'a.tif')['segments'] == []
    assert model.predict_tiles(tmp_path / 'a.tif', 16).record['segments'] == []


@pytest.mark.parametrize('text', ['nan', 'none', '-9999', '1e500'])
def test_values_that_no_pixel_can_have(tmp_path, text):
    pixels = np.random.default_rng(0).integers(0, 255, (20, 30, 3), np.uint8)
    tifffile.imwrite(tmp_path / 'a.tif', pixels, photometric='rgb', extratags=[(42113, 's', 0, text, True)])
    labels = runtime.load(*write_file(tmp_path / 'model.onnx')).predict(tmp_path / 'a.tif').labels
    np.testing.assert_array_equal(labels, pixels[:, :, ::-1].argmax(2))

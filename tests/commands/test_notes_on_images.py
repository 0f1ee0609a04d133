"""`features`, `extract_pyramid`, `Extractor` and `predict` state what reading loses, as the check of training does."""

import io
import logging
from collections import defaultdict

import numpy as np
import pytest
import torch
from PIL import Image

from swin_dense import SwinBackbone, extract_pyramid
from swin_dense.commands._main import main
from swin_dense.features import Extractor, Normalization, pyramid
from tests.commands.files import write_file
from tests.conftest import needs, randomize

TINY = {'embed_dims': 8, 'depths': (2, 2), 'num_heads': (1, 2)}
TWELVE = 'have 16 bits for each value, of which this one uses at most 12: the reader divides its values by 65535, to '
OPACITY = 'have 4 bands, of which the reader drops the last 1'
UPRIGHT = '2 of 6 images, such as {}, have an EXIF orientation, and are read upright, as it says'
ENDINGS = 'left out 3 of the files because of their endings, .HEIC (2), scan (1)'


def slice_of_12_bits():
    """Values of a CT in Hounsfield units plus 1024."""
    return np.random.default_rng(0).integers(24, 2500, (40, 56), dtype=np.uint16)


def save_turned(path):
    exif = Image.Exif()
    exif[274] = 6
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 56, 3), np.uint8)).save(path, exif=exif)


@pytest.fixture
def photos(tmp_path, monkeypatch):
    """A folder of six images, two of which are turned, and three files with other endings."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pyramid, '_seen', defaultdict(set))
    folder = tmp_path / 'photos'
    folder.mkdir()
    Image.fromarray(slice_of_12_bits()).save(folder / 'ct.png')
    Image.fromarray(slice_of_12_bits() * 16).save(folder / 'whole.png')
    Image.new('RGBA', (56, 40)).save(folder / 'drawn.png')
    Image.new('RGB', (56, 40)).save(folder / 'plain.jpg')
    for name in ('t1.jpg', 't2.jpg', 'IMG_1.HEIC', 'IMG_2.HEIC', 'scan'):
        save_turned(folder / f'{name}.jpg')
        (folder / f'{name}.jpg').rename(folder / name)
    torch.save(randomize(SwinBackbone(TINY)).state_dict(), 'w.pth')
    return folder


def of_images(text):
    """Return the lines that are about several images or files."""
    return [line for line in text.splitlines() if ' images, such as ' in line or 'left out' in line]


def assert_one_line_each(lines, *parts):
    assert len(lines) == len(parts), lines
    for part in parts:
        assert sum(part in line for line in lines) == 1, (part, lines)


@needs('pyarrow')
def test_features(photos, capsys):
    call = ['features', 'photos', '--checkpoint', 'w.pth', '--pool', 'avg', '--device', 'cpu', '--out']
    assert main([*call, 'a']) == 0
    lines = of_images(capsys.readouterr().err)
    assert_one_line_each(lines, TWELVE, OPACITY, UPRIGHT.format(photos / 't1.jpg'), ENDINGS)
    assert f'2 of 6 images, such as {photos / "ct.png"}, {TWELVE}at most 0.038; give --scale 4095' in '\n'.join(lines)
    assert main([*call, 'b', '--scale', '4095']) == 0
    assert TWELVE not in capsys.readouterr().err
    for path in photos.glob('*.*g'):
        path.unlink()
    assert main([*call, 'c']) == 2
    assert f'no images found in photos; {ENDINGS}' in capsys.readouterr().err


def test_extract_pyramid_says_it_once(photos, caplog):
    backbone = randomize(SwinBackbone(TINY)).eval()
    paths = sorted(photos.glob('*.*g'))
    pyramids = extract_pyramid(backbone, paths)
    assert [one.image_size for one in pyramids[3:5]] == [(56, 40), (56, 40)]
    assert_one_line_each(of_images(caplog.text), TWELVE, OPACITY, UPRIGHT.format(photos / 't1.jpg'))
    assert 'give normalization=Normalization(scale=4095)' in caplog.text
    caplog.clear()
    extract_pyramid(backbone, paths)
    assert not caplog.records
    extract_pyramid(backbone, paths, normalization=Normalization(scale=4095, mean=0, std=1))
    assert TWELVE not in caplog.text


def as_file(values):
    file = io.BytesIO()
    Image.fromarray(values).save(file, 'PNG')
    return file.getvalue()


@pytest.mark.parametrize(
    'form', [as_file, Image.fromarray, np.asarray, lambda values: Image.open(io.BytesIO(as_file(values)))]
)
@pytest.mark.parametrize('tile', [None, 224])
def test_every_form_of_an_image_is_looked_at(photos, caplog, form, tile):
    backbone = randomize(SwinBackbone(TINY)).eval()
    extract_pyramid(backbone, form(slice_of_12_bits() * 16), tile=tile)
    extract_pyramid(backbone, np.random.default_rng(0).random((40, 56, 3)), tile=tile)  # float64
    assert not caplog.records
    pyramid._seen.clear()
    extract_pyramid(backbone, form(slice_of_12_bits()), tile=tile)
    assert_one_line_each(of_images(caplog.text), TWELVE)


def test_an_extractor_says_it_once(photos, caplog):
    caplog.set_level(logging.WARNING)
    extract = Extractor('w.pth', device='cpu')
    for _ in range(2):
        found = extract({'path': [str(photos / 'ct.png'), str(photos / 'none.png')]})
    assert found['error'][0] == ''
    assert_one_line_each(of_images(caplog.text), TWELVE)


@needs('onnxruntime')
def test_predict(photos, capsys):
    (photos / 'damaged.jpg').write_bytes(b'\xff\xd8\xff')
    assert main(['predict', *write_file(photos.parent / 'model.onnx'), 'photos', '--out', 'out']) == 1
    text = capsys.readouterr().err
    bits = 'have 16 bits for each value, which predict makes 8: it reads the values of this one as '
    lines = of_images(text)
    upright = UPRIGHT.format('photos/t1.jpg').replace(' 6 ', ' 7 ')
    assert_one_line_each(lines, bits, OPACITY.replace('the reader', 'predict'), upright, ENDINGS)
    assert f'2 of 7 images, such as photos/ct.png, {bits}0 to 9; train the model on such images' in text

"""Extractor maps columns to columns, equals extract_pyramid, and returns a row with an error for a broken image."""

import logging
import pickle
import re

import numpy as np
import pytest
import torch
from PIL import Image

from swin_dense import CheckpointError, SwinBackbone, SwinV2Backbone, export_state_dict, extract_pyramid
from swin_dense.features import Extractor, Normalization
from swin_dense.features.extraction import Extraction
from tests.checkpoint.helpers import prefixed
from tests.conftest import ROOT, TINY, needs, photograph, randomize, tiny
from tests.features.helpers import pooled
from tests.images.mutations import encode

PHOTOGRAPH = photograph(97, 131)
IMAGES = [
    PHOTOGRAPH[:40, :52],
    PHOTOGRAPH[10:50, 20:72],
    PHOTOGRAPH,
    PHOTOGRAPH[5:45, :52],
]


@pytest.fixture(scope='module')
def backbone():
    return tiny()


@pytest.fixture(scope='module')
def checkpoint(backbone, tmp_path_factory):
    path = tmp_path_factory.mktemp('weights') / 'tiny.pth'
    torch.save(backbone.state_dict(), path)
    return path


def expected(backbone, pool, stride, **options):
    pyramids = extract_pyramid(backbone, IMAGES, **options)
    vectors = [pooled(pyramid[stride], pool) for pyramid in pyramids]
    return torch.stack(vectors).float().numpy()


def near(found, vectors, tolerance=1e-4):
    np.testing.assert_allclose(found, vectors, rtol=tolerance, atol=tolerance)


def level_32(checkpoint, columns, **options):
    """Return the columns that an extractor makes of columns of images, with the vectors of the last stage."""
    return Extractor(checkpoint, [32], device='cpu', **options)(columns)


def column_of(form, folder):
    """Return the images as a column of this name."""
    if form == 'image':
        return IMAGES
    if form == 'bytes':
        return [encode(image, 'png') for image in IMAGES]
    paths = [str(folder / f'{index}.png') for index in range(len(IMAGES))]
    for path, image in zip(paths, IMAGES, strict=True):
        Image.fromarray(image).save(path)
    return np.array(paths)


@pytest.mark.parametrize('pool', ['avg', 'gem'])
@pytest.mark.parametrize('form', ['bytes', 'path', 'image'])
def test_extractor_equals_extract_pyramid(backbone, checkpoint, tmp_path, form, pool):
    extract = Extractor(
        checkpoint,
        levels=[8, 32],
        pool=pool,
        device='cpu',
        batch_size=2,
    )
    rows = extract({form: column_of(form, tmp_path), 'label': [1, 2, 3, 4]})
    kept = {'path'} if form == 'path' else set()
    assert set(rows) == {'level_8', 'level_32', 'height', 'width', 'error', 'label', *kept}
    near(rows['level_8'], expected(backbone, pool, 8))
    near(rows['level_32'], expected(backbone, pool, 32))
    assert rows['height'].tolist() == [40, 40, 97, 40]
    assert rows['width'].tolist() == [52, 52, 131, 52]
    assert rows['error'].tolist() == [''] * 4


@pytest.mark.parametrize('workers', [0, 2])
def test_a_broken_image_gives_a_row_with_an_error(backbone, checkpoint, workers):
    whole = [encode(image, 'png') for image in IMAGES]
    contents = [
        b'',
        whole[0],
        whole[1][:300],
        None,
        whole[3],
    ]
    rows = level_32(checkpoint, {'bytes': contents, 'path': list('abcde')}, workers=workers)
    assert rows['path'] == list('abcde')
    is_whole = np.array([False, True, False, False, True])
    assert np.array_equal(rows['error'] == '', is_whole)
    assert 'empty' in rows['error'][0]
    assert np.isnan(rows['level_32'][~is_whole]).all()
    assert rows['height'].tolist() == [0, 40, 0, 0, 40]
    near(rows['level_32'][is_whole], expected(backbone, 'avg', 32)[[0, 3]])


def test_options(backbone, checkpoint):
    rows = level_32(
        checkpoint,
        {'image': IMAGES},
        max_side=66,
        dtype=torch.float16,
    )
    assert rows['level_32'].dtype == np.float16
    assert (rows['height'][2], rows['width'][2]) == (49, 66)
    near(
        rows['level_32'],
        expected(backbone, 'avg', 32, max_side=66),
        2e-3,
    )
    every = Extractor(checkpoint, device='cpu', autocast='bfloat16')({'image': IMAGES[:1]})
    assert {'level_4', 'level_8', 'level_16', 'level_32'} <= every.keys()
    exact = expected(backbone, 'avg', 32)[:1]
    assert 0 < np.abs(every['level_32'] - exact).max() < 0.1 * np.abs(exact).max()
    pages = encode(
        IMAGES[0],
        'tiff',
        save_all=True,
        append_images=[Image.fromarray(IMAGES[1])],
    )
    rows = level_32(checkpoint, {'bytes': [pages]}, page=1)
    near(rows['level_32'], expected(backbone, 'avg', 32)[1:2])


@pytest.mark.parametrize(
    'options',
    [
        {'pool': 'none'},
        {'levels': [5]},
        {'batch_size': 0},
        {'dtype': 'bfloat16'},
        {'device': 'nothing'},
        {'max_side': 0},
    ],
    ids=str,
)
def test_invalid_options_raise_in_the_constructor(checkpoint, options):
    (name,) = options
    with pytest.raises(ValueError, match=rf'{name}( must be|=)'):
        Extractor(checkpoint, **options)


def test_a_missing_image_column_and_no_rows(checkpoint):
    with pytest.raises(ValueError, match=r"'image', 'path'\] .*got \['img'\]"):
        Extractor(checkpoint, device='cpu')({'img': []})
    rows = level_32(checkpoint, {'bytes': []})
    assert rows['level_32'].shape == (0, 128)
    assert len(rows['error']) == 0


def test_prefix_chooses_one_of_several_backbones(backbone, tmp_path):
    other = SwinBackbone(**TINY)
    torch.save(prefixed('teacher.', other) | prefixed('student.', backbone), tmp_path / 'both.pth')
    with pytest.raises(CheckpointError, match='several backbones'):
        Extractor(tmp_path / 'both.pth')
    extractor = Extractor(
        tmp_path / 'both.pth',
        [32],
        pool='gem',
        device='cpu',
        prefix='student',
    )
    content = pickle.dumps(extractor)
    assert len(content) < 2000  # without the weights
    rows = pickle.loads(content)({'image': IMAGES})
    near(rows['level_32'], expected(backbone, 'gem', 32))


def test_the_batch_is_halved_when_memory_is_short(checkpoint, monkeypatch, caplog):
    extractor = Extractor(checkpoint, [32], device='cpu', batch_size=4)
    really_run = Extraction.run
    sizes = []

    def run(extraction, batch):
        sizes.append((len(batch), *batch.shape[2:]))
        if batch.shape[2] > 60 or len(batch) > 1:
            raise torch.cuda.OutOfMemoryError('CUDA out of memory')
        return really_run(extraction, batch)

    monkeypatch.setattr(Extraction, 'run', run)
    with caplog.at_level(logging.WARNING):
        rows = extractor({'image': [IMAGES[0], IMAGES[1], IMAGES[3], IMAGES[2]]})
    assert [error == '' for error in rows['error']] == [True, True, True, False]
    assert 'use tile= or max_side=' in rows['error'][3]
    assert 'continuing with 2' in caplog.text
    assert (3, 40, 52) in sizes


def test_an_unpickled_extractor_warns_of_the_wrong_mean_too(tmp_path, caplog):
    backbone = randomize(SwinV2Backbone(**TINY, window_size=4, pretrained_window_size=4))
    torch.save(prefixed('backbone.backbone.', export_state_dict(backbone, 'torchvision')), tmp_path / 'a.pth')
    how = Normalization(bands=(2, 1, 0))
    extractor = Extractor(tmp_path / 'a.pth', levels=[32], pool='gem', normalization=how)
    for _ in range(2):
        assert "ImageNet's mean, which these weights do not expect" in caplog.text
        caplog.clear()
        extractor = pickle.loads(pickle.dumps(extractor))
        assert (extractor.levels, extractor.pool) == ([32], 'gem')


class Doubled(Extractor):
    def __call__(self, rows):
        found = super().__call__(rows)
        return {**found, 'level_32': 2 * found['level_32']}


def test_a_subclass_is_pickled_as_itself(checkpoint):
    extractor = Extractor(checkpoint, [32], device='cpu')
    doubled = pickle.loads(pickle.dumps(Doubled(checkpoint, [32], device='cpu')))
    rows = {'image': IMAGES}
    np.testing.assert_array_equal(doubled(rows)['level_32'], 2 * extractor(rows)['level_32'])


@needs('pandas')
def test_the_page_shows_the_way_to_a_data_frame(checkpoint):
    import pandas as pd  # an optional package

    rows = level_32(checkpoint, {'image': IMAGES, 'label': ['a', 'b', 'c', 'd']}, pool='avg')
    expression = re.search(r'= (pd\.DataFrame\(.*\))$', (ROOT / 'docs/features.md').read_text('utf-8'), re.M)[1]
    table = eval(expression, {'pd': pd, 'rows': rows})
    assert table['label'].tolist() == ['a', 'b', 'c', 'd']
    np.testing.assert_array_equal(np.stack(table['level_32']), rows['level_32'])


def test_the_mean_of_a_level_is_the_vector_of_one_image(backbone, checkpoint):
    """As docs/features.md says."""
    vector = extract_pyramid(backbone, PHOTOGRAPH)[32].mean((1, 2))
    near(vector.numpy(), level_32(checkpoint, {'image': [PHOTOGRAPH]}, pool='avg')['level_32'][0])

"""Files that earlier versions wrote load, and mean the same: see README.md."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from swin_dense import SwinBackbone, SwinV2Backbone, create_backbone, extract_pyramid, load_checkpoint
from tests.conftest import ROOT, IfInstalled
from tests.features.helpers import rows_of
from tests.released.make import OPTIONS, PHOTO, SIZE, WINDOW

HERE = Path(__file__).parent
# Those before were never published.
EVERY_VERSION = ('0.3', '0.4')
safetensors = IfInstalled('safetensors.torch')


def close(found, expected):
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


def maps_in(folder):
    (path,) = folder.glob('features/*/*.safetensors')
    return {int(stride): level for stride, level in safetensors.load_file(path).items()}


def test_there_are_files_of_every_version():
    minor = set(
        re.findall(
            r'^## (\d+\.\d+)\.0 ',
            (ROOT / 'CHANGELOG.md').read_text(),
            re.M,
        )
    )
    assert minor - {'0.1', '0.2'} == set(EVERY_VERSION)


@pytest.mark.parametrize('version', EVERY_VERSION)
class TestCheckpoints:
    def test_a_backbone_has_the_features_of_that_version(self, version):
        file = HERE / version / 'backbone.pth'
        named = create_backbone(checkpoint=file)
        loaded = SwinBackbone(window_size=WINDOW, **OPTIONS)
        from_state = SwinBackbone(window_size=WINDOW, **OPTIONS)
        assert load_checkpoint(loaded, file).missing == []
        from_state.load_state_dict(torch.load(file, weights_only=True)['state_dict'])
        expected = maps_in(HERE / version / 'maps')
        for backbone in (named, loaded, from_state):
            pyramid = extract_pyramid(backbone.eval(), HERE / 'photo.png')
            assert sorted(pyramid) == sorted(expected) == [4, 8]
            for stride, level in expected.items():
                close(pyramid[stride], level)

    def test_swin_v2(self, version):
        file = HERE / version / 'backbone_v2.safetensors'
        named = create_backbone(checkpoint=file, window_size=WINDOW, pretrained_window_size=WINDOW)
        from_state = SwinV2Backbone(window_size=WINDOW, **OPTIONS)
        from_state.load_state_dict(safetensors.load_file(file))
        for backbone in (named, from_state):
            pyramid = extract_pyramid(backbone.eval(), HERE / 'photo.png')
            close(pyramid[8], torch.from_numpy(np.load(HERE / version / 'map_v2.npy')))


@pytest.mark.parametrize(
    ('kind', 'options'),
    [
        ('maps', []),
        ('vectors', ['--pool', 'avg']),
    ],
)
class TestFeatureFolders:
    @pytest.mark.parametrize('version', EVERY_VERSION)
    def test_rows(self, version, kind, options):
        (row,) = rows_of(HERE / version / kind).values()
        assert (row['path'], row['height'], row['width']) == (PHOTO.as_posix(), *SIZE)
        assert row.get('error') is None  # a column of 0.3
        maps = maps_in(HERE / version / 'maps')
        if kind == 'maps':
            assert (HERE / version / kind / row['file']).is_file()
        for stride, level in maps.items() if kind == 'vectors' else ():
            close(torch.tensor(row[f'level_{stride}']), level.mean((1, 2)))

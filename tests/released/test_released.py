"""Files that earlier versions wrote load, and mean the same: see README.md."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from swin_dense import SwinBackbone, SwinV2Backbone, create_backbone, extract_pyramid, load_checkpoint
from swin_dense.__main__ import main
from tests.conftest import ROOT, IfInstalled
from tests.features.helpers import rows_of, tree
from tests.released.make import OPTIONS, PHOTO, SIZE, WINDOW

HERE = Path(__file__).parent
EVERY_VERSION = ('0.1', '0.2', '0.3')
EXTENDED = [version for version in EVERY_VERSION if version != '0.1']
safetensors = IfInstalled('safetensors.torch')
parquet = IfInstalled('pyarrow.parquet')


def close(found, expected):
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


def maps_in(folder):
    (path,) = folder.glob('features/*/*.safetensors')
    return {int(stride): level for stride, level in safetensors.load_file(path).items()}


def extraction(folder, monkeypatch, *options):
    """Run `swin-dense features` again for the image of a folder, which is not there: it must not be needed."""
    (row,) = rows_of(folder).values() or [{'path': str(PHOTO), 'version': None}]
    monkeypatch.setattr('swin_dense.commands.features.list_images', lambda *_: {row['path']: row['version']})
    checkpoint = HERE / folder.parent.name / 'backbone.pth'
    return main(['features', str(PHOTO), '--out', str(folder), '--checkpoint', str(checkpoint), *options])


def with_format(name, content):
    """Return the content of a file, with the first format in a record of 0.2, which states none."""
    is_without = name.endswith('.json') and 'format' not in json.loads(content)
    return content.replace(b'{\n', b'{\n  "format": 1,\n', 1) if is_without else content


@pytest.fixture
def copy_of(tmp_path):
    return lambda version: Path(shutil.copytree(HERE / version, tmp_path / version))


def test_there_are_files_of_every_version():
    minor = re.findall(r'^## (\d+\.\d+)\.0 ', (ROOT / 'CHANGELOG.md').read_text(), re.M)
    assert sorted(minor) == sorted(EVERY_VERSION)


@pytest.mark.parametrize('version', EVERY_VERSION)
class TestCheckpoints:
    def test_a_backbone_has_the_features_of_that_version(self, version):
        file = HERE / version / 'backbone.pth'
        named, loaded, from_state = (
            create_backbone(checkpoint=file),
            *(SwinBackbone(window_size=WINDOW, **OPTIONS) for _ in '12'),
        )
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


@pytest.mark.parametrize(('kind', 'options'), [('maps', []), ('vectors', ['--pool', 'avg'])])
class TestFeatureFolders:
    @pytest.mark.parametrize('version', EXTENDED)
    def test_a_finished_folder_stays_as_it_is(self, version, kind, options, copy_of, monkeypatch):
        folder = copy_of(version) / kind
        before = {name: with_format(name, content) for name, content in tree(folder).items()}
        assert extraction(folder, monkeypatch, *options) == 0
        after = tree(folder)
        assert {name: after[name] for name in before} == before
        assert {Path(name).suffix for name in after.keys() - before.keys()} <= {'.lock'}

    @pytest.mark.parametrize('version', EXTENDED)
    def test_rows(self, version, kind, options):
        (row,) = rows_of(HERE / version / kind).values()
        assert (row['path'], row['height'], row['width'], row['error']) == (PHOTO.as_posix(), *SIZE, None)
        maps = maps_in(HERE / version / 'maps')
        if kind == 'maps':
            assert (HERE / version / kind / row['file']).is_file()
        for stride, level in maps.items() if kind == 'vectors' else ():
            close(torch.tensor(row[f'level_{stride}']), level.mean((1, 2)))

    def test_a_folder_of_0_1_is_refused_and_remains_readable(self, kind, options, copy_of, monkeypatch, capsys):
        folder = copy_of('0.1') / kind
        before = tree(folder)
        assert extraction(folder, monkeypatch, *options) == 2
        assert 'contains features of an older version, which cannot be extended' in capsys.readouterr().err
        after = tree(folder)
        assert {name: after[name] for name in before} == before
        (row,) = parquet.read_table(folder / 'index.parquet').to_pylist()
        assert (row['height'], row['width']) == SIZE
        levels = safetensors.load_file(folder / row['file'])
        for stride, level in maps_in(HERE / '0.2' / 'maps').items():
            assert levels[str(stride)].shape == (level.shape if kind == 'maps' else level.shape[:1])

"""`swin-dense convert`: checkpoint files of all families, with options inferred or given."""

import sys

import mmdet.models.backbones
import pytest
import torch
from mmengine import ConfigDict

from swin_dense import SwinBackbone, SwinV2Backbone
from swin_dense.checkpoint import export_state_dict
from swin_dense.checkpoint.read import read_file
from swin_dense.commands._main import main
from swin_dense.utils.choices import FAMILIES
from tests.conftest import assert_near, equal_weights, randomize
from tests.processes import python

ARCH = {
    'embed_dims': 8,
    'depths': (2, 1, 1, 1),
    'num_heads': (1, 2, 2, 2),
}


@pytest.fixture
def source():
    return randomize(SwinBackbone(**ARCH), 1)


@pytest.fixture
def file(tmp_path, source):
    torch.save({'model': source.state_dict()}, tmp_path / 'source.pth')
    return str(tmp_path / 'source.pth')


def run(source, out, *arguments):
    return main(
        [
            'convert',
            str(source),
            '--out',
            str(out),
            *map(str, arguments),
        ]
    )


@pytest.mark.parametrize('ending', ['.pth', '.safetensors'])
@pytest.mark.parametrize('family', FAMILIES)
def test_a_round_trip_is_the_identity(tmp_path, source, file, family, ending):
    assert run(file, tmp_path / f'a{ending}', '--family', family) == 0
    assert run(tmp_path / f'a{ending}', tmp_path / 'b.pth') == 0
    back, expected = read_file(tmp_path / 'b.pth')['model'], export_state_dict(source, 'official')
    assert back.keys() == expected.keys()
    assert equal_weights(back, expected)


FULL_DISK = """
import resource, sys
from swin_dense.commands._main import main
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.skipif(sys.platform == 'win32', reason='needs limits of processes')
@pytest.mark.parametrize('ending', ['.pth', '.safetensors'])
def test_a_full_disk_is_one_line_with_the_path(tmp_path, file, ending):
    out = tmp_path / f'a{ending}'
    done = python('-c', FULL_DISK, 'convert', file, '--out', out, status=2)
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f'swin-dense convert: error: {out} cannot be written')
    assert 'Traceback' not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ['source.pth']


def test_the_file_loads_in_mmdet_by_init_cfg(tmp_path, source, file):
    path = tmp_path / 'mmdet.pth'
    assert run(file, path, '--family', 'mmdet') == 0
    init_cfg = ConfigDict(type='Pretrained', checkpoint=str(path))
    peer = mmdet.models.backbones.SwinTransformer(**ARCH, init_cfg=init_cfg)
    peer.init_weights()
    peer.eval()
    image = torch.randn(1, 3, 64, 80)
    with torch.no_grad():
        assert_near(source.eval()(image), peer(image), 1e-4)


@pytest.mark.parametrize(
    ('given', 'out', 'message'),
    [
        ('none.pth', 'a.pth', 'no checkpoint file'),
        ('source.pth', 'no folder/a.pth', 'there is no folder'),
        ('source.pth', 'source.pth', 'exists already'),
    ],
)
def test_failures_are_explained_and_write_nothing(tmp_path, file, monkeypatch, capsys, given, out, message):
    monkeypatch.chdir(tmp_path)
    assert run(given, out) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ['source.pth']
    assert run('source.pth', 'source.pth', '--force') == 0
    assert 'wrote source.pth (official)' in capsys.readouterr().out


def test_swin_v2_needs_its_pretrained_window_sizes_and_a_family_that_has_it(tmp_path, capsys):
    backbone = SwinV2Backbone(
        **ARCH,
        window_size=16,
        pretrained_window_size=(8, 8, 8, 4),
    )
    source = tmp_path / 'v2.pth'
    torch.save(export_state_dict(backbone, 'timm'), source)
    assert run(source, tmp_path / 'a.pth') == 2
    assert 'pretrained_window_size' in capsys.readouterr().err
    torch.save({'model': export_state_dict(backbone, 'official')}, source)
    assert run(source, tmp_path / 'a.pth', '--family', 'mmpretrain') == 0
    assert run(source, tmp_path / 'b.pth', '--family', 'mmdet') == 2
    assert 'mmdet has no Swin V2' in capsys.readouterr().err

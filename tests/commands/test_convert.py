"""`swin-dense convert`: checkpoint files of all families, with options inferred or given."""

import subprocess
import sys

import mmdet.models.backbones
import pytest
import torch

from swin_dense import SwinBackbone, SwinV2Backbone
from swin_dense.checkpoint import export_state_dict, load_checkpoint
from swin_dense.checkpoint.infer import infer_options
from swin_dense.checkpoint.load import find_backbone
from swin_dense.checkpoint.read import read_file
from swin_dense.commands._main import main
from swin_dense.utils.choices import FAMILIES
from tests.conftest import ROOT, randomize

ARCH = {'embed_dims': 8, 'depths': (2, 1, 1, 1), 'num_heads': (1, 2, 2, 2)}


@pytest.fixture
def source():
    return randomize(SwinBackbone(**ARCH), 1)


@pytest.fixture
def file(tmp_path, source):
    torch.save({'model': source.state_dict()}, tmp_path / 'source.pth')
    return str(tmp_path / 'source.pth')


def run(source, out, *arguments):
    return main(['convert', str(source), '--out', str(out), *map(str, arguments)])


@pytest.mark.parametrize('ending', ['.pth', '.safetensors'])
@pytest.mark.parametrize('family', FAMILIES)
def test_a_round_trip_is_the_identity(tmp_path, source, file, family, ending):
    assert run(file, tmp_path / f'a{ending}', '--to', family) == 0
    assert run(tmp_path / f'a{ending}', tmp_path / 'b.pth') == 0
    back, expected = read_file(tmp_path / 'b.pth')['model'], export_state_dict(source, 'official')
    assert back.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in back.items())


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
    command = [sys.executable, '-c', FULL_DISK, 'convert', file, '--out', str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f'swin-dense convert: error: {out} cannot be written')
    assert 'Traceback' not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ['source.pth']


@pytest.mark.parametrize('pretrained_on', ['classifier', 'detector'])
def test_the_file_loads_in_mmdet_by_init_cfg(tmp_path, source, file, pretrained_on):
    if pretrained_on == 'classifier':
        state = {name: tensor for name, tensor in source.state_dict().items() if not name.startswith('norm')}
        torch.save({'model': state}, file)
    assert run(file, tmp_path / 'mmdet.pth', '--to', 'mmdet') == 0
    from mmengine import ConfigDict

    init_cfg = ConfigDict(type='Pretrained', checkpoint=str(tmp_path / 'mmdet.pth'))
    peer = mmdet.models.backbones.SwinTransformer(**ARCH, init_cfg=init_cfg)
    peer.init_weights()
    peer.eval()
    if pretrained_on == 'classifier':
        for stage in range(4):
            getattr(source, f'norm{stage}').reset_parameters()
    image = torch.randn(1, 3, 64, 80)
    with torch.no_grad():
        torch.testing.assert_close(source.eval()(image), peer(image), atol=1e-4, rtol=1e-4)


def test_options_of_the_backbone_are_inferred_from_the_file(tmp_path):
    options = {
        'window_size': 5,
        'in_channels': 2,
        'patch_size': 2,
        'mlp_ratio': 2,
        'qkv_bias': False,
        'use_abs_pos_embed': True,
        'pretrain_img_size': 32,
    }
    source = randomize(SwinBackbone(**ARCH, **options), 1)
    torch.save(source.state_dict(), tmp_path / 'a.pth')
    assert run(tmp_path / 'a.pth', tmp_path / 'b.pth', '--to', 'mmdet') == 0
    backbone = SwinBackbone(**ARCH, **options)
    load_checkpoint(backbone, tmp_path / 'b.pth', log=None)
    assert all(torch.equal(tensor, source.state_dict()[name]) for name, tensor in backbone.state_dict().items())


def test_outputs_are_inferred_from_the_file(tmp_path, file):
    """The backbone of a RetinaNet has no norm for the first stage."""
    source = randomize(SwinBackbone(**ARCH, out_indices=(1, 2, 3)), 1)
    torch.save({'state_dict': {f'backbone.{name}': x for name, x in source.state_dict().items()}}, file)
    assert run(file, tmp_path / 'a.pth', '--to', 'mmdet') == 0
    written = read_file(tmp_path / 'a.pth')['state_dict']
    assert all(torch.equal(tensor, written[f'backbone.{name}']) for name, tensor in source.state_dict().items())
    assert not any('norm0' in key for key in written)


def test_failures_are_explained_and_write_nothing(tmp_path, file, capsys):
    for arguments, message in [
        ([tmp_path / 'none.pth', tmp_path / 'a.pth'], 'no checkpoint file'),
        ([file, tmp_path / 'no folder' / 'a.pth'], 'there is no folder'),
        ([file, file], 'exists already'),
    ]:
        assert run(*arguments) == 2
        assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ['source.pth']
    assert run(file, file, '--force') == 0


def test_report_as_text(tmp_path, file, capsys):
    assert run(file, tmp_path / 'a.pth') == 0
    printed = capsys.readouterr().out
    assert f'wrote {tmp_path / "a.pth"} (official)' in printed


def test_swin_v2_needs_its_pretrained_window_sizes(tmp_path, capsys):
    backbone = SwinV2Backbone(**ARCH, window_size=16, pretrained_window_size=(8, 8, 8, 4))
    torch.save(export_state_dict(backbone, 'timm'), tmp_path / 'timm.pth')
    command = tmp_path / 'timm.pth', tmp_path / 'official.pth'
    assert run(*command) == 2
    assert 'pretrained_window_size' in capsys.readouterr().err
    torch.save({'model': export_state_dict(backbone, 'official')}, tmp_path / 'official.pth')
    found = find_backbone(tmp_path / 'official.pth')
    options = infer_options(found, {})
    assert (options['pretrained_window_size'], options['window_size']) == ((8, 8, 8, 4), (16, 16))
    assert run(tmp_path / 'official.pth', tmp_path / 'mm.pth', '--to', 'mmpretrain') == 0
    assert run(tmp_path / 'official.pth', tmp_path / 'no.pth', '--to', 'mmdet') == 2
    assert 'mmdet has no Swin V2' in capsys.readouterr().err

import pytest
import torch

from swin_dense.checkpoint import export_state_dict, load_checkpoint
from tests.conftest import randomize

from .peer import IMAGES, build, largest_difference, with_our_norms

swin_transformer = pytest.importorskip(
    'torchvision.models.swin_transformer', reason='see the group peers of pyproject.toml'
)
torchvision_ops = pytest.importorskip('torchvision.ops')


def build_peer(seed):
    peer = swin_transformer.SwinTransformer([4, 4], 16, [2, 2, 4, 2], [1, 2, 4, 8], [2, 2])
    return randomize(peer.double().eval(), seed)


def stages(peer):
    maps, x = [], IMAGES
    for index, layer in enumerate(peer.features):
        x = layer(x)
        if index % 2:
            maps.append(x)
    return maps


@torch.no_grad()
def test_outputs():
    backbone, peer = build(1), build_peer(2)
    report = load_checkpoint(backbone, peer.state_dict(), final_norm=True, log=None)
    assert report.family == 'torchvision'
    assert not report.unexpected
    assert largest_difference(backbone, with_our_norms(backbone, stages(peer))) < 1e-9
    last = peer.norm(stages(peer)[-1]).permute(0, 3, 1, 2)
    assert (backbone(IMAGES)[-1] - last).abs().max() < 1e-9


@torch.no_grad()
def test_export():
    backbone, peer = build(1), build_peer(2)
    missing, unexpected = peer.load_state_dict(export_state_dict(backbone, 'torchvision'), strict=False)
    assert {name.split('.')[0] for name in missing} == {'norm', 'head'}
    assert {name.split('.')[0] for name in unexpected} == {'norm0', 'norm1', 'norm2', 'norm3'}
    assert largest_difference(backbone, with_our_norms(backbone, stages(peer))) < 1e-9

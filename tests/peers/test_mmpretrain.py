import pytest
import torch

from swin_dense.checkpoint import export_state_dict, load_checkpoint
from tests.conftest import randomize

from .peer import IMAGE_SIZE, IMAGES, build, largest_difference

backbones = pytest.importorskip('mmpretrain.models.backbones', reason='see requirements/peers.txt')
ARCH = {'embed_dims': 16, 'depths': (2, 2, 4, 2), 'num_heads': (1, 2, 4, 8)}


def build_peer(seed, **options):
    peer = backbones.SwinTransformer(arch=ARCH, window_size=2, img_size=IMAGE_SIZE, **options)
    peer = randomize(peer.double(), seed)
    peer.eval()
    return peer


@torch.no_grad()
def test_backbone():
    backbone, peer = build(1), build_peer(2, out_indices=(0, 1, 2, 3))
    load_checkpoint(backbone, peer.state_dict(), log=None)
    assert largest_difference(backbone, peer(IMAGES)) < 1e-9
    randomize(backbone, 3)
    peer.load_state_dict(export_state_dict(backbone, 'mmpretrain'))
    assert largest_difference(backbone, peer(IMAGES)) < 1e-9


@torch.no_grad()
@pytest.mark.parametrize('final', ['norm3', 'norm'])
def test_classifier(final):
    backbone, peer = build(1), build_peer(2)
    state = {f'backbone.{name.replace("norm3.", final + ".")}': tensor for name, tensor in peer.state_dict().items()}
    checkpoint = {'state_dict': {**state, 'head.fc.weight': torch.zeros(2, 128), 'head.fc.bias': torch.zeros(2)}}
    report = load_checkpoint(backbone, checkpoint, final_norm=final == 'norm', log=None)
    assert report.family == 'mmpretrain'
    assert set(report.new) == {f'norm{stage}.{leaf}' for stage in range(3) for leaf in ('weight', 'bias')}
    assert (backbone(IMAGES)[-1] - peer(IMAGES)[-1]).abs().max() < 1e-9

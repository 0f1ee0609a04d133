"""Layer numbers equal those of mmpretrain and timm."""

import pytest
import torch

from swin_dense import SwinBackbone, SwinV2Backbone
from swin_dense.checkpoint import export_state_dict

from .peer import IMAGE_SIZE, TINY, needed

SHAPE = {'depths': (2, 2, 4, 2), 'num_heads': (1, 2, 4, 8)}


def marked(backbone):
    """Fill each parameter with its index in named_parameters(), to identify it after an export; return the names."""
    names = dict(enumerate(name for name, _ in backbone.named_parameters()))
    with torch.no_grad():
        for number, parameter in enumerate(backbone.parameters()):
            parameter.fill_(number)
    return names


def test_mmpretrain():
    backbones = needed('mmpretrain.models.backbones')
    backbone = SwinBackbone(**TINY, use_abs_pos_embed=True)
    peer = backbones.SwinTransformer(arch={'embed_dims': 16, **SHAPE}, window_size=2)
    names = marked(backbone)
    for their_name, tensor in export_state_dict(backbone, 'mmpretrain').items():
        if not their_name.endswith('index'):
            ours = names[int(tensor.flatten()[0])]
            assert backbone.get_layer_depth(ours) == peer.get_layer_depth(their_name), ours
    assert backbone.get_layer_depth('head.weight', 'backbone.') == peer.get_layer_depth('head.weight', 'backbone.')
    assert backbone.get_layer_depth('backbone.norm3.bias', 'backbone.') == (11, 12)


@pytest.mark.parametrize(
    ('kind', 'model'), [(SwinBackbone, 'swin_tiny_patch4_window7_224'), (SwinV2Backbone, 'swinv2_tiny_window8_256')]
)
def test_timm(kind, model):
    timm = needed('timm')
    from timm.models import group_parameters

    backbone = kind(**TINY)
    peer = timm.create_model(model, img_size=IMAGE_SIZE, window_size=2, embed_dim=16, **SHAPE)
    names = marked(backbone)
    exported = export_state_dict(backbone, 'timm')
    for coarse in (False, True):
        ours = group_parameters(backbone, backbone.group_matcher(coarse), reverse=True)
        theirs = group_parameters(peer, peer.group_matcher(coarse), reverse=True)
        compared = 0
        for their_name, layer in theirs.items():
            if their_name in exported and not (coarse and 'downsample' in their_name):
                assert ours[names[int(exported[their_name].flatten()[0])]] == layer, their_name
                compared += 1
        assert compared > 100
    exempt = {names[int(exported[name].flatten()[0])] for name in peer.no_weight_decay() if name in exported}
    assert backbone.no_weight_decay() == exempt

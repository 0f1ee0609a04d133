"""Layer numbers equal those of mmpretrain and timm."""

import pytest
import torch

from swin_dense import SwinBackbone, SwinV2Backbone
from swin_dense.checkpoint import export_state_dict

from .peer import TINY, mmpretrain_swin, needed, timm_swin


def marked(backbone):
    """Fill each parameter with its index in named_parameters(), to identify it after an export; return the names."""
    names = dict(enumerate(name for name, _ in backbone.named_parameters()))
    with torch.no_grad():
        for number, parameter in enumerate(backbone.parameters()):
            parameter.fill_(number)
    return names


def test_mmpretrain():
    backbone = SwinBackbone(**TINY, use_abs_pos_embed=True)
    peer = mmpretrain_swin()
    names = marked(backbone)
    for their_name, tensor in export_state_dict(backbone, 'mmpretrain').items():
        if not their_name.endswith('index'):
            ours = names[int(tensor.flatten()[0])]
            assert backbone.get_layer_depth(ours) == peer.get_layer_depth(their_name), ours
    assert backbone.get_layer_depth('head.weight', 'backbone.') == peer.get_layer_depth('head.weight', 'backbone.')
    assert backbone.get_layer_depth('backbone.norm3.bias', 'backbone.') == (11, 12)


@pytest.mark.parametrize(('kind', 'version'), [(SwinBackbone, 1), (SwinV2Backbone, 2)])
def test_timm(kind, version):
    needed('timm')
    from timm.models import group_parameters

    backbone, peer = kind(**TINY), timm_swin(version)
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

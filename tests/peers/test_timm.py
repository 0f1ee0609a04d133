import pytest
import torch

from swin_dense import create_backbone
from swin_dense.checkpoint import export_state_dict, load_checkpoint
from swin_dense.checkpoint.resize import adapt_channels

from .peer import IMAGES, build, largest_difference, needed, prepared, timm_swin, with_our_norms

needed('timm')


@torch.no_grad()
@pytest.mark.parametrize('out_indices', [(0, 1, 2, 3), (1, 2)])
def test_features_only(out_indices):
    backbone = build(1, out_indices=out_indices)
    peer = prepared(timm_swin(features_only=True, out_indices=out_indices), 2)
    report = load_checkpoint(backbone, {'model': peer.state_dict()}, log=None)
    assert report.family == 'timm'
    assert largest_difference(backbone(IMAGES), with_our_norms(backbone, peer(IMAGES))) < 1e-9


@torch.no_grad()
def test_export_for_features_only():
    """Rename the keys as in docs/checkpoints.md."""
    backbone, peer = build(1), prepared(timm_swin(features_only=True, out_indices=(0, 1, 2, 3)), 2)
    in_timm = export_state_dict(backbone, 'timm')
    renamed = {name.replace('layers.', 'layers_', 1): tensor for name, tensor in in_timm.items()}
    missing, unexpected = peer.load_state_dict(renamed, strict=False)
    assert not missing
    assert {name.split('.')[0] for name in unexpected} == {'norm0', 'norm1', 'norm2', 'norm3'}
    assert largest_difference(backbone(IMAGES), with_our_norms(backbone, peer(IMAGES))) < 1e-9


@pytest.mark.parametrize('channels', [1, 2, 4, 6, 7])
def test_repeated_channels_equal_those_of_timm(channels):
    from timm.models import adapt_input_conv

    weight = torch.randn(8, 3, 4, 4)
    torch.testing.assert_close(adapt_channels(weight, channels), adapt_input_conv(channels, weight))


@torch.no_grad()
def test_one_window_per_stage():
    """As timm's swin_s3_tiny_224 has them."""
    peer = prepared(timm_swin(features_only=True, out_indices=(0, 1, 2, 3), window_size=(2, 8, 4, 2)), 2)
    backbone = create_backbone(checkpoint={'model': peer.state_dict()}).double()
    assert backbone.windows == ((2, 2), (8, 8), (4, 4), (2, 2))
    load_checkpoint(backbone, {'model': peer.state_dict()}, log=None)
    assert largest_difference(backbone(IMAGES), with_our_norms(backbone, peer(IMAGES))) < 1e-9

"""Compare both versions with other libraries: outputs, gradients, and checkpoints in both directions."""

import pytest
import torch

from benchmarks.bench_models import maps_of_timm, maps_of_torchvision, maps_of_transformers
from swin_dense import CheckpointError, SwinBackbone, SwinV2Backbone
from swin_dense.checkpoint import export_state_dict, load_checkpoint
from tests.conftest import randomize

from .peer import (
    IMAGE_SIZE,
    IMAGES,
    SHAPE,
    TINY,
    build,
    largest_difference,
    mmpretrain_swin,
    needed,
    prepared,
    timm_swin,
    torchvision_swin,
    transformers_swin,
    with_our_norms,
)

NORMS = {f'norm{stage}' for stage in range(4)}

PEERS = {
    'timm': (timm_swin, maps_of_timm),
    'torchvision': (torchvision_swin, maps_of_torchvision),
    'transformers': (transformers_swin, maps_of_transformers),
}
KINDS = {1: SwinBackbone, 2: SwinV2Backbone}
# test_transformers.py compares the V1 of transformers, which has output norms.
every_peer = pytest.mark.parametrize(
    ('family', 'version'),
    [
        ('timm', 1),
        ('torchvision', 1),
        ('timm', 2),
        ('torchvision', 2),
        ('transformers', 2),
    ],
)


def build_ours(seed, version, **options):
    return randomize(KINDS[version](**TINY, **options).double().eval(), seed)


@every_peer
def test_outputs_and_gradients(family, version):
    build_peer, maps_of = PEERS[family]
    options = {'always_partition': True} if (family, version) == ('timm', 2) else {}
    backbone, peer = build_ours(1, version), prepared(build_peer(version, **options), 2)
    has_norm = family != 'transformers'
    report = load_checkpoint(backbone, peer.state_dict(), final_norm=has_norm, log=None)
    assert (report.family, report.version) == (family, version)
    assert not report.unexpected
    assert {name.split('.')[0] for name in report.missing} == (NORMS - {'norm3'} if has_norm else NORMS)
    assert not has_norm or torch.equal(backbone.norm3.weight, peer.norm.weight)

    ours, theirs = backbone(IMAGES), with_our_norms(backbone, maps_of(peer, IMAGES))
    assert largest_difference(ours, theirs) < 1e-9
    weights = [torch.randn_like(x) for x in ours]
    parameters = [parameter for name, parameter in backbone.named_parameters() if name.split('.')[0] not in NORMS]
    own = torch.autograd.grad(sum((x * w).sum() for x, w in zip(ours, weights, strict=True)), parameters)
    sum((x * w).sum() for x, w in zip(theirs, weights, strict=True)).backward()
    gradients = {name: parameter.grad for name, parameter in peer.named_parameters() if parameter.grad is not None}
    expected = build_ours(3, version)
    load_checkpoint(expected, gradients, log=None)
    expected = dict(expected.named_parameters())
    names = [name for name, _ in backbone.named_parameters() if name.split('.')[0] not in NORMS]
    for name, gradient in zip(names, own, strict=True):
        scale = gradient.abs().max()
        assert scale > 0, name
        assert (gradient - expected[name]).abs().max() / scale < 1e-9, name


@torch.no_grad()
@every_peer
def test_export(family, version):
    build_peer, maps_of = PEERS[family]
    backbone, peer = build_ours(1, version), prepared(build_peer(version), 2)
    missing, unexpected = peer.load_state_dict(export_state_dict(backbone, family), strict=False)
    assert {name.split('.')[0] for name in missing} <= {'norm', 'head'}
    assert {name.split('.')[0] for name in unexpected} == NORMS
    assert largest_difference(backbone(IMAGES), with_our_norms(backbone, maps_of(peer, IMAGES))) < 1e-9


@torch.no_grad()
@pytest.mark.parametrize('window', [2, 4])
def test_mmpretrain_at_any_size(window):
    """mmpretrain is the only peer that pads like the detection code of V1."""
    options = {
        'window_size': window,
        'pad_small_map': True,
        'pretrained_window_sizes': [2, 2, 2, 2],
    }
    peer = prepared(mmpretrain_swin(2, out_indices=(0, 1, 2, 3), **options), 2)
    backbone = randomize(SwinV2Backbone(**{**TINY, 'window_size': window}, pretrained_window_size=2).double().eval(), 1)
    report = load_checkpoint(backbone, peer.state_dict(), log=None)
    assert (report.family, report.version, report.missing) == ('mmpretrain', 2, [])
    for size in ((128, 128), (150, 118), (31, 50)):
        images = torch.randn(2, 3, *size, dtype=torch.float64)
        assert largest_difference(backbone(images), peer(images)) < 1e-9
    randomize(backbone, 3)
    missing, unexpected = peer.load_state_dict(export_state_dict(backbone, 'mmpretrain'), strict=False)
    assert {name.rpartition('.')[2] for name in missing} == {'relative_coords_table', 'relative_position_index'}
    assert not unexpected
    assert largest_difference(backbone(IMAGES), peer(IMAGES)) < 1e-9


def test_pretraining_windows_are_inferred_from_the_coordinates():
    peer = mmpretrain_swin(2, window_size=[4, 4, 4, 2], pad_small_map=True)
    wide = {**TINY, 'window_size': 8}
    with pytest.raises(CheckpointError, match=r'pretrained_window_size=\(4, 4, 4, 2\)'):
        load_checkpoint(SwinV2Backbone(**wide), peer.state_dict())
    load_checkpoint(
        SwinV2Backbone(**wide, pretrained_window_size=(4, 4, 4, 2)),
        peer.state_dict(),
        log=None,
    )


def test_timms_swinv2_cr_is_refused():
    timm = needed('timm')
    peer = timm.create_model(
        'swinv2_cr_tiny_224',
        img_size=IMAGE_SIZE,
        window_size=2,
        embed_dim=16,
        **SHAPE,
    )
    for backbone in (build(1), build_ours(1, 2)):
        with pytest.raises(CheckpointError):
            load_checkpoint(backbone, peer.state_dict())

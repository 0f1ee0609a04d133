"""Compare both versions with other libraries: outputs, gradients, and checkpoints in both directions."""

import pytest
import torch

from benchmarks.bench_models import maps_of_timm, maps_of_torchvision, maps_of_transformers
from swin_dense import CheckpointError, SwinBackbone, SwinV2Backbone
from swin_dense.checkpoint import export_state_dict, load_checkpoint
from tests.conftest import randomize

from .peer import IMAGE_SIZE, IMAGES, TINY, build, largest_difference, needed, with_our_norms

SHAPE = {'depths': (2, 2, 4, 2), 'num_heads': (1, 2, 4, 8)}
NORMS = {f'norm{stage}' for stage in range(4)}


def build_timm(seed, version):
    timm = needed('timm')
    names = {1: 'swin_tiny_patch4_window7_224', 2: 'swinv2_tiny_window8_256'}
    options = {'always_partition': True} if version == 2 else {}
    peer = timm.create_model(names[version], img_size=IMAGE_SIZE, window_size=2, embed_dim=16, **SHAPE, **options)
    return randomize(peer.double().eval(), seed)


def build_torchvision(seed, version):
    swin = needed('torchvision.models.swin_transformer')
    parts = {'block': swin.SwinTransformerBlockV2, 'downsample_layer': swin.PatchMergingV2} if version == 2 else {}
    peer = swin.SwinTransformer([4, 4], 16, list(SHAPE['depths']), list(SHAPE['num_heads']), [2, 2], **parts)
    return randomize(peer.double().eval(), seed)


def build_transformers(seed, version=2, kind='Swinv2Backbone', **options):
    transformers = needed('transformers')
    from transformers.models.swinv2 import modeling_swinv2

    config = transformers.Swinv2Config(
        embed_dim=16,
        depths=list(SHAPE['depths']),
        num_heads=list(SHAPE['num_heads']),
        window_size=2,
        image_size=IMAGE_SIZE,
        out_features=[f'stage{stage}' for stage in (1, 2, 3, 4)],
        **options,
    )
    return randomize(getattr(modeling_swinv2, kind)(config).double().eval(), seed)


def build_mmpretrain(seed, **options):
    backbones = needed('mmpretrain.models.backbones')
    arch = {'embed_dims': 16, 'extra_norm_every_n_blocks': 0, **SHAPE}
    options = {'window_size': 2, 'img_size': IMAGE_SIZE, **options}
    peer = backbones.SwinTransformerV2(arch, out_indices=(0, 1, 2, 3), **options)
    peer = randomize(peer.double(), seed)
    peer.eval()
    return peer


PEERS = {
    'timm': (build_timm, maps_of_timm),
    'torchvision': (build_torchvision, maps_of_torchvision),
    'transformers': (build_transformers, maps_of_transformers),
}
KINDS = {1: SwinBackbone, 2: SwinV2Backbone}
# test_transformers.py compares the V1 of transformers, which has output norms.
every_peer = pytest.mark.parametrize(
    ('family', 'version'),
    [('timm', 1), ('torchvision', 1), ('timm', 2), ('torchvision', 2), ('transformers', 2)],
)


def build_ours(seed, version, **options):
    return randomize(KINDS[version](**TINY, **options).double().eval(), seed)


@every_peer
def test_outputs_and_gradients(family, version):
    build_peer, maps_of = PEERS[family]
    backbone, peer = build_ours(1, version), build_peer(2, version)
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
    backbone, peer = build_ours(1, version), build_peer(2, version)
    missing, unexpected = peer.load_state_dict(export_state_dict(backbone, family), strict=False)
    assert {name.split('.')[0] for name in missing} <= {'norm', 'head'}
    assert {name.split('.')[0] for name in unexpected} == NORMS
    assert largest_difference(backbone(IMAGES), with_our_norms(backbone, maps_of(peer, IMAGES))) < 1e-9


@torch.no_grad()
@pytest.mark.parametrize('window', [2, 4])
def test_mmpretrain_at_any_size(window):
    """mmpretrain is the only peer that pads like the detection code of V1."""
    peer = build_mmpretrain(2, window_size=window, pad_small_map=True, pretrained_window_sizes=[2, 2, 2, 2])
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
    peer = build_mmpretrain(1, window_size=[4, 4, 4, 2], pad_small_map=True)
    wide = {**TINY, 'window_size': 8}
    with pytest.raises(CheckpointError, match=r'pretrained_window_size=\(4, 4, 4, 2\)'):
        load_checkpoint(SwinV2Backbone(**wide), peer.state_dict())
    load_checkpoint(SwinV2Backbone(**wide, pretrained_window_size=(4, 4, 4, 2)), peer.state_dict(), log=None)


def test_timms_swinv2_cr_is_refused():
    timm = needed('timm')
    peer = timm.create_model('swinv2_cr_tiny_224', img_size=IMAGE_SIZE, window_size=2, embed_dim=16, **SHAPE)
    for backbone in (build(1), build_ours(1, 2)):
        with pytest.raises(CheckpointError):
            load_checkpoint(backbone, peer.state_dict())

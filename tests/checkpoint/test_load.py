"""Loading and exporting backbones, with those of mmdet and mmseg as references."""

import pytest
import torch

from swin_dense import SwinV2Backbone
from swin_dense.checkpoint import export_state_dict
from swin_dense.checkpoint.compare import Target
from swin_dense.checkpoint.convert import convert
from swin_dense.checkpoint.load import load_weights
from swin_dense.utils.choices import FAMILIES
from tests.checkpoint.helpers import ARCH, FRAMEWORKS, build, build_peer, load, same_outputs
from tests.conftest import equal_weights, randomize


@pytest.mark.parametrize(
    ('family', 'merging'),
    [
        ('official', 'layers.0.downsample'),
        ('timm', 'layers.1.downsample'),
        ('torchvision', 'features.2'),
        ('transformers', 'swin.encoder.layers.0.downsample'),
    ],
)
def test_patch_merging_is_exported_in_the_order_of_other_libraries(family, merging):
    """Four neighbours of eight channels: ordered by neighbour there, column by column, and by channel here."""
    source = build(1)
    state = export_state_dict(source, family)
    places = [
        (0, 0),
        (1, 0),
        (0, 1),
        (1, 1),
    ]
    for name, ours in source.stages[0].downsample.named_parameters():
        by_place = ours.unflatten(-1, (8, 2, 2))  # (..., C, row, column)
        expected = torch.cat([by_place[..., row, column] for row, column in places], dim=-1)
        assert torch.equal(state[f'{merging}.{name}'], expected)


def test_the_coordinates_of_a_window_that_is_not_square_are_exported():
    """The coordinates of the paper on Swin V2: log-spaced, and scaled so that the outermost offset was 8."""
    backbone = SwinV2Backbone(**{**ARCH, 'window_size': (2, 3)})
    rows = torch.tensor([-8.0, 0, 8])
    columns = torch.tensor([-8.0, -4, 0, 4, 8])
    grid = torch.cartesian_prod(rows, columns).reshape(3, 5, 2)
    expected = grid.sign() * torch.log2(grid.abs() + 1) / 3
    coordinates = export_state_dict(backbone, 'official')['layers.0.blocks.0.attn.relative_coords_table']
    torch.testing.assert_close(coordinates, expected[None])


# Only at the pretraining size: at other sizes the position embedding of mmseg is broken.
@pytest.mark.parametrize('framework', FRAMEWORKS)
@pytest.mark.parametrize('options', [{}, {'use_abs_pos_embed': True, 'pretrain_img_size': (36, 52)}])
def test_frameworks_load_weights_exported_for_them(framework, options):
    backbone, peer = build(**options), build_peer(framework, **options)
    peer.load_state_dict(export_state_dict(backbone, framework))  # strict, buffers included
    same_outputs(peer, backbone)


OBLONG = {'window_size': (3, 5), 'use_abs_pos_embed': True, 'pretrain_img_size': 32}


@pytest.mark.parametrize('family', FAMILIES)
@pytest.mark.parametrize(
    'options',
    [{}, OBLONG],
    ids=['square', 'oblong'],
)
def test_load_after_export_is_the_identity(family, options):
    source, backbone = build(1, **options), build(2, **options)
    exported = export_state_dict(source, family)
    report = load(backbone, exported)
    assert len(report.loaded) == len(list(source.parameters()))
    assert not report.resized
    assert not report.missing
    assert not report.unexpected
    assert equal_weights(backbone, source)
    # The exported tensors are copies.
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.zero_()
    assert all(tensor.any() for tensor in exported.values())


# What only some libraries store with the attention of a Swin V2: as parameters here, in another form, or not at all.
COORDINATES, INDEX, JOINED_BIAS = '.relative_coords_table', '.relative_position_index', '.qkv.bias'


@pytest.mark.parametrize(
    ('family', 'stored'),
    [
        ('official', [COORDINATES]),
        ('mmpretrain', [COORDINATES, INDEX]),
        ('timm', []),
        ('torchvision', [COORDINATES, INDEX, JOINED_BIAS]),
        ('transformers', []),
    ],
)
def test_v2_is_exported_as_each_library_stores_it(family, stored):
    source, backbone = (randomize(SwinV2Backbone(**ARCH), seed) for seed in (1, 2))
    exported = export_state_dict(source, family)
    endings = (COORDINATES, INDEX, JOINED_BIAS)
    assert [ending for ending in endings if any(name.endswith(ending) for name in exported)] == stored
    report = load(backbone, exported)
    assert report.family == family
    assert not report.missing
    assert not report.unexpected
    assert equal_weights(backbone, source)


def test_export_refuses_unknown_families_and_models():
    with pytest.raises(ValueError, match="did you mean 'mmdet'"):
        export_state_dict(build(), 'mmdt')
    with pytest.raises(TypeError, match=r'pass its \.backbone'):
        export_state_dict(torch.nn.ModuleDict({'backbone': build()}))


def test_unbuilt_stages_and_unreturned_norms_are_left_out():
    source, backbone = build(1), build(2, out_indices=(0, 2))
    report = load(backbone, source.state_dict())
    assert equal_weights(backbone, source)
    reasons = set(report.left_out.values())
    assert reasons == {'stages above the last output', 'norms of stages that are not returned'}
    assert 'stages.2.downsample.reduction.weight' in report.left_out
    assert not report.unexpected


def test_one_conversion_serves_several_models():
    """Neither converting nor comparing changes its input."""
    source = build(1, use_abs_pos_embed=True, pretrain_img_size=32)
    state = {**export_state_dict(source, 'official'), 'norm.weight': torch.ones(64), 'norm.bias': torch.ones(64)}
    before = {name: tensor.clone() for name, tensor in state.items()}
    weights = convert(state, 'the given dict')
    shapes = weights.shapes
    for options in ({'window_size': 5, 'in_channels': 4, 'pretrain_img_size': 48}, {'pretrain_img_size': 32}):
        backbone = build(2, use_abs_pos_embed=True, **options)
        for final_norm in (True, False):
            report = load_weights(weights, Target.of(backbone), final_norm=final_norm, log=None)
            assert bool(report.resized) == ('window_size' in options)
            assert weights.shapes == shapes
    assert equal_weights(backbone, source)
    assert all(torch.equal(tensor, state[name]) for name, tensor in before.items())

"""Loading and exporting backbones; mmdet's and mmseg's own are the oracle."""

import copy
import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swin_dense import SwinBackbone, create_backbone
from swin_dense.checkpoint import CheckpointError, export_state_dict, load_checkpoint
from swin_dense.checkpoint.families import EXPORTED
from tests.conftest import randomize

FRAMEWORKS = ('mmdet', 'mmseg')
ARCH = {'embed_dims': 8, 'depths': (2, 1, 1, 1), 'num_heads': (1, 2, 2, 2), 'window_size': 3}
IMAGE = torch.randn(1, 3, 35, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def build(seed=0, **options):
    return randomize(SwinBackbone(**{**ARCH, **options}).double().eval(), seed)


def build_peer(framework, seed=1, **options):
    backbones = pytest.importorskip(f'{framework}.models.backbones')
    peer = randomize(backbones.SwinTransformer(**{**ARCH, **options}).double(), seed)
    peer.eval()
    return peer


def load(backbone, source, **options):
    return load_checkpoint(backbone, source, log=None, **options)


def official_classifier(backbone, classes=10):
    """Return what the official classification code saves for the weights of a backbone."""
    channels = backbone.arch.channels[-1]
    state = {name: tensor for name, tensor in backbone.state_dict().items() if not name.startswith('norm')}
    for name in list(state):
        if name.endswith('relative_position_bias_table'):
            state[name.replace('bias_table', 'index')] = torch.zeros(9, 9, dtype=torch.long)
    state['layers.0.blocks.1.attn_mask'] = torch.zeros(64, 49, 49)
    state['norm.weight'], state['norm.bias'] = torch.rand(channels), torch.rand(channels)
    state['head.weight'], state['head.bias'] = torch.rand(classes, channels), torch.rand(classes)
    return {'model': state}


def same_outputs(ours, theirs):
    with torch.no_grad():
        for a, b in zip(ours(IMAGE), theirs(IMAGE), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


def same_weights(ours, theirs):
    theirs = theirs.state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.state_dict().items())


def raises_and_keeps(backbone, source, match, **options):
    before = copy.deepcopy(backbone.state_dict())
    with pytest.raises(CheckpointError, match=match):
        load(backbone, source, **options)
    for name, tensor in backbone.state_dict().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize('framework', FRAMEWORKS)
@pytest.mark.parametrize('options', [{}, {'window_size': 7, 'patch_norm': False, 'qkv_bias': False}])
def test_frameworks_give_the_same_outputs(framework, options):
    backbone, peer = build(**options), build_peer(framework, **options)
    report = load(backbone, peer.state_dict())
    assert report.family == 'mmdet'
    assert sorted(report.loaded) == sorted(name for name, _ in backbone.named_parameters())
    assert not report.missing
    assert not report.unexpected
    assert set(report.left_out) == {name for name in peer.state_dict() if name.endswith('_index')}
    same_outputs(backbone, peer)


@pytest.mark.parametrize('framework', FRAMEWORKS)
def test_frameworks_load_what_is_exported_for_them(framework):
    backbone, peer = build(), build_peer(framework)
    peer.load_state_dict(export_state_dict(backbone, framework))  # strict, buffers included
    same_outputs(peer, backbone)


def test_absolute_position_of_frameworks_arrives():
    # At the pretraining size only, as off it theirs is broken.
    options = {'use_abs_pos_embed': True, 'pretrain_img_size': (36, 52)}
    backbone, peer = build(**options), build_peer('mmseg', **options)
    load(backbone, peer.state_dict())
    same_outputs(backbone, peer)
    peer.load_state_dict(export_state_dict(randomize(backbone, 5), 'mmseg'))
    same_outputs(peer, backbone)


@pytest.mark.parametrize(
    ('wrap', 'prefix'),
    [
        (lambda state: {'state_dict': {f'backbone.{k}': v for k, v in state.items()}}, 'state_dict.backbone.'),
        (lambda state: {f'module.backbone.{k}': v for k, v in state.items()}, 'module.backbone.'),
        (lambda state: {'model': {f'encoder.{k}': v for k, v in state.items()}, 'epoch': 3}, 'model.encoder.'),
        (lambda state: {'net': {'model': state}, 'optimizer': {'state': {0: torch.zeros(1)}}}, 'net.model.'),
        (lambda state: {f'_orig_mod.{k}': v for k, v in state.items()}, ''),
    ],
)
def test_the_backbone_is_found_wherever_it_is(wrap, prefix):
    backbone, peer = build(), build_peer('mmdet')
    checkpoint = wrap(peer.state_dict())
    checkpoint['roi_head.bbox_head.fc_cls.weight'] = torch.zeros(3, 3)
    report = load(backbone, checkpoint)
    assert report.prefix == prefix
    assert 'roi_head.bbox_head.fc_cls.weight' in [*report.left_out, *report.unexpected]
    same_outputs(backbone, peer)


def test_official_classifier_leaves_output_norms_new():
    source, backbone = build(1), build(2)
    fresh = {name: tensor.clone() for name, tensor in backbone.state_dict().items() if name.startswith('norm')}
    checkpoint = official_classifier(source)
    report = load(backbone, checkpoint)
    assert report.family == 'official'
    assert set(report.new) == set(report.missing) == set(fresh)
    reasons = {key.removeprefix('model.'): reason for key, reason in report.left_out.items()}
    assert reasons['head.weight'] == 'the classifier'
    assert reasons['layers.0.blocks.1.attn_mask'] == 'buffers that are computed here'
    assert not report.unexpected
    for name, tensor in backbone.state_dict().items():
        assert torch.equal(tensor, fresh.get(name, source.state_dict()[name])), name
    assert 'norm0.weight' in str(report)


def test_final_norm_on_request():
    source, backbone = build(1), build(2)
    checkpoint = official_classifier(source)
    report = load(backbone, checkpoint, final_norm=True)
    assert torch.equal(backbone.norm3.weight, checkpoint['model']['norm.weight'].double())
    assert torch.equal(backbone.norm3.bias, checkpoint['model']['norm.bias'].double())
    assert set(report.new) == {f'norm{stage}.{leaf}' for stage in range(3) for leaf in ('weight', 'bias')}
    assert not any('norm' in key for key in report.left_out)
    raises_and_keeps(backbone, source.state_dict(), 'no final norm', final_norm=True)
    raises_and_keeps(build(out_indices=(0, 1)), checkpoint, 'does not return', final_norm=True)


def test_moby_takes_the_encoder_and_simmim_drops_the_decoder():
    source = build(1)
    classifier = {k: v for k, v in official_classifier(source)['model'].items() if not k.startswith('head')}
    other = official_classifier(build(3))['model']
    moby = {
        **{f'encoder.{k}': v for k, v in classifier.items()},
        **{f'encoder_k.{k}': v for k, v in other.items()},
        'projector.linear_out.weight': torch.zeros(2, 2),
        'queue1': torch.zeros(4, 4),
    }
    simmim = {
        **{f'encoder.{k}': v for k, v in classifier.items()},
        'encoder.mask_token': torch.zeros(1, 1, 8),
        'decoder.0.weight': torch.zeros(8, 64, 1, 1),
    }
    for family, state in (('moby', moby), ('simmim', simmim)):
        backbone = build(2)
        report = load(backbone, {'model': state})
        assert report.family == family
        assert torch.equal(backbone.layers[1].downsample.reduction.weight, source.layers[1].downsample.reduction.weight)
        assert torch.equal(backbone.layers[2].blocks[0].attn.qkv.weight, source.layers[2].blocks[0].attn.qkv.weight)
        assert not report.unexpected


def test_a_running_average_is_taken_on_request_only():
    weights, average, backbone = build(1), build(2), build(3)
    checkpoint = {
        'state_dict': weights.state_dict(),
        'ema_state_dict': {f'module.{k}': v for k, v in average.state_dict().items()},
    }
    load(backbone, checkpoint)
    same_weights(backbone, weights)
    load(backbone, checkpoint, ema=True)
    same_weights(backbone, average)
    raises_and_keeps(backbone, {'state_dict': weights.state_dict()}, 'no running average', ema=True)
    raises_and_keeps(backbone, {'model_ema': average.state_dict()}, 'ema=True loads them')


def test_mmengine_saves_the_average_as_the_weights():
    EMAHook = pytest.importorskip('mmengine.hooks').EMAHook

    weights, average, backbone = build(1), build(2), build(3)
    checkpoint = {
        'state_dict': weights.state_dict(),
        'ema_state_dict': {'steps': torch.tensor(3), **{f'module.{k}': v for k, v in average.state_dict().items()}},
    }
    EMAHook()._swap_ema_state_dict(checkpoint)  # what it does before it saves
    for ema in (True, False):
        load(backbone, checkpoint, ema=ema)
        same_weights(backbone, average)


def test_of_several_backbones_one_must_be_chosen():
    student, teacher, backbone = build(1), build(2), build(3)
    checkpoint = {f'student.backbone.{k}': v for k, v in student.state_dict().items()}
    checkpoint |= {f'teacher.backbone.{k}': v for k, v in teacher.state_dict().items()}
    raises_and_keeps(backbone, checkpoint, r"several backbones, under 'student.backbone.', 'teacher.backbone.'")
    load(backbone, checkpoint, prefix='teacher.backbone')
    same_weights(backbone, teacher)
    load(backbone, {'state_dict': checkpoint}, prefix='student.backbone.')
    same_weights(backbone, student)
    raises_and_keeps(backbone, checkpoint, "no backbone under prefix='teacher'", prefix='teacher')
    raises_and_keeps(backbone, checkpoint, 'several backbones', prefix='backbone')
    raises_and_keeps(backbone, checkpoint, 'no backbone under', prefix='')
    with pytest.raises(TypeError, match='prefix must be a string'):
        load(backbone, checkpoint, prefix=['teacher'])
    load(backbone, {**checkpoint, **build(4).state_dict()}, prefix='')
    same_weights(backbone, build(4))


@pytest.mark.parametrize('family', EXPORTED)
@pytest.mark.parametrize('options', [{}, {'window_size': (3, 5), 'use_abs_pos_embed': True, 'pretrain_img_size': 32}])
def test_load_after_export_is_the_identity(family, options):
    source, backbone = build(1, **options), build(2, **options)
    exported = export_state_dict(source, family)
    report = load(backbone, exported)
    assert len(report.loaded) == len(list(source.parameters()))
    assert not report.resized
    for name, tensor in backbone.state_dict().items():
        assert torch.equal(tensor, source.state_dict()[name]), name
    # What is exported does not change with the model.
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.zero_()
    assert all(tensor.any() for tensor in exported.values())


def test_export_refuses_unknown_families_and_models():
    with pytest.raises(ValueError, match="did you mean 'mmdet'"):
        export_state_dict(build(), 'mmdt')
    with pytest.raises(TypeError, match=r'pass its \.backbone'):
        export_state_dict(torch.nn.ModuleDict({'backbone': build()}))


def test_unbuilt_stages_and_unreturned_norms_are_left_out():
    source, backbone = build(1), build(2, out_indices=(0, 2))
    report = load(backbone, source.state_dict())
    same_weights(backbone, source)
    reasons = set(report.left_out.values())
    assert reasons == {'stages above the last output', 'norms of stages that are not returned'}
    assert 'layers.2.downsample.reduction.weight' in report.left_out
    assert not report.unexpected


class TestCauses:
    def test_another_published_architecture(self):
        with torch.device('meta'):
            small = SwinBackbone('s').state_dict()
        raises_and_keeps(
            SwinBackbone('t'), small, r"a Swin-S with depths \(2, 2, 18, 2\).*build the model with arch='s'"
        )

    def test_another_architecture(self):
        raises_and_keeps(
            build(), build(depths=(2, 1, 3, 1)).state_dict(), r'build the model with depths=\(2, 1, 3, 1\)'
        )
        raises_and_keeps(build(), build(num_heads=(1, 2, 4, 8)).state_dict(), r'num_heads=\(1, 2, 4, 8\)')

    @pytest.mark.parametrize(
        ('option', 'value'),
        [
            ('mlp_ratio', 2.0),
            ('qkv_bias', False),
            ('patch_norm', False),
            ('use_abs_pos_embed', True),
            ('use_rel_pos_bias', False),
            ('patch_size', 2),
            ('out_indices', (1, 2, 3)),
        ],
    )
    def test_another_option(self, option, value):
        source = build(**{option: value}).state_dict()
        raises_and_keeps(
            build(), source, rf'build the model with {option}={value}'.replace('(', r'\(').replace(')', r'\)')
        )

    @pytest.mark.parametrize(
        'source', [{}, {'weight': torch.zeros(3)}, {'model': {}}, {'state_dict': {'fc.weight': 3}}]
    )
    def test_no_swin(self, source):
        raises_and_keeps(build(), source, 'no parameters of a Swin Transformer were found')

    def test_another_network_with_the_same_patch_embedding(self):
        vit = {'patch_embed.proj.weight': torch.zeros(16, 3, 4, 4), 'blocks.0.attn.qkv.weight': torch.zeros(48, 16)}
        raises_and_keeps(build(), vit, 'no parameters of a Swin Transformer were found')

    def test_wrong_types(self):
        with pytest.raises(TypeError, match='a path, an address or a dict, got int'):
            load(build(), 3)
        with pytest.raises(TypeError, match=r'got ModuleDict; pass its \.backbone'):
            load(torch.nn.ModuleDict({'backbone': build()}), {})
        integers = {name: tensor.long() for name, tensor in build().state_dict().items()}
        raises_and_keeps(build(), integers, 'torch.int64 in the checkpoint')
        with torch.device('meta'):
            raises = SwinBackbone(**ARCH)
        with pytest.raises(CheckpointError, match='meta device'):
            load(raises, build().state_dict())


def test_partial_loading_keeps_what_does_not_arrive():
    source, backbone = build(1), build(2)
    kept = backbone.layers[3].blocks[0].norm1.weight.clone()
    state = source.state_dict()
    del state['layers.3.blocks.0.norm1.weight']
    state['layers.0.blocks.0.mlp.fc1.weight'] = torch.zeros(5, 5)
    state['layers.0.blocks.7.norm1.weight'] = torch.zeros(8)
    report = load(backbone, state, allow_partial=True)
    assert set(report.missing) == {'layers.3.blocks.0.norm1.weight', 'layers.0.blocks.0.mlp.fc1.weight'}
    assert set(report.mismatched) == {'layers.0.blocks.0.mlp.fc1.weight'}
    assert report.unexpected == ['layers.0.blocks.7.norm1.weight']
    assert torch.equal(backbone.layers[3].blocks[0].norm1.weight, kept)
    assert torch.equal(backbone.norm2.bias, source.norm2.bias)
    assert all(word in str(report) for word in ('missing', 'wrong shape', 'unexpected'))
    raises_and_keeps(
        backbone, build(embed_dims=16, num_heads=(4,) * 4).state_dict(), 'not one parameter', allow_partial=True
    )


def test_the_report_is_logged(capsys, caplog):
    with caplog.at_level(logging.INFO, 'swin_dense'):
        load_checkpoint(build(), build(1).state_dict())
        assert 'family: official' in caplog.text
        caplog.clear()
        lines = []
        load_checkpoint(build(), build(1).state_dict(), log=lines.append)
        load_checkpoint(build(), build(1).state_dict(), log=None)
    assert len(lines) == 1
    assert not caplog.records
    assert not capsys.readouterr().out


def test_create_backbone_takes_a_checkpoint(tmp_path):
    source = build(1)
    torch.save({'state_dict': export_state_dict(source, 'mmseg')}, tmp_path / 'swin.pth')
    made = create_backbone('swin_t', tmp_path / 'swin.pth', **ARCH)
    assert torch.equal(made.layers[3].blocks[0].mlp.fc2.weight, source.layers[3].blocks[0].mlp.fc2.weight.float())


@given(data=st.data())
@settings(max_examples=150)
def test_a_damaged_checkpoint_loads_rightly_or_not_at_all(data):
    options = {'depths': (1, 1), 'num_heads': (1, 1), 'embed_dims': 4}
    source, backbone = build(1, **options), build(2, **options)
    family = data.draw(st.sampled_from(list(EXPORTED)))
    items = list(export_state_dict(source, family).items())
    items = data.draw(st.permutations(items))
    for _ in range(data.draw(st.integers(0, 3))):
        index = data.draw(st.integers(0, len(items) - 1))
        key, tensor = items[index]
        if not isinstance(tensor, torch.Tensor):
            continue
        match data.draw(st.sampled_from(['drop', 'rename', 'flatten', 'wrap', 'grow', 'type', 'copy'])):
            case 'drop':
                del items[index]
            case 'rename':
                items[index] = (data.draw(st.sampled_from([key + 'x', 'x.' + key, key.replace('.0.', '.1.')])), tensor)
            case 'flatten':
                items[index] = (key, tensor.flatten())
            case 'wrap':
                items[index] = (key, tensor[None])
            case 'grow':
                items[index] = (key, torch.cat([tensor, tensor]))
            case 'type':
                items[index] = (key, data.draw(st.sampled_from([None, 'text', 3, tensor.long()])))
            case 'copy':
                items.append(('module.' + key, tensor))
    before = copy.deepcopy(backbone.state_dict())
    expected = source.state_dict()
    try:
        report = load(backbone, dict(items))
    except CheckpointError:
        expected = before
    else:
        # Without any trace of it in the checkpoint, the norm of the first output is one that a classifier lacks.
        kept = [key for key, value in dict(items).items() if isinstance(value, torch.Tensor)]
        assert not report.new or not any(key.startswith(('norm0', 'hidden_states_norms.stage1')) for key in kept)
        expected = {**expected, **{name: before[name] for name in report.new}}
    assert all(torch.equal(tensor, expected[name]) for name, tensor in backbone.state_dict().items())


def test_a_part_of_a_parameter_in_integers_is_no_weight():
    """Joined with its neighbours it would become one."""
    state = export_state_dict(build(1), 'transformers')
    key = next(key for key in state if 'query.weight' in key or 'q_proj.weight' in key)
    with pytest.raises(CheckpointError):
        load(build(2), {**state, key: state[key].long()})

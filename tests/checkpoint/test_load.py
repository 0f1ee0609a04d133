"""Loading and exporting backbones, with those of mmdet and mmseg as references."""

import copy
import logging
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swin_dense import SwinBackbone, SwinClassifier, SwinV2Backbone, create_backbone
from swin_dense.checkpoint import CheckpointError, export_state_dict, load_checkpoint, read, unpickler
from swin_dense.checkpoint.export import write_file
from swin_dense.checkpoint.unpickler import StandIn
from swin_dense.utils.choices import FAMILIES
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
    """Return the checkpoint that the official classification code saves for a backbone's weights."""
    channels = backbone.arch.channels[-1]
    state = {k: v for k, v in export_state_dict(backbone, 'official').items() if not k.startswith('norm')}
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
@pytest.mark.parametrize(
    'options', [{}, {'use_abs_pos_embed': True, 'pretrain_img_size': (36, 52), 'patch_norm': False}]
)
def test_state_dicts_are_those_of_the_frameworks(framework, options):
    """Names, shapes and order are equal, except for the index buffers of the frameworks."""
    backbone, peer = build(**options), build_peer(framework, **options)
    assert [(name, x.shape) for name, x in backbone.named_parameters()] == [
        (name, x.shape) for name, x in peer.named_parameters()
    ]
    missing, unexpected = peer.load_state_dict(backbone.state_dict(), strict=False)
    assert all(name.endswith('.relative_position_index') for name in missing)
    assert not unexpected
    same_outputs(peer, backbone)
    randomize(peer, 3)
    backbone.load_state_dict(peer.state_dict())
    same_outputs(peer, backbone)


def test_files_of_our_version_0_1_load_as_official():
    """It had the authors' names, order of patch merging and layout of the position map."""
    source = build(1, use_abs_pos_embed=True, pretrain_img_size=32)
    state = export_state_dict(source, 'official')
    assert state['absolute_pos_embed'].shape == (1, 8, 8, 8)
    backbone = build(2, use_abs_pos_embed=True, pretrain_img_size=32)
    report = load(backbone, {f'backbone.{name}': tensor for name, tensor in state.items()})
    assert report.family == 'official'
    same_weights(backbone, source)


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
    places = [(0, 0), (1, 0), (0, 1), (1, 1)]
    for name, ours in source.stages[0].downsample.named_parameters():
        by_place = ours.unflatten(-1, (8, 2, 2))  # (..., C, row, column)
        expected = torch.cat([by_place[..., row, column] for row, column in places], dim=-1)
        assert torch.equal(state[f'{merging}.{name}'], expected)


def test_the_coordinates_of_a_window_that_is_not_square_are_exported():
    """The coordinates of the paper on Swin V2: log-spaced, and scaled so that the outermost offset was 8."""
    backbone = SwinV2Backbone(**{**ARCH, 'window_size': (2, 3)})
    rows, columns = torch.arange(-1.0, 2) / 1 * 8, torch.arange(-2.0, 3) / 2 * 8
    grid = torch.stack([rows[:, None].expand(3, 5), columns.expand(3, 5)], dim=-1)
    expected = grid.sign() * torch.log2(grid.abs() + 1) / 3
    coordinates = export_state_dict(backbone, 'official')['layers.0.blocks.0.attn.relative_coords_table']
    torch.testing.assert_close(coordinates, expected[None])


@pytest.mark.parametrize('framework', FRAMEWORKS)
def test_frameworks_load_weights_exported_for_them(framework):
    backbone, peer = build(), build_peer(framework)
    peer.load_state_dict(export_state_dict(backbone, framework))  # strict, buffers included
    same_outputs(peer, backbone)


def test_absolute_positions_of_mmseg_load():
    # Only at the pretraining size: at other sizes the position embedding of mmseg is broken.
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
def test_the_backbone_is_found_under_any_prefix(wrap, prefix):
    backbone, peer = build(), build_peer('mmdet')
    checkpoint = wrap(peer.state_dict())
    checkpoint['roi_head.bbox_head.fc_cls.weight'] = torch.zeros(3, 3)
    report = load(backbone, checkpoint)
    assert report.prefix == prefix
    assert 'roi_head.bbox_head.fc_cls.weight' in [*report.left_out, *report.unexpected]
    same_outputs(backbone, peer)


def test_output_norms_are_new_for_an_official_classifier():
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


def test_of_moby_and_simmim_only_the_encoder_loads():
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
        assert torch.equal(backbone.stages[1].downsample.reduction.weight, source.stages[1].downsample.reduction.weight)
        assert torch.equal(
            backbone.stages[2].blocks[0].attn.w_msa.qkv.weight, source.stages[2].blocks[0].attn.w_msa.qkv.weight
        )
        assert not report.unexpected


def test_a_running_average_loads_only_on_request():
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
    raises_and_keeps(backbone, {'model_ema': average.state_dict()}, 'load them with ema=True')


def test_mmengine_saves_the_average_as_the_weights():
    EMAHook = pytest.importorskip('mmengine.hooks').EMAHook

    weights, average, backbone = build(1), build(2), build(3)
    checkpoint = {
        'state_dict': weights.state_dict(),
        'ema_state_dict': {'steps': torch.tensor(3), **{f'module.{k}': v for k, v in average.state_dict().items()}},
    }
    EMAHook()._swap_ema_state_dict(checkpoint)  # as before each save
    for ema in (True, False):
        load(backbone, checkpoint, ema=ema)
        same_weights(backbone, average)


def test_with_several_backbones_a_prefix_is_required():
    student, teacher, backbone = build(1), build(2), build(3)
    checkpoint = {f'student.backbone.{k}': v for k, v in student.state_dict().items()}
    checkpoint |= {f'teacher.backbone.{k}': v for k, v in teacher.state_dict().items()}
    raises_and_keeps(backbone, checkpoint, r"several backbones, under 'student.backbone.', 'teacher.backbone.'")
    load(backbone, checkpoint, prefix='teacher.backbone')
    same_weights(backbone, teacher)
    load(backbone, {'state_dict': checkpoint}, prefix='student.backbone.')
    same_weights(backbone, student)
    raises_and_keeps(backbone, checkpoint, "no backbone under prefix='teach'", prefix='teach')
    raises_and_keeps(backbone, checkpoint, 'several backbones', prefix='backbone')
    raises_and_keeps(backbone, checkpoint, 'no backbone under', prefix='')
    with pytest.raises(TypeError, match='prefix must be a string'):
        load(backbone, checkpoint, prefix=['teacher'])
    load(backbone, {**checkpoint, **build(4).state_dict()}, prefix='')
    same_weights(backbone, build(4))


# Each pair of two of the three occurs.
@pytest.mark.parametrize(
    ('family', 'inner', 'container'),
    [
        (family, inner, (None, 'state_dict')[(row + column) % 2])
        for row, family in enumerate(['mmdet', 'official', 'transformers'])
        for column, inner in enumerate(['backbone.', 'module.backbone.', ''])
    ],
)
def test_backbones_of_any_size_need_a_prefix(container, inner, family):
    """The teacher has more than twice the blocks of the student, as in EsViT or a distillation."""
    student, teacher = build(1), build(2, depths=(4, 4, 4, 4))
    checkpoint = {f'student.{inner}{k}': x for k, x in export_state_dict(student, family).items()}
    checkpoint |= {f'teacher.{inner}{k}': x for k, x in export_state_dict(teacher, family).items()}
    checkpoint = checkpoint if container is None else {container: checkpoint}
    raises_and_keeps(build(3), checkpoint, r"several backbones, under '.*student\..*', '.*teacher\..*'; .*prefix=")
    with pytest.raises(CheckpointError, match='several backbones'):
        create_backbone(checkpoint=checkpoint)
    with pytest.raises(CheckpointError, match='several backbones'):
        build(3).load_state_dict(checkpoint)
    for name, source in (('student', student), ('teacher', teacher)):
        expected = copy.deepcopy(source).float()
        same_weights(create_backbone(checkpoint=checkpoint, prefix=name), expected)
        same_weights(create_backbone(checkpoint=checkpoint, prefix=f'{name}.{inner}'), expected)
    backbone = build(3)
    report = load(backbone, checkpoint, prefix='student')
    same_weights(backbone, student)
    assert report.prefix == f'{container + "." if container else ""}student.{inner}'


def test_a_prefix_that_is_the_end_of_another_is_exact():
    one, other, backbone = build(1), build(2), build(3)
    checkpoint = {f'backbone.{k}': v for k, v in one.state_dict().items()}
    checkpoint |= {f'teacher.backbone.{k}': v for k, v in other.state_dict().items()}
    load(backbone, checkpoint, prefix='backbone')
    same_weights(backbone, one)
    load(backbone, checkpoint, prefix='teacher')
    same_weights(backbone, other)


def test_a_prefix_chooses_the_weights_or_their_average():
    student, average, backbone = build(1), build(2), build(3)
    checkpoint = {'state_dict': {f'student.{k}': v for k, v in student.state_dict().items()}}
    checkpoint['state_dict'] |= {f'teacher.{k}': v for k, v in build(4).state_dict().items()}
    checkpoint['model_ema'] = {f'student.{k}': v for k, v in average.state_dict().items()}
    load(backbone, checkpoint, prefix='student')
    same_weights(backbone, student)
    load(backbone, checkpoint, prefix='student', ema=True)
    same_weights(backbone, average)
    load(backbone, checkpoint, prefix='model_ema')
    same_weights(backbone, average)


def test_a_partly_wrapped_backbone_counts_as_one_of_several():
    """The student has LoRA, so that some of its names are no longer those of a Swin."""
    student = {
        k.replace('qkv.', 'qkv.base_layer.').replace('ffn.layers.0.0.', 'ffn.layers.0.0.base_layer.'): v
        for k, v in build(1).state_dict().items()
    }
    checkpoint = {f'student.{k}': v for k, v in student.items()}
    checkpoint |= {f'teacher.{k}': v for k, v in build(2).state_dict().items()}
    raises_and_keeps(build(3), checkpoint, "several backbones, under 'student.', 'teacher.'")


def test_a_few_keys_that_resemble_a_backbone_are_not_one():
    source, backbone = build(1), build(2)
    state = {f'backbone.{k}': v for k, v in source.state_dict().items()}
    state['adapter.layers.0.blocks.0.norm1.weight'] = state['x.stages.0.blocks.0.norm2.bias'] = torch.zeros(8)
    load(backbone, state)
    same_weights(backbone, source)


def test_a_prefix_without_a_checkpoint_is_an_error():
    with pytest.raises(TypeError, match="prefix='teacher' chooses a backbone in a checkpoint"):
        create_backbone('swin_t', prefix='teacher')


def timm_s3(**options):
    """Return weights with the windows of timm's swin_s3_tiny_224: 7, 7, 14 and 7."""
    state = export_state_dict(build(1, window_size=7, **options), 'timm')
    for name in [name for name in state if name.startswith('layers.2') and name.endswith('bias_table')]:
        state[name] = torch.randn(27 * 27, state[name].shape[1])
    return state


def test_windows_that_differ_per_stage_are_an_error():
    message = r'its windows differ per stage \(7x7, 7x7, 14x14, 7x7 tokens\).*allow_partial=True'
    for window in (7, 14):
        raises_and_keeps(build(2, window_size=window), timm_s3(), message)
    with pytest.raises(CheckpointError, match=message):
        create_backbone(checkpoint=timm_s3())
    with pytest.raises(CheckpointError, match=message):
        build(2, window_size=7).load_state_dict(timm_s3())
    report = load(build(2, window_size=7), timm_s3(), allow_partial=True)
    assert set(report.resized.values()) == {'window 14x14 to 7x7, bicubic'}
    load(build(2, window_size=7, out_indices=(0, 1)), timm_s3())  # does not have the stage of another window


PART = 'stages.1.blocks.0.attn.w_msa.qkv.weight'


def on_meta(tensor):
    return tensor.to('meta')


def quantised(tensor):
    return torch.quantize_per_tensor(tensor.float(), 0.1, 0, torch.qint8)


class Sharded(torch.Tensor):
    device_mesh = None  # as a DTensor has


def sharded(tensor):
    return tensor.as_subclass(Sharded)


@pytest.mark.parametrize(
    ('change', 'reason'),
    [
        (torch.Tensor.to_sparse, r'not a dense tensor; store it with to_dense\(\)'),
        (torch.Tensor.to_sparse_csr, 'not a dense tensor'),
        (
            lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8),
            r'quantised; store it with dequantize\(\)',
        ),
        (lambda x: torch.nested.nested_tensor([x]), 'not a dense tensor'),
        (lambda x: x[:0], 'empty, as in a shard of DeepSpeed ZeRO-3 or FSDP'),
        (on_meta, r'without values in the checkpoint \(device meta\)|in parts of different'),
        (sharded, 'a DTensor, which is sharded over devices'),
    ],
)
@pytest.mark.parametrize('family', ['mmdet', 'transformers', 'timm'])
@pytest.mark.filterwarnings('ignore')
def test_nothing_is_copied_if_one_tensor_cannot_be(change, reason, family):
    source, backbone = build(1), build(2)
    state = export_state_dict(source, family)
    place = next(index for index, key in enumerate(state) if re.search(r'1\.blocks\.0\..*(qkv|q_proj)\.weight', key))
    key = list(state)[place]
    state[key] = change(state[key])
    raises_and_keeps(backbone, state, rf'Wrong shape or kind: stages\.1\..*({reason})')
    before = copy.deepcopy(backbone.state_dict())
    with pytest.raises(CheckpointError, match=reason):
        backbone.load_state_dict(state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in backbone.state_dict().items())
    report = load(backbone, state, allow_partial=True)
    assert list(report.mismatched) == [PART]
    assert torch.equal(backbone.state_dict()[PART], before[PART])


@pytest.mark.parametrize(
    'change',
    [torch.Tensor.to_sparse, quantised, on_meta],
)
@pytest.mark.filterwarnings('ignore')
def test_other_kinds_of_tensors_in_a_file_are_named(tmp_path, change):
    state = build(1).state_dict()
    state[PART] = change(state[PART])
    torch.save(state, tmp_path / 'a.pth')
    kind = r'stored as torch\._utils\._rebuild_\w+tensor\w*, not as a dense tensor'
    raises_and_keeps(build(2), tmp_path / 'a.pth', rf'{re.escape(PART)} is {kind}')


def test_a_shard_of_zero_3_advises_no_option():
    state = {name: tensor[:0] for name, tensor in build(1).state_dict().items()}
    with pytest.raises(CheckpointError, match='zero_to_fp32') as raised:
        load(build(2), state)
    assert 'build the model' not in str(raised.value)
    with pytest.raises(CheckpointError, match='zero_to_fp32'):
        create_backbone(checkpoint=state)


def test_only_a_head_beside_the_backbone_is_that_of_mmpretrain():
    state = {f'backbone.{name}': tensor for name, tensor in build(1).state_dict().items()}
    assert load(build(2), {**state, 'head.fc.weight': torch.zeros(3, 64)}).family == 'mmpretrain'
    for key in ('roi_head.mask_head.fc.weight', 'aux_head.fc.weight', 'bbox_head.fc.weight'):
        assert load(build(2), {**state, key: torch.zeros(3, 64)}).family == 'mmdet'


@pytest.mark.parametrize('digits', [4, 12, 5000])
@pytest.mark.parametrize('name', ['stages.{}.blocks.0.norm1.weight', 'stages.0.blocks.{}.x', 'norm{}.weight'])
def test_numbers_in_names_are_bounded(digits, name):
    """Neither a list of that many stages nor Python's limit for the digits of an integer is reached."""
    state = {**build(1).state_dict(), name.format('9' * digits): torch.zeros(3)}
    with pytest.raises(CheckpointError, match='but not in the model'):
        load(build(2), state)
    create_backbone(checkpoint=build(1).state_dict())
    with pytest.raises(CheckpointError):
        create_backbone(checkpoint=state)


@pytest.mark.parametrize('name', ['absolute_pos_embed', PART.replace('qkv.weight', 'relative_position_bias_table')])
def test_a_model_is_not_built_for_parameters_of_another_rank(name):
    state = build(1, use_abs_pos_embed=True, pretrain_img_size=32).state_dict()
    state[name] = torch.tensor(1.0)
    with pytest.raises(CheckpointError):
        create_backbone(checkpoint=state)


def test_keys_that_are_neither_text_nor_numbers_are_skipped():
    """The text of an object can be far longer than its pickle."""
    key = StandIn('a.Key')
    nested = []
    for _ in range(64):
        nested = [nested, nested]
    key['x'] = nested
    state = build(1).state_dict()
    load(build(2), {**state, key: torch.ones(3), (1, 2): torch.ones(3), 5: torch.ones(3)})


def test_a_small_file_cannot_contain_a_dict_any_number_of_times():
    inner = build(1).state_dict()
    checkpoint = {'model': inner}
    for _ in range(30):
        checkpoint = {'a': checkpoint, 'b': checkpoint}
    with pytest.raises(CheckpointError, match='several backbones'):
        load(build(2), checkpoint)


def test_a_backbone_beside_many_modules_is_found():
    """Their state dicts are temporary, so that Python gives several of them the same identity."""
    source, backbone = build(1), build(2)
    load(backbone, {**{f'module{number}': torch.nn.Linear(1, 1) for number in range(40)}, 'backbone': source})
    same_weights(backbone, source)


@pytest.mark.parametrize('family', FAMILIES)
@pytest.mark.parametrize('options', [{}, {'window_size': (3, 5), 'use_abs_pos_embed': True, 'pretrain_img_size': 32}])
def test_load_after_export_is_the_identity(family, options):
    source, backbone = build(1, **options), build(2, **options)
    exported = export_state_dict(source, family)
    report = load(backbone, exported)
    assert len(report.loaded) == len(list(source.parameters()))
    assert not report.resized
    for name, tensor in backbone.state_dict().items():
        assert torch.equal(tensor, source.state_dict()[name]), name
    # The exported tensors are copies.
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
    assert 'stages.2.downsample.reduction.weight' in report.left_out
    assert not report.unexpected


class TestCauses:
    def test_another_published_architecture(self):
        with torch.device('meta'):
            small = SwinBackbone('s').state_dict()
        raises_and_keeps(
            SwinBackbone('t'), small, r"a Swin-S with depths \(2, 2, 18, 2\).*build the model with arch='s'"
        )

    @pytest.mark.parametrize('option', ['use_rel_pos_bias', 'patch_norm'])
    def test_only_the_wrong_option_is_advised(self, option):
        backbone = build(**{option: False})
        with pytest.raises(CheckpointError) as raised:
            load(backbone, build().state_dict())
        advice = [line for line in str(raised.value).splitlines() if 'build the model with' in line]
        assert len(advice) == 1
        assert f'build the model with {option}=True' in advice[0]

    def test_no_option_is_advised_for_a_replaced_module(self):
        backbone = build()
        for stage in backbone.stages:
            for block in stage.blocks:
                block.attn.w_msa.qkv = torch.nn.Identity()
        with pytest.raises(CheckpointError, match=r'but not in the model: .*qkv\.weight') as raised:
            load(backbone, build().state_dict())
        assert 'build the model' not in str(raised.value)

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
            on_meta = SwinBackbone(**ARCH)
        with pytest.raises(CheckpointError, match='meta device'):
            load(on_meta, build().state_dict())


def test_partial_loading_keeps_parameters_that_do_not_load():
    source, backbone = build(1), build(2)
    kept = backbone.stages[3].blocks[0].norm1.weight.clone()
    state = source.state_dict()
    del state['stages.3.blocks.0.norm1.weight']
    state['stages.0.blocks.0.ffn.layers.0.0.weight'] = torch.zeros(5, 5)
    state['stages.0.blocks.7.norm1.weight'] = torch.zeros(8)
    report = load(backbone, state, allow_partial=True)
    assert set(report.missing) == {'stages.3.blocks.0.norm1.weight', 'stages.0.blocks.0.ffn.layers.0.0.weight'}
    assert set(report.mismatched) == {'stages.0.blocks.0.ffn.layers.0.0.weight'}
    assert report.unexpected == ['stages.0.blocks.7.norm1.weight']
    assert torch.equal(backbone.stages[3].blocks[0].norm1.weight, kept)
    assert torch.equal(backbone.norm2.bias, source.norm2.bias)
    assert all(word in str(report) for word in ('missing', 'wrong shape', 'unexpected'))
    raises_and_keeps(
        backbone,
        build(embed_dims=16, num_heads=(4,) * 4).state_dict(),
        'none of its parameters fits',
        allow_partial=True,
    )


def test_the_report_is_logged(capsys, caplog):
    with caplog.at_level(logging.INFO, 'swin_dense'):
        load_checkpoint(build(), build(1).state_dict())
        assert 'family: mmdet' in caplog.text
        caplog.clear()
        lines = []
        load_checkpoint(build(), build(1).state_dict(), log=lines.append)
        load_checkpoint(build(), build(1).state_dict(), log=None)
    assert [str(line).splitlines()[1] for line in lines] == ['  family: mmdet, Swin V1']
    assert not caplog.records
    assert not capsys.readouterr().out


@pytest.mark.parametrize('change', [{'window_size': 5}, {'in_channels': 1}])
def test_resizing_is_logged_as_a_warning(caplog, change):
    with caplog.at_level(logging.INFO, 'swin_dense'):
        load_checkpoint(build(), build(1).state_dict())
        load_checkpoint(build(**change), build(1).state_dict())
        build(**change).load_state_dict(build(1).state_dict())
    assert [record.levelname for record in caplog.records] == ['INFO', 'WARNING', 'WARNING']
    assert 'resized' in caplog.text


def test_the_report_of_a_classifier_suggests_clamp_window():
    checkpoint = official_classifier(build(1))
    assert 'clamp_window=True' in str(load(build(), checkpoint))
    assert 'clamp_window' not in str(load(build(clamp_window=True), checkpoint))
    assert 'clamp_window' not in str(load(build(), build(1).state_dict()))


class TestCreateBackbone:
    @pytest.fixture
    def source(self):
        # Unusual head dimensions, and a window that only the index buffers determine.
        options = {'mlp_ratio': 2.0, 'qkv_bias': False, 'use_abs_pos_embed': True, 'pretrain_img_size': 32}
        shape = {'window_size': (5, 3), 'in_channels': 2, 'patch_size': 2, 'out_indices': (1, 2, 3)}
        return build(1, **options, **shape, num_heads=(1, 1, 4, 8))

    @pytest.mark.parametrize('arguments', [(), (None,)])
    def test_options_are_inferred_from_the_file(self, tmp_path, source, arguments):
        torch.save({'state_dict': export_state_dict(source, 'mmseg')}, tmp_path / 'swin.pth')
        made = create_backbone(*arguments, checkpoint=tmp_path / 'swin.pth').double()
        assert not made.training
        assert (made.arch, made.window_size, made.out_indices) == (source.arch, (5, 3), (1, 2, 3))
        image = IMAGE[:, :2]
        for a, b in zip(made(image), source(image), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-4)

    def test_given_options_override_inferred_ones(self, caplog):
        state = build(1, window_size=5).state_dict()
        made = create_backbone('swin_t', state, **{key: ARCH[key] for key in ('embed_dims', 'depths', 'num_heads')})
        assert made.window_size == (5, 5)
        made = create_backbone(checkpoint=state, window_size=7, out_indices=(0,))
        assert (made.window_size, made.out_indices) == ((7, 7), (0,))
        assert 'window 5x5 to 7x7, bicubic' in caplog.text
        with pytest.raises(CheckpointError, match='a Swin with depths'):
            create_backbone('swin_t', state)

    def test_a_published_file_of_window_12_keeps_its_window(self):
        with torch.device('meta'):
            shapes = SwinBackbone('b', window_size=12).state_dict()
        state = {name: torch.zeros(tensor.shape) for name, tensor in shapes.items()}
        assert create_backbone('swin_b', state).window_size == (12, 12)

    def test_v2_gets_its_pretrained_window_sizes(self):
        source = randomize(SwinV2Backbone(**{**ARCH, 'window_size': 8}, pretrained_window_size=(4, 4, 4, 2)), 1)
        made = create_backbone(checkpoint=export_state_dict(source, 'official'))
        assert (type(made), made.window_size, made.pretrained_window_size) == (SwinV2Backbone, (8, 8), (4, 4, 4, 2))
        same_weights(made, source)
        for options in ({}, {'window_size': 12}):  # the given window is not that of the training
            with pytest.raises(CheckpointError, match=r'does not record the windows.*give pretrained_window_size'):
                create_backbone(checkpoint=export_state_dict(source, 'timm'), **options)
        assert create_backbone(checkpoint=source.state_dict(), pretrained_window_size=4).window_size == (8, 8)
        with pytest.raises(CheckpointError, match='It is a Swin V2'):
            create_backbone('swin_t', source.state_dict())

    def test_v2_windows_that_shrink_to_small_maps(self):
        """Only with clamp_window=True, and if the windows of the first stage are those of the training."""
        source = randomize(SwinV2Backbone(**{**ARCH, 'window_size': 4}, pretrained_window_size=(4, 4, 4, 2)), 1)
        state = export_state_dict(source, 'official')
        options = {**ARCH, 'window_size': 4}
        clamped = SwinV2Backbone(**options, clamp_window=True)
        load(clamped, state)
        same_weights(clamped, source)
        advice = re.escape('of 4x4, 4x4, 4x4, 2x2 tokens per stage') + '.*' + re.escape('size=(4, 4, 4, 2)')
        raises_and_keeps(SwinV2Backbone(**options), state, advice)
        raises_and_keeps(SwinV2Backbone(**options, clamp_window=True, pretrained_window_size=3), state, advice)

    def test_flat_positions_of_a_non_square_grid_need_pretrain_img_size(self):
        source = build(1, use_abs_pos_embed=True, pretrain_img_size=(32, 48))
        with pytest.raises(CheckpointError, match='height and width of its 96 absolute positions'):
            create_backbone(checkpoint=source.state_dict())
        made = create_backbone(checkpoint=source.state_dict(), pretrain_img_size=(32, 48)).double()
        same_outputs(made, source.float().double())
        assert create_backbone(checkpoint=export_state_dict(source, 'official')).position_grid == (8, 12)

    def test_an_architecture_or_a_checkpoint_is_required(self):
        with pytest.raises(TypeError, match=r"create_backbone\('swin_t'\), or a checkpoint"):
            create_backbone()

    @pytest.mark.parametrize(
        ('name', 'advice'),
        [
            ('swin_tiny_patch4_window7_224', r"'swin_t' with window_size=7"),
            ('swin_large_patch4_window12_384.ms_in22k', r"'swin_l' with window_size=12"),
            ('swinv2_base_window16_256', r"'swinv2_b' with window_size=16"),
        ],
    )
    def test_names_of_timm_and_the_authors_are_explained(self, name, advice):
        with pytest.raises(ValueError, match=advice):
            create_backbone(name)

    def test_the_file_is_read_and_hashed_once(self, tmp_path, monkeypatch):
        path = write_file(tmp_path / 'swin.pth', {'model': build(1).state_dict()}, add_hash=True)
        opened, hashed = [], []
        monkeypatch.setattr(read, 'read_pickle', lambda *a: opened.append(a) or unpickler.read_pickle(*a))
        file_digest = read.file_digest
        monkeypatch.setattr(read, 'file_digest', lambda *a: hashed.append(a) or file_digest(*a))
        create_backbone(checkpoint=path)
        assert (len(opened), len(hashed)) == (1, 1)


class TestClassifier:
    @pytest.fixture
    def state(self):
        """A checkpoint as the authors' code saves it."""
        return official_classifier(build(1))

    @pytest.fixture
    def classifier(self):
        return randomize(SwinClassifier(num_classes=10, **ARCH).double().eval(), 2)

    def test_backbone_final_norm_and_head_load(self, state, classifier):
        report = load(classifier, state)
        assert (report.missing, report.unexpected, report.resized) == ([], [], {})
        assert {'head.weight', 'norm3.bias', 'stages.0.blocks.0.norm1.weight'} <= set(report.loaded)
        assert not any('head' in key for key in report.left_out)
        assert torch.equal(classifier.head.weight, state['model']['head.weight'].double())
        assert torch.equal(classifier.backbone.norm3.bias, state['model']['norm.bias'].double())

    def test_its_load_state_dict_converts(self, state, classifier):
        classifier.load_state_dict(state)
        assert torch.equal(classifier.head.bias, state['model']['head.bias'].double())
        again = SwinClassifier(num_classes=10, **ARCH)
        again.load_state_dict(classifier.state_dict())
        assert torch.equal(again.head.bias, state['model']['head.bias'])

    def test_another_number_of_classes(self, state, classifier):
        other = official_classifier(build(1), classes=7)
        raises_and_keeps(classifier, other, 'build the model with num_classes=7')
        head = classifier.head.weight.clone()
        report = load(classifier, other, allow_partial=True)
        assert set(report.mismatched) == {'head.weight', 'head.bias'}
        assert torch.equal(classifier.head.weight, head)
        assert torch.equal(classifier.backbone.norm3.bias, other['model']['norm.bias'].double())

    @pytest.mark.parametrize('absent', ['head', 'norm.'])
    def test_an_incomplete_classifier(self, state, classifier, absent):
        part = {key: x for key, x in state['model'].items() if not key.startswith(absent)}
        raises_and_keeps(classifier, part, 'no linear head' if absent == 'head' else r'norm3\.weight')
        report = load(classifier, part, allow_partial=True)
        assert {name.partition('.')[0] for name in report.missing} == {'head' if absent == 'head' else 'norm3'}


def test_create_backbone_takes_a_checkpoint(tmp_path):
    source = build(1)
    torch.save({'state_dict': export_state_dict(source, 'mmseg')}, tmp_path / 'swin.pth')
    made = create_backbone('swin_t', tmp_path / 'swin.pth', **ARCH)
    assert torch.equal(
        made.stages[3].blocks[0].ffn.layers[1].weight, source.stages[3].blocks[0].ffn.layers[1].weight.float()
    )


@given(data=st.data())
@settings(max_examples=80)
def test_a_damaged_checkpoint_loads_correctly_or_not_at_all(data):
    options = {'depths': (1, 1), 'num_heads': (1, 1), 'embed_dims': 4}
    source, backbone = build(1, **options), build(2, **options)
    family = data.draw(st.sampled_from(list(FAMILIES)))
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
        # Only output norms without an entry in the checkpoint may be new.
        kept = [key for key, value in dict(items).items() if isinstance(value, torch.Tensor)]
        for stage in {int(name.partition('.')[0].removeprefix('norm')) for name in report.new}:
            stems = (f'norm{stage}', f'hidden_states_norms.stage{stage + 1}')
            assert not any(key.startswith(stems) for key in kept)
        expected = {**expected, **{name: before[name] for name in report.new}}
    assert all(torch.equal(tensor, expected[name]) for name, tensor in backbone.state_dict().items())


def test_an_integer_part_of_a_parameter_is_refused():
    """Concatenated with the other parts, which are floats, it would become a float tensor."""
    state = export_state_dict(build(1), 'transformers')
    key = next(key for key in state if 'query.weight' in key or 'q_proj.weight' in key)
    with pytest.raises(CheckpointError):
        load(build(2), {**state, key: state[key].long()})

"""Which backbone of a checkpoint is loaded: prefixes, parts of larger models, running averages."""

import pytest
import torch

from swin_dense import create_backbone, load_checkpoint
from swin_dense.checkpoint import CheckpointError, export_state_dict
from tests.checkpoint.helpers import (
    build,
    build_peer,
    load,
    official_classifier,
    prefixed,
    raises_and_keeps,
    same_outputs,
)
from tests.conftest import equal_weights, tiny


@pytest.mark.parametrize(
    ('wrap', 'prefix'),
    [
        (lambda state: {'state_dict': prefixed('backbone.', state)}, 'state_dict.backbone.'),
        (lambda state: prefixed('module.backbone.', state), 'module.backbone.'),
        (lambda state: {'model': prefixed('encoder.', state), 'epoch': 3}, 'model.encoder.'),
        (lambda state: {'net': {'model': state}, 'optimizer': {'state': {0: torch.zeros(1)}}}, 'net.model.'),
        (lambda state: prefixed('_orig_mod.', state), ''),
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
    before = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}
    report = load(backbone, official_classifier(source))
    assert report.family == 'official'
    assert report.new == report.missing
    assert report.left_out['model.head.weight'] == 'the classifier'
    assert report.left_out['model.layers.0.blocks.1.attn_mask'] == 'buffers that are computed here'
    assert not report.unexpected
    assert 'norm0.weight' in str(report)
    trained = source.state_dict()
    for name, tensor in backbone.state_dict().items():
        is_new = name.startswith('norm')
        assert (name in report.new) == is_new
        assert torch.equal(tensor, before[name] if is_new else trained[name]), name


def test_final_norm_on_request():
    source, backbone = build(1), build(2)
    checkpoint = official_classifier(source)
    report = load(backbone, checkpoint, final_norm=True)
    assert torch.equal(backbone.norm3.weight, checkpoint['model']['norm.weight'].double())
    assert torch.equal(backbone.norm3.bias, checkpoint['model']['norm.bias'].double())
    assert {name.partition('.')[0] for name in report.new} == {'norm0', 'norm1', 'norm2'}
    assert not any('norm' in key for key in report.left_out)
    raises_and_keeps(backbone, source.state_dict(), 'no final norm', final_norm=True)
    raises_and_keeps(build(out_indices=(0, 1)), checkpoint, 'does not return', final_norm=True)


def test_a_running_average_loads_only_on_request():
    weights, average, backbone = build(1), build(2), build(3)
    checkpoint = {'state_dict': weights.state_dict(), 'ema_state_dict': prefixed('module.', average)}
    load(backbone, checkpoint)
    assert equal_weights(backbone, weights)
    load(backbone, checkpoint, ema=True)
    assert equal_weights(backbone, average)
    raises_and_keeps(backbone, {'state_dict': weights.state_dict()}, 'no running average', ema=True)
    raises_and_keeps(backbone, {'model_ema': average.state_dict()}, 'load them with ema=True')


def test_mmengine_saves_the_average_as_the_weights():
    hook = pytest.importorskip('mmengine.hooks').EMAHook()
    weights, average, backbone = build(1), build(2), build(3)
    averages = {'steps': torch.tensor(3), **prefixed('module.', average)}
    checkpoint = {'state_dict': weights.state_dict(), 'ema_state_dict': averages}
    hook._swap_ema_state_dict(checkpoint)  # as before each save
    for ema in (True, False):
        load(backbone, checkpoint, ema=ema)
        assert equal_weights(backbone, average)


def test_with_several_backbones_a_prefix_is_required():
    checkpoint = prefixed('student.backbone.', build(1)) | prefixed('teacher.backbone.', build(2))
    backbone = build(3)
    raises_and_keeps(backbone, checkpoint, "no backbone under prefix='teach'", prefix='teach')
    raises_and_keeps(backbone, checkpoint, 'several backbones', prefix='backbone')
    raises_and_keeps(backbone, checkpoint, 'no backbone under', prefix='')
    with pytest.raises(TypeError, match='prefix must be a string'):
        load(backbone, checkpoint, prefix=['teacher'])
    load(backbone, {**checkpoint, **build(4).state_dict()}, prefix='')
    assert equal_weights(backbone, build(4))


@pytest.mark.parametrize(
    ('container', 'inner'),
    [
        ('', 'backbone.'),
        ('state_dict', 'module.backbone.'),
        ('state_dict', ''),
        ('', ''),
    ],
)
@pytest.mark.parametrize('family', ['mmdet', 'official', 'transformers'])
def test_backbones_of_any_size_need_a_prefix(container, inner, family):
    """The teacher has more than twice the blocks of the student, as in EsViT or a distillation."""
    sources = {'student': build(1), 'teacher': build(2, depths=(4, 4, 4, 4))}
    checkpoint = {}
    for name, source in sources.items():
        checkpoint |= prefixed(f'{name}.{inner}', export_state_dict(source, family))
    checkpoint = {container: checkpoint} if container else checkpoint
    raises_and_keeps(build(3), checkpoint, r"several backbones, under '.*student\..*', '.*teacher\..*'; .*prefix=")
    with pytest.raises(CheckpointError, match='several backbones'):
        create_backbone(checkpoint=checkpoint)
    with pytest.raises(CheckpointError, match='several backbones'):
        build(3).load_state_dict(checkpoint)
    backbone = build(3)
    report = load(backbone, checkpoint, prefix='student')
    assert equal_weights(backbone, sources['student'])
    assert report.prefix == f'{container}.student.{inner}'.lstrip('.')
    for name, source in sources.items():
        expected = source.float()
        assert equal_weights(create_backbone(checkpoint=checkpoint, prefix=name), expected)
        assert equal_weights(create_backbone(checkpoint=checkpoint, prefix=f'{name}.{inner}'), expected)


def test_a_prefix_that_is_the_end_of_another_is_exact():
    backbone = build(3)
    checkpoint = prefixed('backbone.', build(1)) | prefixed('teacher.backbone.', build(2))
    load(backbone, checkpoint, prefix='backbone')
    assert equal_weights(backbone, build(1))
    load(backbone, checkpoint, prefix='teacher')
    assert equal_weights(backbone, build(2))


def test_a_prefix_chooses_the_weights_or_their_average():
    average, backbone = build(2), build(3)
    checkpoint = {
        'state_dict': prefixed('student.', build(1)) | prefixed('teacher.', build(4)),
        'model_ema': prefixed('student.', average),
    }
    load(backbone, checkpoint, prefix='student')
    assert equal_weights(backbone, build(1))
    load(backbone, checkpoint, prefix='student', ema=True)
    assert equal_weights(backbone, average)
    backbone.reset_parameters()
    load(backbone, checkpoint, prefix='model_ema')
    assert equal_weights(backbone, average)


def test_a_partly_wrapped_backbone_counts_as_one_of_several():
    """The student has LoRA, so that some of its names are no longer those of a Swin."""
    checkpoint = prefixed('teacher.', build(2))
    for name, value in prefixed('student.', build(1)).items():
        name = name.replace('qkv.', 'qkv.base_layer.')
        checkpoint[name.replace('ffn.layers.0.0.', 'ffn.layers.0.0.base_layer.')] = value
    raises_and_keeps(build(3), checkpoint, "several backbones, under 'student.', 'teacher.'")


def test_a_few_keys_that_resemble_a_backbone_are_not_one():
    source, backbone = build(1), build(2)
    state = prefixed('backbone.', source)
    state['adapter.layers.0.blocks.0.norm1.weight'] = state['x.stages.0.blocks.0.norm2.bias'] = torch.zeros(8)
    load(backbone, state)
    assert equal_weights(backbone, source)
    name = 'stages.0.blocks.0.norm2.bias'
    assert load(backbone, {name: torch.zeros(8)}, allow_partial=True).loaded == [name]


def test_a_prefix_without_a_checkpoint_is_an_error():
    with pytest.raises(TypeError, match=r"prefix='teacher' .* in a checkpoint"):
        create_backbone('swin_t', prefix='teacher')


def test_the_report_of_ones_own_model_names_its_parts_and_no_parameters_of_them():
    model = torch.nn.ModuleDict({'backbone': tiny(), 'neck': torch.nn.Conv2d(8, 8, 1), 'head': torch.nn.Linear(8, 3)})
    saved = {'state_dict': model.state_dict()}
    saved['state_dict']['backbone.stages.0.blocks.0.attn.w_msa.relative_position_index'] = torch.zeros(49, 49).long()
    report = load_checkpoint(tiny(), saved, log=None)
    last = str(report).splitlines()[-1]
    assert last == '  left out, other parts of the model, 4 entries: state_dict.neck, state_dict.head'
    assert len(str(report).splitlines()) == 3
    assert sum(name.endswith('relative_position_index') for name in report.left_out) == 1

"""Which backbone of a checkpoint is loaded: prefixes, parts of larger models, running averages."""

import copy

import pytest
import torch

from swin_dense import create_backbone
from swin_dense.checkpoint import CheckpointError, export_state_dict
from tests.checkpoint.helpers import (
    build,
    build_peer,
    load,
    official_classifier,
    raises_and_keeps,
    same_outputs,
)
from tests.conftest import equal_weights


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


def test_a_running_average_loads_only_on_request():
    weights, average, backbone = build(1), build(2), build(3)
    checkpoint = {
        'state_dict': weights.state_dict(),
        'ema_state_dict': {f'module.{k}': v for k, v in average.state_dict().items()},
    }
    load(backbone, checkpoint)
    assert equal_weights(backbone, weights)
    load(backbone, checkpoint, ema=True)
    assert equal_weights(backbone, average)
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
        assert equal_weights(backbone, average)


def test_with_several_backbones_a_prefix_is_required():
    student, teacher, backbone = build(1), build(2), build(3)
    checkpoint = {f'student.backbone.{k}': v for k, v in student.state_dict().items()}
    checkpoint |= {f'teacher.backbone.{k}': v for k, v in teacher.state_dict().items()}
    raises_and_keeps(backbone, checkpoint, r"several backbones, under 'student.backbone.', 'teacher.backbone.'")
    raises_and_keeps(backbone, checkpoint, "no backbone under prefix='teach'", prefix='teach')
    raises_and_keeps(backbone, checkpoint, 'several backbones', prefix='backbone')
    raises_and_keeps(backbone, checkpoint, 'no backbone under', prefix='')
    with pytest.raises(TypeError, match='prefix must be a string'):
        load(backbone, checkpoint, prefix=['teacher'])
    load(backbone, {**checkpoint, **build(4).state_dict()}, prefix='')
    assert equal_weights(backbone, build(4))


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
        assert equal_weights(create_backbone(checkpoint=checkpoint, prefix=name), expected)
        assert equal_weights(create_backbone(checkpoint=checkpoint, prefix=f'{name}.{inner}'), expected)
    backbone = build(3)
    report = load(backbone, checkpoint, prefix='student')
    assert equal_weights(backbone, student)
    assert report.prefix == f'{container + "." if container else ""}student.{inner}'


def test_a_prefix_that_is_the_end_of_another_is_exact():
    one, other, backbone = build(1), build(2), build(3)
    checkpoint = {f'backbone.{k}': v for k, v in one.state_dict().items()}
    checkpoint |= {f'teacher.backbone.{k}': v for k, v in other.state_dict().items()}
    load(backbone, checkpoint, prefix='backbone')
    assert equal_weights(backbone, one)
    load(backbone, checkpoint, prefix='teacher')
    assert equal_weights(backbone, other)


def test_a_prefix_chooses_the_weights_or_their_average():
    student, average, backbone = build(1), build(2), build(3)
    checkpoint = {'state_dict': {f'student.{k}': v for k, v in student.state_dict().items()}}
    checkpoint['state_dict'] |= {f'teacher.{k}': v for k, v in build(4).state_dict().items()}
    checkpoint['model_ema'] = {f'student.{k}': v for k, v in average.state_dict().items()}
    load(backbone, checkpoint, prefix='student')
    assert equal_weights(backbone, student)
    load(backbone, checkpoint, prefix='student', ema=True)
    assert equal_weights(backbone, average)
    load(backbone, checkpoint, prefix='model_ema')
    assert equal_weights(backbone, average)


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
    assert equal_weights(backbone, source)


def test_a_prefix_without_a_checkpoint_is_an_error():
    with pytest.raises(TypeError, match=r"prefix='teacher' .* in a checkpoint"):
        create_backbone('swin_t', prefix='teacher')

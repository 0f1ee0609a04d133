"""Groups of parameters for optimisers, texts of modules, and errors that need no forward pass."""

import re

import pytest
import torch

from swin_dense import SwinBackbone, SwinClassifier, SwinV2Backbone
from swin_dense.models.layer_ids import layer_of
from tests.conftest import TINY


def build(kind=SwinBackbone, **options):
    with torch.device('meta'):
        return kind(**{**TINY, **options})


def test_parameters_without_weight_decay():
    names = build(use_abs_pos_embed=True).no_weight_decay()
    tables = {
        f'stages.{stage}.blocks.{block}.attn.w_msa.relative_position_bias_table'
        for stage in range(4)
        for block in (0, 1)
    }
    assert names == {'absolute_pos_embed', *tables}


def test_parameters_of_v2_without_weight_decay():
    names = build(SwinV2Backbone).no_weight_decay()
    last_parts = {name.partition('w_msa.')[2] for name in names}
    assert last_parts == {'logit_scale', 'cpb_mlp.0.weight', 'cpb_mlp.0.bias', 'cpb_mlp.2.weight'}


def group_of(matcher, name):
    """Return the name of the group and the number in it, as timm's group_with_matcher finds them."""
    for group, patterns in matcher.items():
        for pattern, number in [(patterns, None)] if isinstance(patterns, str) else patterns:
            found = re.match(pattern, name)
            if found:
                return group, number or tuple(map(int, found.groups()))
    return None


def test_groups_of_layer_decay():
    """The patch merging of a stage is in the group of the next stage's first block."""
    fine, coarse = build().group_matcher(), build().group_matcher(coarse=True)
    assert group_of(fine, 'patch_embed.norm.weight') == ('stem', ())
    assert group_of(fine, 'stages.1.blocks.1.norm1.weight') == ('blocks', (1, 1))
    assert group_of(fine, 'stages.2.downsample.norm.weight') == ('blocks', (3, 0))
    assert group_of(fine, 'norm3.weight') == ('blocks', (99999,))
    assert group_of(coarse, 'patch_embed.norm.weight') == ('stem', ())
    assert group_of(coarse, 'stages.2.downsample.norm.weight') == ('blocks', (2,))


def test_a_parameter_beside_the_blocks_of_a_stage_has_no_layer():
    assert layer_of('stages.0.blocks.7.lora.weight', (2, 2)) == 2  # beyond the depth, the last block
    assert layer_of('stages.1.downsample.norm.weight', (2, 2)) == 4
    with pytest.raises(ValueError, match=r"'stages.0.adapter.weight'.*beside the stages"):
        layer_of('stages.0.adapter.weight', (2, 2))


def test_a_prefix_tells_the_backbone_from_the_head():
    backbone = build()
    assert backbone.get_layer_depth('patch_embed.norm.weight') == (0, 10)
    assert backbone.get_layer_depth('head.patch_embed.weight', 'backbone.') == (9, 10)


def test_several_unknown_options_are_named_at_once():
    with pytest.raises(TypeError) as error:
        build(window_sise=7, img_size=224)
    message = str(error.value)
    assert "'window_sise'; did you mean 'window_size'?" in message
    assert "'img_size': images of any size work" in message
    assert 'pretrained_window_size' not in message


def test_an_error_of_v2_lists_its_own_options_alone():
    with pytest.raises(TypeError) as error:
        build(SwinV2Backbone, window_sise=7)
    assert "'pretrained_window_size'" in str(error.value)
    assert 'qk_scale' not in str(error.value)
    assert 'use_rel_pos_bias' not in str(error.value)


def test_v2_accepts_the_defaults_of_v1():
    build(SwinV2Backbone, qk_scale=None, use_rel_pos_bias=True)


def test_a_classifier_reads_the_last_stage():
    assert build(lambda **options: SwinClassifier('swinv2_t', **options)).backbone.out_indices == (3,)
    two = {'depths': (1, 1), 'num_heads': (1, 1), 'strides': (4, 2)}
    assert build(lambda **options: SwinClassifier(**options), **two, num_classes=5).backbone.out_indices == (1,)
    with pytest.raises(TypeError, match='leave out_indices out'):
        SwinClassifier('swin_t', out_indices=(1,))
    with pytest.raises(ValueError, match='num_classes must be at least 1'):
        build(lambda **options: SwinClassifier(**options), num_classes=0)


def test_modules_show_what_they_do():
    block = build(window_size=(4, 6), drop_path_rate=0.7, clamp_window=True).stages[0].blocks[1]
    assert 'shift=(2, 3), clamp_window=True' in str(block.attn)
    assert 'num_heads=1, window_size=(4, 6)' in str(block.attn.w_msa)
    assert 'drop_prob=0.1' in str(block.drop_path)

"""Groups of parameters for optimisers, and texts of modules."""

import re

import pytest
import torch

from swin_dense import SwinBackbone, SwinV2Backbone
from swin_dense.models.layer_ids import layer_of
from tests.conftest import TINY


def build(kind=SwinBackbone, **options):
    with torch.device('meta'):
        return kind(**TINY, **options)


def test_parameters_without_weight_decay():
    model = build(use_abs_pos_embed=True)
    tables = [name for name, _ in model.named_parameters() if name.endswith('relative_position_bias_table')]
    assert len(tables) == 8
    assert model.no_weight_decay() == {'absolute_pos_embed', *tables}


def test_parameters_of_v2_without_weight_decay():
    names = build(SwinV2Backbone).no_weight_decay()
    last_parts = {name.partition('w_msa.')[2] for name in names}
    assert last_parts == {'logit_scale', 'cpb_mlp.0.weight', 'cpb_mlp.0.bias', 'cpb_mlp.2.weight'}


def test_patch_merging_joins_the_next_stage_unless_groups_are_coarse():
    """All other groups are compared with timm's in tests/peers/test_layer_decay.py."""
    merging = 'stages.2.downsample.norm.weight'
    fine = build().group_matcher()['blocks']
    assert next(group for pattern, group in fine if re.match(pattern, merging)) == (3, 0)
    coarse = build().group_matcher(coarse=True)['blocks']
    assert re.match(coarse, merging)[1] == '2'


def test_layers_are_the_embedding_the_blocks_and_the_head():
    backbone = build()
    assert backbone.get_layer_depth('patch_embed.norm.weight') == (0, 10)
    for name, layer in [
        ('backbone.patch_embed.projection.weight', 0),
        ('backbone.stages.1.blocks.0.norm1.bias', 3),
        ('backbone.stages.1.downsample.reduction.weight', 4),
        ('backbone.norm1.bias', 9),
        ('head.patch_embed.weight', 9),
    ]:
        assert backbone.get_layer_depth(name, 'backbone.') == (layer, 10)


def test_a_parameter_beside_the_blocks_of_a_stage_has_no_layer():
    assert layer_of('stages.0.blocks.7.lora.weight', (2, 2)) == 2  # beyond the depth, the last block
    with pytest.raises(ValueError, match=r"'stages.0.adapter.weight'.*beside the stages"):
        layer_of('stages.0.adapter.weight', (2, 2))


def test_modules_show_what_they_do():
    block = build(window_size=(4, 6), drop_path_rate=0.7, clamp_window=True).stages[0].blocks[1]
    assert 'shift=(2, 3), clamp_window=True' in str(block.attn)
    assert 'num_heads=1, window_size=(4, 6)' in str(block.attn.w_msa)
    assert 'drop_prob=0.1' in str(block.drop_path)

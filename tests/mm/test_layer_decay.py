"""Layer-wise decay: compare the rate of each parameter with a table written by hand."""

import re

import pytest
import torch
from mmengine.optim import build_optim_wrapper
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from swin_dense import SwinDense, SwinDenseV2
from tests.conftest import TINY

DEPTHS = (2, 2, 6, 2)
# For depths 2, 2, 6, 2: prefix of the name, layer, stage.
TABLE = """
    backbone.patch_embed.           0 0
    backbone.absolute_pos_embed    13 5
    backbone.stages.0.blocks.0.     1 1
    backbone.stages.0.blocks.1.     2 1
    backbone.stages.0.downsample.   2 1
    backbone.stages.1.blocks.0.     3 2
    backbone.stages.1.blocks.1.     4 2
    backbone.stages.1.downsample.   4 2
    backbone.stages.2.blocks.0.     5 3
    backbone.stages.2.blocks.5.    10 3
    backbone.stages.2.downsample.  10 3
    backbone.stages.3.blocks.0.    11 4
    backbone.stages.3.blocks.1.    12 4
    backbone.norm0.                13 5
    backbone.norm3.                13 5
    head.                          13 5
"""
EXEMPT = ('absolute_pos_embed', 'relative_position_bias_table', 'logit_scale', 'cpb_mlp')


class Model(nn.Module):
    def __init__(self, kind=SwinDense, **options):
        super().__init__()
        self.backbone = kind(**{**TINY, 'depths': DEPTHS, **options})
        self.head = nn.Linear(128, 3)


def settings_of(model, **paramwise):
    """Return name -> (rate, weight decay) of an optimiser with rate 1 and weight decay 0.05."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {}
    for group in optimizer_of(model, {'lr': 1.0, 'weight_decay': 0.05}, paramwise).param_groups:
        setting = group['lr'], group['weight_decay']
        found |= {names[id(parameter)]: setting for parameter in group['params']}
    return found


def optimizer_of(model, options, paramwise):
    config = {
        'constructor': 'SwinLayerDecayConstructor',
        'optimizer': {'type': 'AdamW', **options},
        'paramwise_cfg': paramwise,
    }
    return build_optim_wrapper(model, config).optimizer


@pytest.mark.parametrize('decay_type', ['layer_wise', 'stage_wise'])
@pytest.mark.parametrize('kind', [SwinDense, SwinDenseV2])
def test_rates_equal_the_table(kind, decay_type):
    model = Model(kind, use_abs_pos_embed=True)
    found = settings_of(model, decay_rate=0.5, decay_type=decay_type)
    assert found.keys() == dict(model.named_parameters()).keys()
    unseen = set(found)
    for line in TABLE.strip().splitlines():
        prefix, layer, stage = line.split()
        below_the_head = 13 - int(layer) if decay_type == 'layer_wise' else 5 - int(stage)
        names = [name for name in found if name.startswith(prefix)]
        assert names, line
        unseen -= set(names)
        assert {found[name][0] for name in names} == {0.5**below_the_head}, line
    # The table lacks norms between the first and the last, and blocks 1 to 4 of the third stage.
    assert all(re.search(r'norm[12]\.|stages\.2\.blocks\.[1-4]', name) for name in unseen)
    for name, parameter in model.named_parameters():
        is_exempt = parameter.ndim == 1 or any(key in name for key in EXEMPT)
        assert found[name][1] == (0 if is_exempt else 0.05), name


def test_custom_keys_of_mmengine_also_apply_and_frozen_parameters_are_left_out():
    custom_keys = {'head': {'lr_mult': 10, 'decay_mult': 2}}
    found = settings_of(Model(), decay_rate=0.5, num_layers=12, custom_keys=custom_keys)
    assert found['head.weight'] == (10, 0.1)
    assert found['backbone.patch_embed.projection.weight'] == (0.5**13, 0.05)
    found = settings_of(Model(frozen_stages=1), decay_rate=0.5)
    assert not any(name.startswith(('backbone.patch_embed', 'backbone.stages.0.blocks')) for name in found)


@pytest.mark.parametrize(
    ('paramwise', 'error', 'words'),
    [
        ({}, TypeError, 'needs decay_rate'),
        ({'decay_rate': 0.5, 'num_layers': 24}, ValueError, 'has 12; leave num_layers out'),
        ({'decay_rate': 0}, ValueError, 'above 0'),
        ({'decay_rate': 0.5, 'decay_type': 'layerwise'}, ValueError, "did you mean 'layer_wise'"),
        ({'layer_decay_rate': 0.5}, TypeError, "did you mean 'decay_rate'"),
    ],
)
def test_wrong_settings_say_what_is_allowed(paramwise, error, words):
    with pytest.raises(error, match=words):
        settings_of(Model(), **paramwise)


def test_wrong_optimizers_and_models_are_refused():
    with pytest.raises(TypeError, match='optimizer needs lr'):
        optimizer_of(Model(), {}, {'decay_rate': 0.5})
    with pytest.raises(ValueError, match='no Swin of swin_dense in Linear'):
        settings_of(nn.Linear(2, 2), decay_rate=0.5)
    model = Model()
    model.backbone.stages[1].adapter = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"adapter\.weight'.*inside a block"):
        settings_of(model, decay_rate=0.5)


def test_a_wrapped_stage_has_the_rates_of_its_layers():
    """Wrappers insert components into the names of parameters, which must not give them the rate of the head."""
    plain, model = Model(), Model()
    backbone, stages = model.backbone, model.backbone.stages
    backbone.patch_embed = checkpoint_wrapper(backbone.patch_embed)
    stages[1] = torch.compile(stages[1], backend='eager')
    stages[2] = checkpoint_wrapper(stages[2])
    stages[3].blocks[1] = checkpoint_wrapper(stages[3].blocks[1])
    for decay_type in ('layer_wise', 'stage_wise'):
        expected = settings_of(plain, decay_rate=0.5, decay_type=decay_type)
        found = settings_of(model, decay_rate=0.5, decay_type=decay_type)
        assert list(found.values()) == list(expected.values())
    expected = [plain.backbone.get_layer_depth(name, 'backbone.') for name, _ in plain.named_parameters()]
    for wrapped in (model, torch.compile(model, backend='eager')):
        depths = [model.backbone.get_layer_depth(name, 'backbone.') for name, _ in wrapped.named_parameters()]
        assert depths == expected

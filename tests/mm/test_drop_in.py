"""Every Swin config in the wheels of mmdet and mmseg trains the same parameters if only the backbone's type changes."""

import ast
import functools
from importlib.resources import files
from pathlib import Path
from unittest import mock

import mmdet.models.backbones
import mmseg.models.backbones
import pytest
from mmengine.config import Config, ConfigDict
from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS, init_default_scope
from torch import nn

from swin_dense import SwinDense
from tests.conftest import some

PEERS = {
    'mmdet': mmdet.models.backbones.SwinTransformer,
    'mmseg': mmseg.models.backbones.SwinTransformer,
}


def swin_configs():
    """Yield (package, path) of the configs whose path or content contains 'swin'."""
    for package in PEERS:
        root = Path(str(files(package))) / '.mim' / 'configs'
        for path in sorted(root.rglob('*.py')):
            if '_base_' not in path.parts and 'swin' in f'{path.relative_to(root)} {path.read_text()}'.lower():
                yield package, path


def backbones(node):
    """Yield the backbone configs of a resolved config whose type is a SwinTransformer."""
    if isinstance(node, dict):
        if str(node.get('type', '')).endswith('SwinTransformer'):
            yield node
        for value in node.values():
            yield from backbones(value)
    elif isinstance(node, (list, tuple)):
        for value in node:
            yield from backbones(value)


@functools.lru_cache(maxsize=16)
def built(kind, options):
    """Build a backbone from ``str(options)``, with most of its random initialisation skipped."""
    with mock.patch('torch.nn.init.kaiming_uniform_'), mock.patch('torch.nn.init.trunc_normal_'):
        return kind(**ast.literal_eval(options))


def optimized(config, backbone):
    """Return name, shape, learning rate and weight decay of each parameter, in the order of mmengine's optimiser."""
    model = nn.Module()
    model.backbone = backbone
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    given = config.optim_wrapper
    constructor = OPTIM_WRAPPER_CONSTRUCTORS.build(
        {
            'type': given.get('constructor', 'DefaultOptimWrapperConstructor'),
            'optim_wrapper_cfg': {'type': 'OptimWrapper', 'optimizer': given.optimizer},
            'paramwise_cfg': given.get('paramwise_cfg'),
        }
    )
    found = []
    for group in constructor(model).optimizer.param_groups:
        settings = group['lr'], group['weight_decay']
        found += [(names[id(parameter)], parameter.shape, *settings) for parameter in group['params']]
    return found


def shapes_of(model):
    return [(name, parameter.shape) for name, parameter in model.named_parameters()]


@pytest.mark.parametrize(
    'config',
    some(swin_configs(), every=3),
    ids=lambda config: f'{config[0]}-{config[1].stem}',
)
def test_a_config_has_the_same_parameters_and_optimiser_settings(config):
    package, path = config
    config = Config.fromfile(path)
    found = list(backbones(config.get('model', {})))
    if not found:
        pytest.skip('no Swin in its model')
    init_default_scope(package)
    for backbone in {str(backbone): backbone for backbone in found}.values():
        options = {key: value for key, value in ConfigDict(backbone).to_dict().items() if key != 'type'}
        if not options.get('init_cfg'):
            options.pop('init_cfg', None)
        ours, theirs = (built(kind, str(options)) for kind in (SwinDense, PEERS[package]))
        assert len(ours.out_indices) == len(theirs.out_indices)
        assert shapes_of(ours) == shapes_of(theirs)
        # A config that only evaluates may have no optimizer.
        if 'optim_wrapper' in config:
            assert optimized(config, ours) == optimized(config, theirs)

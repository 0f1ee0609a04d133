"""SwinDense in the registries of mmengine."""

import mmdet.registry
import mmseg.registry
import pytest
import torch
from mmengine.config import Config
from mmengine.logging import MMLogger
from mmengine.model import BaseModule
from mmengine.registry import MODELS, DefaultScope
from torch import nn

import swin_dense
from swin_dense import SwinBackbone, SwinDense, SwinDenseV2
from tests.conftest import TINY, equal_weights, some
from tests.processes import python


@pytest.mark.parametrize(
    'registry',
    [
        MODELS,
        mmdet.registry.MODELS,
        mmseg.registry.MODELS,
    ],
)
@pytest.mark.parametrize('kind', [SwinDense, SwinDenseV2])
def test_every_registry_builds_both_versions(registry, kind):
    for name in (kind.__name__, f'swin_dense.{kind.__name__}'):
        backbone = registry.build({'type': name, **TINY})
        assert type(backbone) is kind
        assert isinstance(backbone, BaseModule)
    backbone.init_weights()
    assert (kind.__name__ in registry.module_dict) == (registry is MODELS)


@pytest.mark.parametrize('scope', some(['mmdet', 'mmseg'], every=2))
def test_custom_imports_of_a_config_register_swin_dense(scope, tmp_path):
    config = tmp_path / 'config.py'
    config.write_text(
        "custom_imports = dict(imports=['swin_dense'], allow_failed_imports=False)\n"
        f"model = dict(type='SwinDense', embed_dims=16, num_heads=(1, 2, 4, 8), _scope_='{scope}')\n"
    )
    code = f"""
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
cfg = Config.fromfile({str(config)!r})
init_default_scope({scope!r})
print(type(MODELS.build(cfg.model)).__name__)
"""
    done = python('-W', 'ignore', '-c', code)
    assert done.stdout.split()[-1] == 'SwinDense'


def test_options_reach_the_backbone_and_wrong_ones_are_refused():
    assert MODELS.build({'type': 'SwinDense', 'arch': 's', 'out_indices': [0]}).out_channels == (96,)
    with pytest.raises(TypeError, match='embed_dims'):
        MODELS.build({'type': 'SwinDense', 'embed_dimms': 16})
    assert SwinDense(pretrained='a.pth').init_cfg == {'type': 'Pretrained', 'checkpoint': 'a.pth'}
    with pytest.raises(ValueError, match='only init_cfg'):
        SwinDense(pretrained='a.pth', init_cfg={'type': 'Pretrained', 'checkpoint': 'b.pth'})
    with pytest.raises(TypeError, match='path or an address, got 3'):
        SwinDense(pretrained=3)


def test_an_invalid_init_cfg_is_refused():
    for init_cfg in ('a.pth', {'checkpoint': 'a.pth'}, [{'type': 'Pretrained'}], [{'type': 'Normal'}, 'a']):
        with pytest.raises(TypeError, match=r"got .*type='Pretrained', checkpoint"):
            SwinDense(**TINY, init_cfg=init_cfg)
    for key, said in (('alow_partial', "mean 'allow_partial'.*keys are"), ('strict', 'keys are')):
        with pytest.raises(TypeError, match=f"no key '{key}'.*{said}"):
            SwinDense(**TINY, init_cfg=pretrained('a.pth', **{key: True}))


def test_other_initialisers_of_mmengine_work():
    backbone = SwinDense(
        **TINY,
        init_cfg={
            'type': 'Constant',
            'layer': 'Linear',
            'val': 0.5,
            'bias': 2.0,
        },
    )
    backbone.init_weights()
    assert backbone.is_init
    linear = backbone.stages[0].blocks[0].ffn.layers[0][0]
    assert linear.weight.unique().tolist() == [0.5]
    assert linear.bias.unique().tolist() == [2.0]


def pretrained(path, **options):
    return {'type': 'Pretrained', 'checkpoint': str(path), **options}


def initialized(init_cfg, **options):
    backbone = SwinDense(**TINY, **options, init_cfg=init_cfg)
    backbone.init_weights()
    return backbone


@pytest.mark.parametrize(
    'wrap',
    [
        dict,
        lambda cfg: [cfg],
        lambda cfg: Config({'init_cfg': cfg}).init_cfg,
    ],
)
def test_pretrained_weights_are_loaded_or_an_error_is_raised(wrap, tmp_path):
    source, path = SwinBackbone(TINY), tmp_path / 'a.pth'
    torch.save({'model': source.state_dict()}, path)
    assert equal_weights(initialized(wrap(pretrained(path))), source)
    torch.save({'model': {'conv1.weight': torch.zeros(3)}}, path)
    with pytest.raises(swin_dense.CheckpointError, match=r'a\.pth.*conv1\.weight'):
        initialized(wrap(pretrained(path)))


def test_ignored_mask_values_get_the_label_that_losses_of_mmseg_ignore():
    step = mmseg.registry.TRANSFORMS.build({'type': 'IgnoreMaskValues', 'values': [11]})
    assert step({'label_map': {3: 4}})['label_map'] == {3: 4, 11: 255}
    assert repr(step) == 'IgnoreMaskValues(values=(11,))'  # as a pipeline is written in a log


def test_mask_values_that_are_not_listed_become_no_class():
    step = mmseg.registry.TRANSFORMS.build({'type': 'MapMaskValues', 'values': [1, 255, 2]})
    assert step({})['label_map'] == {0: 255, 1: 0, 255: 1, 2: 2}


def test_loads_are_reported_in_the_log_of_the_run(tmp_path):
    name = tmp_path.name
    MMLogger.get_instance(name, log_file=str(tmp_path / 'run.log'))
    source, backbone = SwinBackbone(**TINY), SwinDense(**TINY)
    torch.save({'model': source.state_dict()}, tmp_path / 'swin.pth')
    backbone.load_state_dict(torch.load(tmp_path / 'swin.pth'))
    initialized(pretrained(tmp_path / 'swin.pth'))
    assert (tmp_path / 'run.log').read_text().count('Loaded ') == 2


def test_init_cfg_accepts_loading_options(tmp_path):
    source, path = SwinBackbone(**TINY), tmp_path / 'swin.pth'
    weights = source.state_dict()
    ema = {f'ema.{name}': value + 1 for name, value in weights.items()}
    torch.save({**weights, **ema}, path)
    backbone = initialized(pretrained(path, map_location='cpu', ema=True), in_channels=1)
    expected = ema['ema.patch_embed.projection.weight'].mean(1, keepdim=True) * 3
    torch.testing.assert_close(backbone.patch_embed.projection.weight.data, expected)

    del weights['stages.0.blocks.0.norm1.weight']
    torch.save(weights, path)
    with pytest.raises(swin_dense.CheckpointError, match='allow_partial=True'):
        initialized(pretrained(path))
    by_option = initialized(pretrained(path), allow_partial=True)
    for backbone in (by_option, initialized(pretrained(path, allow_partial=True))):
        assert torch.equal(backbone.patch_embed.projection.weight, source.patch_embed.projection.weight)
    with pytest.raises(TypeError, match='allow_partial must be True or False'):
        SwinDense(**TINY, allow_partial=1)


class Doubled(nn.Module):
    """A module that serves as a norm over the last axis and as an activation, as users might register them."""

    def __init__(self, channels=None, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.full((channels or 1,), 2.0))

    def forward(self, x):
        return x * self.weight


@pytest.fixture(params=['mmengine', 'mmdet'])
def registered(request):
    registry = {'mmengine': MODELS, 'mmdet': mmdet.registry.MODELS}[request.param]
    registry.register_module(name='Registered', module=Doubled)
    yield 'Registered'
    del registry._module_dict['Registered']


def shapes_of(model):
    return {name: tuple(value.shape) for name, value in model.named_parameters()}


def test_registered_activations_and_norms_work_as_in_mmdet(registered):
    """The parameters and outputs equal those of mmdet's Swin."""
    options = {
        **TINY,
        'act_cfg': {'type': registered},
        'norm_cfg': {'type': registered},
    }
    with DefaultScope.overwrite_default_scope('mmdet'):
        ours, theirs = (MODELS.build({'type': kind, **options}) for kind in ('SwinDense', 'mmdet.SwinTransformer'))
    assert shapes_of(ours) == shapes_of(theirs)
    img = torch.randn(1, 3, 50, 60, dtype=torch.float64)
    theirs.double().eval()
    ours.double().eval().load_state_dict(theirs.state_dict(), strict=False)
    torch.testing.assert_close(
        ours(img),
        theirs(img),
        rtol=1e-7,
        atol=1e-9,
    )


def test_a_class_serves_as_a_norm_and_as_an_activation_and_an_unknown_name_as_neither():
    backbone = SwinDense(**TINY, act_cfg={'type': Doubled}, norm_cfg={'type': Doubled})
    block = backbone.stages[0].blocks[0]
    assert type(block.norm1) is type(block.ffn.layers[0][1]) is Doubled
    with pytest.raises(ValueError, match='act_cfg'):
        SwinDense(**TINY, act_cfg={'type': 'Unheard'})

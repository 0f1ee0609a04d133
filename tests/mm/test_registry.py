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
from swin_dense import SwinBackbone, SwinDense, SwinDenseV2, SwinV2Backbone
from tests.conftest import TINY, equal_weights, some
from tests.processes import python


@pytest.mark.parametrize('registry', [MODELS, mmdet.registry.MODELS, mmseg.registry.MODELS])
@pytest.mark.parametrize('name', ['SwinDense', 'swin_dense.SwinDense'])
def test_every_registry_builds_swin_dense(registry, name):
    backbone = registry.build({'type': name, **TINY})
    assert type(backbone) is SwinDense
    assert isinstance(backbone, SwinBackbone)
    assert isinstance(backbone, BaseModule)


@pytest.mark.parametrize('registry', [mmdet.registry.MODELS, mmseg.registry.MODELS])
def test_the_name_is_registered_only_in_the_root_registry(registry):
    assert MODELS.module_dict['SwinDense'] is SwinDense
    assert 'SwinDense' not in registry.module_dict
    assert registry.get('SwinDense') is SwinDense


@pytest.mark.parametrize('scope', some(['mmdet', 'mmseg'], every=2))
def test_custom_imports_of_a_config_register_swin_dense(scope, tmp_path):
    config = tmp_path / 'config.py'
    config.write_text(
        "custom_imports = dict(imports=['swin_dense'], allow_failed_imports=False)\n"
        f"model = dict(type='SwinDense', embed_dims=16, num_heads=(1, 2, 4, 8), _scope_='{scope}')\n"
    )
    code = (
        'from mmengine.config import Config; from mmengine.registry import MODELS, init_default_scope\n'
        f'cfg = Config.fromfile({str(config)!r}); init_default_scope({scope!r})\n'
        'print(type(MODELS.build(cfg.model)).__name__)'
    )
    done = python('-W', 'ignore', '-c', code)
    assert done.stdout.split()[-1] == 'SwinDense'


def test_options_reach_the_backbone_and_wrong_ones_are_refused():
    assert MODELS.build({'type': 'SwinDense', 'arch': 's', 'out_indices': [0]}).out_channels == (96,)
    with pytest.raises(TypeError, match='embed_dims'):
        MODELS.build({'type': 'SwinDense', 'embed_dimms': 16})


@pytest.mark.parametrize('registry', [MODELS, mmdet.registry.MODELS, mmseg.registry.MODELS])
def test_swin_v2(registry):
    backbone = registry.build({'type': 'SwinDenseV2', **TINY, 'pretrained_window_size': [8, 8, 8, 8]})
    assert type(backbone) is SwinDenseV2
    assert isinstance(backbone, SwinV2Backbone)
    assert (backbone.window_size, backbone.pretrained_window_size) == ((8, 8), (8, 8, 8, 8))
    backbone.init_weights()


def test_windows_per_stage_of_mmpretrain():
    with torch.device('meta'):
        backbone = SwinDenseV2(img_size=256, window_size=[16, 16, 16, 8], pretrained_window_sizes=[12, 12, 12, 6])
        assert backbone.window_size == ((16, 16), (16, 16), (16, 16), (8, 8))
        assert backbone.pretrained_window_size == (12, 12, 12, 6)
        assert backbone.stages[3].blocks[1].attn.windows_on(8, 8) == ((8, 8), (0, 0))
        assert SwinDenseV2(img_size=256, window_size=(8, 16)).window_size == (8, 16)  # (height, width) in all stages
        with pytest.raises(ValueError, match=r'one of them for each of the 4 stages, got 3: \[16, 16, 8\]'):
            SwinDenseV2(img_size=256, window_size=[16, 16, 8])
        assert SwinDenseV2(window_size=[16, 16, 16, 8]).clamp_window  # at 256, mmpretrain's default
        with pytest.raises(ValueError, match='give one'):
            SwinDenseV2(pretrained_window_sizes=[8, 8, 8, 8], pretrained_window_size=8)


def test_pretrained_is_converted_to_init_cfg():
    assert SwinDense(pretrained='a.pth').init_cfg == {'type': 'Pretrained', 'checkpoint': 'a.pth'}
    with pytest.raises(ValueError, match='only init_cfg'):
        SwinDense(pretrained='a.pth', init_cfg={'type': 'Pretrained', 'checkpoint': 'b.pth'})
    with pytest.raises(TypeError, match='path or an address, got 3'):
        SwinDense(pretrained=3)


@pytest.mark.parametrize(
    'init_cfg', ['a.pth', {'checkpoint': 'a.pth'}, [{'type': 'Pretrained'}], [{'type': 'Normal'}, 'a']]
)
def test_an_invalid_init_cfg_is_refused(init_cfg):
    with pytest.raises(TypeError, match=r"got .*type='Pretrained', checkpoint"):
        SwinDense(**TINY, init_cfg=init_cfg)


def test_other_initialisers_of_mmengine_work():
    backbone = SwinDense(**TINY, init_cfg={'type': 'Constant', 'layer': 'Linear', 'val': 0.5, 'bias': 2.0})
    backbone.init_weights()
    assert backbone.is_init
    assert backbone.stages[0].blocks[0].ffn.layers[0][0].weight.unique().tolist() == [0.5]
    assert backbone.stages[0].blocks[0].ffn.layers[0][0].bias.unique().tolist() == [2.0]


@pytest.mark.parametrize('wrap', [lambda cfg: cfg, lambda cfg: [cfg], lambda cfg: Config({'init_cfg': cfg}).init_cfg])
def test_pretrained_weights_are_loaded_or_an_error_is_raised(wrap, tmp_path):
    source = SwinBackbone(TINY)
    torch.save({'model': source.state_dict()}, tmp_path / 'good.pth')
    backbone = SwinDense(**TINY, init_cfg=wrap({'type': 'Pretrained', 'checkpoint': str(tmp_path / 'good.pth')}))
    backbone.init_weights()
    assert equal_weights(backbone, source)

    torch.save({'model': {'conv1.weight': torch.zeros(3)}}, tmp_path / 'bad.pth')
    backbone = SwinDense(**TINY, init_cfg=wrap({'type': 'Pretrained', 'checkpoint': str(tmp_path / 'bad.pth')}))
    with pytest.raises(swin_dense.CheckpointError, match=r'bad\.pth.*conv1\.weight'):
        backbone.init_weights()


def test_ignored_mask_values_get_the_label_that_losses_of_mmseg_ignore():
    step = mmseg.registry.TRANSFORMS.build({'type': 'IgnoreMaskValues', 'values': [11]})
    assert step({'label_map': {3: 4}})['label_map'] == {3: 4, 11: 255}
    assert repr(step) == 'IgnoreMaskValues(values=(11,))'  # as a pipeline is written in a log


def test_loads_are_reported_in_the_log_of_the_run(tmp_path):
    name = tmp_path.name
    MMLogger.get_instance(name, log_file=str(tmp_path / 'run.log'))
    source, backbone = SwinBackbone(**TINY), SwinDense(**TINY)
    torch.save({'model': source.state_dict()}, tmp_path / 'swin.pth')
    backbone.load_state_dict(torch.load(tmp_path / 'swin.pth'))
    SwinDense(**TINY, init_cfg={'type': 'Pretrained', 'checkpoint': str(tmp_path / 'swin.pth')}).init_weights()
    assert (tmp_path / 'run.log').read_text().count('Loaded ') == 2


def test_init_cfg_accepts_loading_options(tmp_path):
    source = SwinBackbone(**TINY)
    weights = source.state_dict()
    ema = {f'ema.{name}': value + 1 for name, value in weights.items()}
    torch.save({**weights, **ema}, tmp_path / 'swin.pth')
    pretrained = {'type': 'Pretrained', 'checkpoint': str(tmp_path / 'swin.pth'), 'map_location': 'cpu'}
    backbone = SwinDense(**TINY, in_channels=1, init_cfg={**pretrained, 'ema': True})
    backbone.init_weights()
    expected = ema['ema.patch_embed.projection.weight'].mean(1, keepdim=True) * 3
    torch.testing.assert_close(backbone.patch_embed.projection.weight.data, expected)

    del weights['stages.0.blocks.0.norm1.weight']
    torch.save(weights, tmp_path / 'swin.pth')
    with pytest.raises(swin_dense.CheckpointError, match='allow_partial=True'):
        SwinDense(**TINY, init_cfg=pretrained).init_weights()
    in_init_cfg = {'init_cfg': {**pretrained, 'allow_partial': True}}
    for options in (in_init_cfg, {'init_cfg': pretrained, 'allow_partial': True}):
        backbone = SwinDense(**TINY, **options)
        backbone.init_weights()
        assert torch.equal(backbone.patch_embed.projection.weight, source.patch_embed.projection.weight)
    with pytest.raises(TypeError, match='allow_partial must be True or False'):
        SwinDense(**TINY, allow_partial=1)


@pytest.mark.parametrize(('key', 'suggestion'), [('alow_partial', 'allow_partial'), ('strict', None)])
def test_an_unknown_key_of_init_cfg_is_refused(key, suggestion):
    with pytest.raises(TypeError, match=f"no key '{key}'.*{f'mean {suggestion!r}' if suggestion else ''}.*keys are"):
        SwinDense(**TINY, init_cfg={'type': 'Pretrained', 'checkpoint': 'a.pth', key: True})


class Doubled(nn.Module):
    """A module that serves as a norm over the last axis and as an activation, as users might register them."""

    def __init__(self, channels=None, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.full((channels or 1,), 2.0))

    def forward(self, x):
        return x * self.weight


@pytest.fixture
def registered():
    for registry, scope in ((MODELS, 'mmengine'), (mmdet.registry.MODELS, 'mmdet')):
        registry.register_module(name=f'Doubled_{scope}', module=Doubled)
    yield
    for registry, scope in ((MODELS, 'mmengine'), (mmdet.registry.MODELS, 'mmdet')):
        del registry._module_dict[f'Doubled_{scope}']


@pytest.mark.parametrize('scope', ['mmengine', 'mmdet'])
def test_registered_activations_and_norms_work_as_in_mmdet(registered, scope):
    """The parameters and outputs equal those of mmdet's Swin."""
    options = {**TINY, 'act_cfg': {'type': f'Doubled_{scope}'}, 'norm_cfg': {'type': f'Doubled_{scope}'}}
    with DefaultScope.overwrite_default_scope('mmdet'):
        ours, theirs = (MODELS.build({'type': kind, **options}) for kind in ('SwinDense', 'mmdet.SwinTransformer'))
    shapes = [{name: tuple(value.shape) for name, value in model.named_parameters()} for model in (ours, theirs)]
    assert shapes[0] == shapes[1]
    img = torch.randn(1, 3, 50, 60, dtype=torch.float64)
    theirs.double().eval()
    ours.double().eval().load_state_dict(theirs.state_dict(), strict=False)
    torch.testing.assert_close(ours(img), theirs(img), rtol=1e-7, atol=1e-9)


def test_a_class_serves_as_a_norm_and_as_an_activation():
    backbone = SwinDense(**TINY, act_cfg={'type': Doubled}, norm_cfg={'type': Doubled})
    block = backbone.stages[0].blocks[0]
    assert type(block.norm1) is type(block.ffn.layers[0][1]) is Doubled


def test_an_unregistered_activation_is_refused():
    with pytest.raises(ValueError, match='act_cfg'):
        SwinDense(**TINY, act_cfg={'type': 'Unheard'})

"""Mona and LoRA against their formulas, and what they change in a backbone: what trains, and nothing else."""

import copy

import pytest
import torch
import torch.nn.functional as F

from swin_dense import SwinBackbone, SwinV2Backbone, extract_pyramid
from swin_dense.models.adapters import LoRALinear, Mona, merge_lora
from swin_dense.models.layers import Linear
from tests.conftest import TINY, assert_same, randomize

VERSIONS = [SwinBackbone, SwinV2Backbone]
MONA, LORA = {'type': 'mona', 'dim': 6}, {'type': 'lora', 'rank': 3}
ADAPTERS = [MONA, LORA]
SIZE = (2, 3, 50, 71)  # every stage has padding


def make(kind=SwinBackbone, adapter=None, **options):
    model = kind(**{**TINY, 'window_size': 4, 'drop_path_rate': 0.0, **options}, adapter=adapter)
    return randomize(model).double().eval()


def make_image():
    return torch.randn(SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def names_that_train(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


# --- the formulas -----------------------------------------------------------------------------------------------------


def mona(x, p):
    """Mona as in the paper: x + U gelu(pw(dw(D(s1 LN(x) + s2 x)))), where dw and pw have residuals."""
    normalised = F.layer_norm(x, x.shape[-1:], p['norm.weight'], p['norm.bias'])
    low = (p['norm_scale'] * normalised + p['input_scale'] * x) @ p['down.weight'].T + p['down.bias']
    images, convolved = low.permute(0, 3, 1, 2), 0
    for index in range(3):
        weight, bias = p[f'convs.{index}.weight'], p[f'convs.{index}.bias']
        convolved = convolved + F.conv2d(images, weight, bias, padding='same', groups=len(weight))
    low = low + convolved.permute(0, 2, 3, 1) / 3
    low = low + low @ p['mix.weight'][:, :, 0, 0].T + p['mix.bias']
    return x + F.gelu(low) @ p['up.weight'].T + p['up.bias']


def lora(x, p):
    return x @ (p['weight'] + p['lora_B'] @ p['lora_A']).T + p['bias']


@pytest.mark.parametrize(
    ('module', 'formula'), [(Mona(10, 4, 0.1), mona), (LoRALinear(Linear(10, 7), 3, 0.1), lora)], ids=['mona', 'lora']
)
def test_outputs_and_gradients_equal_the_formula(module, formula):
    module = randomize(module).double().eval()
    x = torch.randn(2, 9, 5, 10, dtype=torch.float64, requires_grad=True)
    parameters = dict(module.named_parameters())
    found, expected = module(x), formula(x, parameters)
    weights = torch.randn_like(expected)
    wanted = [x, *parameters.values()]
    assert_same([found], [expected])
    assert_same(torch.autograd.grad(found, wanted, weights), torch.autograd.grad(expected, wanted, weights))


def test_mona_convolves_with_three_sizes():
    assert [conv.kernel_size for conv in Mona(8, 4, 0.0).convs] == [(3, 3), (5, 5), (7, 7)]


@pytest.mark.parametrize('with_cp', [False, True, 'mlp'])
@pytest.mark.parametrize('kind', VERSIONS)
def test_mona_follows_each_residual_addition(kind, with_cp):
    block = make(kind, MONA, with_cp=with_cp).stages[1].blocks[1]
    x = torch.randn(2, 9, 13, 32, dtype=torch.float64)
    mona1, mona2 = (dict(module.named_parameters()) for module in (block.mona1, block.mona2))
    if kind is SwinBackbone:
        middle = mona(x + block.attn(block.norm1(x)), mona1)
        expected = mona(middle + block.ffn(block.norm2(middle)), mona2)
    else:
        middle = mona(x + block.norm1(block.attn(x)), mona1)
        expected = mona(middle + block.norm2(block.ffn(middle)), mona2)
    assert_same([block(x)], [expected])
    wanted = [p for p in block.parameters() if p.requires_grad]
    assert_same(
        torch.autograd.grad(block(x).square().sum(), wanted), torch.autograd.grad(expected.square().sum(), wanted)
    )


@pytest.mark.parametrize('kind', VERSIONS)
def test_lora_stands_beside_the_four_linear_layers_of_a_block(kind):
    """The network equals one with the weights W + B A."""
    model, dense = make(kind, LORA, qkv_bias=True), make(kind)
    pairs = {name.removesuffix('.lora_A') for name in dict(model.named_parameters()) if name.endswith('.lora_A')}
    leaves = {'attn.w_msa.qkv', 'attn.w_msa.proj', 'ffn.layers.0.0', 'ffn.layers.1'}
    assert pairs == {f'stages.{s}.blocks.{b}.{leaf}' for s in range(4) for b in range(2) for leaf in leaves}
    with torch.no_grad():
        state = dict(model.named_parameters())
        for name, parameter in dense.named_parameters():
            layer = name.removesuffix('.weight')
            parameter.copy_(state[name])
            if layer in pairs:
                parameter.add_(state[f'{layer}.lora_B'] @ state[f'{layer}.lora_A'])
    img = make_image()
    assert_same(model(img), dense(img))


# --- the start --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('adapter', [{'type': 'mona'}, {'type': 'lora'}])
@pytest.mark.parametrize('kind', VERSIONS)
def test_at_the_start_outputs_are_those_of_the_base(kind, adapter):
    base = randomize(kind(**TINY)).eval()
    model = kind(**TINY, adapter=adapter).eval()
    model.load_state_dict(base.state_dict(), strict=False, assign=True)  # copies may lie in memory otherwise, and round
    with torch.no_grad():
        for found, expected in zip(model(make_image().float()), base(make_image().float()), strict=True):
            assert torch.equal(found, expected)


def test_the_start_returns_with_reset_parameters():
    for adapter in ADAPTERS:
        model = make(adapter=adapter)
        model.reset_parameters()
        for name, parameter in model.named_parameters():
            if 'lora_B' in name or '.up.' in name:
                assert not parameter.any()
            elif 'lora_A' in name:
                assert 0 < parameter.abs().max() <= parameter.shape[1] ** -0.5
            elif name.endswith('_scale'):
                assert (parameter == (1e-6 if name.endswith('norm_scale') else 1)).all()


@pytest.mark.parametrize('kind', VERSIONS)
def test_a_backbone_without_adapter_has_none_of_it(kind):
    plain = kind(**TINY)
    assert not any(isinstance(module, (LoRALinear, Mona)) for module in plain.modules())
    for adapter in ADAPTERS:
        adapted = list(kind(**TINY, adapter=adapter).state_dict())
        assert [name for name in adapted if 'mona' not in name and 'lora' not in name] == list(plain.state_dict())


# --- what trains ------------------------------------------------------------------------------------------------------


def is_new(name):
    return '.lora_' in name or '.mona' in name


def is_norm(name):
    return 'norm' in name.rpartition('.')[0].rpartition('.')[2] and not is_new(name)


@pytest.mark.parametrize('adapter', ADAPTERS)
@pytest.mark.parametrize('kind', VERSIONS)
def test_adapters_and_norms_train(kind, adapter):
    model = make(kind, adapter, use_abs_pos_embed=True)
    names = dict(model.named_parameters())
    assert names_that_train(model) == {name for name in names if is_new(name) or is_norm(name)}
    only = make(kind, {**adapter, 'train_norms': False})
    assert names_that_train(only) == {name for name in names if is_new(name) or name.startswith('norm')}
    fixed = make(kind, adapter, norm_cfg={'type': 'LN', 'requires_grad': False})
    assert names_that_train(fixed) == {name for name in names if is_new(name)}


@pytest.mark.parametrize('adapter', ADAPTERS)
def test_every_parameter_that_trains_has_a_gradient_and_no_other(adapter):
    model = make(adapter=adapter).train()
    sum(level.square().mean() for level in model(make_image())).backward()
    with_gradient = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert with_gradient == names_that_train(model)


@pytest.mark.parametrize('adapter', ADAPTERS)
def test_adapters_of_some_stages(adapter):
    model = make(adapter={**adapter, 'stages': [3, 2]})
    assert model.adapter_options.stages == (2, 3)
    assert {name[:8] for name in dict(model.named_parameters()) if is_new(name)} == {'stages.2', 'stages.3'}


@pytest.mark.parametrize('adapter', ADAPTERS)
def test_frozen_stages_stay_frozen(adapter):
    model = make(adapter=adapter, frozen_stages=2).train()
    frozen = ('patch_embed.', 'stages.0.', 'stages.1.', 'norm0.', 'norm1.')
    assert names_that_train(model) == {
        name for name in names_that_train(make(adapter=adapter)) if not name.startswith(frozen)
    }
    assert not any(module.training for stage in model.stages[:2] for module in stage.modules())
    assert model.stages[2].training


def test_dropout_of_adapters_acts_in_training_alone():
    for adapter in ADAPTERS:
        model = make(adapter={**adapter, 'drop_rate': 0.5})
        img = make_image()
        first, second = model(img)[-1], model(img)[-1]
        assert torch.equal(first, second)
        assert not torch.equal(model.train()(img)[-1], first)


@pytest.mark.parametrize('adapter', ADAPTERS)
def test_parameters_of_adapters_are_in_the_layer_of_their_block(adapter):
    model = make(adapter=adapter)
    new = [name for name, _ in model.named_parameters() if is_new(name)]
    for name in new:
        _, stage, _, block, *_ = name.split('.')
        assert model.get_layer_depth(name) == (1 + 2 * int(stage) + int(block), 10)
    scales = {name for name in new if name.endswith('_scale')}
    undecayed = {name for name in model.no_weight_decay() if is_new(name)}
    assert undecayed == scales


# --- tools ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('kind', VERSIONS)
def test_merged_lora_is_a_plain_backbone(kind):
    model = make(kind, LORA)
    merged = copy.deepcopy(model)
    merge_lora(merged)
    assert list(merged.state_dict()) == list(make(kind).state_dict())
    assert not any(isinstance(module, LoRALinear) for module in merged.modules())
    assert_same(merged(make_image()), model(make_image()))


@pytest.mark.parametrize('options', [{}, {'window_size': 3}, {'window_size': 5}, {'depths': (1, 2, 3, 2)}])
def test_exact_tiles_allow_for_the_convolutions(options):
    backbone = randomize(SwinBackbone(**{**TINY, 'window_size': 2, **options}, adapter=MONA)).double().eval()
    period = 32 * backbone.window_size[0]
    img = torch.rand(3, 4 * period, 8 * period, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole, tiled = (extract_pyramid(backbone, img, levels=[4, 8, 16], tile=tile) for tile in (None, period))
    assert_same(tiled.values(), whole.values())


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('adapter', 'kind', 'message'),
    [
        ('mona', TypeError, r"must be None or a dict such as dict\(type='mona', dim=64\), got 'mona'"),
        ({'dim': 8}, TypeError, 'must be None or a dict'),
        ({'type': 'mono'}, ValueError, "one of .'mona', 'lora'., got 'mono'; did you mean 'mona'"),
        ({'type': 'lora', 'dim': 8}, TypeError, "'lora' has no option 'dim'.* its options are .*'rank'"),
        ({'type': 'mona', 'dims': 8}, TypeError, "did you mean 'dim'"),
        ({'type': 'mona', 'dim': 0}, ValueError, r'adapter\["dim"\] must be at least 1, got 0'),
        ({'type': 'lora', 'rank': 2.5}, TypeError, r'adapter\["rank"\] must be an integer'),
        ({'type': 'lora', 'stages': [4]}, ValueError, r'must be stages from 0 to 3, got \[4\]'),
        ({'type': 'lora', 'train_norms': 1}, TypeError, r'adapter\["train_norms"\] must be True or False'),
        ({'type': 'mona', 'drop_rate': 2}, ValueError, r'adapter\["drop_rate"\] must lie between 0 and 1'),
    ],
)
def test_wrong_options_are_explained(adapter, kind, message):
    with pytest.raises(kind, match=message):
        SwinBackbone(TINY, adapter=adapter)


def test_a_stage_that_is_not_built_has_no_adapter():
    with pytest.raises(ValueError, match=r'stages from 0 to 1, got \[2\]'):
        SwinBackbone(TINY, out_indices=(0, 1), adapter={'type': 'lora', 'stages': [2]})

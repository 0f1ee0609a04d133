"""Options, shapes, dtypes, gradients and errors of the backbone."""

import warnings

import pytest
import torch

from swin_dense import SwinBackbone, SwinV2Backbone, create_backbone
from swin_dense.models.options import drop_path_rates
from swin_dense.models.swin import SwinBlock
from tests.conftest import TINY, randomize

PUBLISHED_PARAMETERS = {
    ('t', 7): 27_520_698,
    ('s', 7): 48_838_602,
    ('b', 7): 86_745_016,
    ('l', 7): 194_998_164,
    ('b', 12): 86_880_376,
    ('l', 12): 195_201_204,
}


def tiny(**options):
    return SwinBackbone(TINY, **options)


@pytest.mark.parametrize(('arch', 'window_size'), PUBLISHED_PARAMETERS)
def test_published_parameter_counts(arch, window_size):
    with torch.device('meta'):
        backbone = SwinBackbone(arch, window_size=window_size)
    assert sum(p.numel() for p in backbone.parameters()) == PUBLISHED_PARAMETERS[arch, window_size]


def test_parameters_are_reset_to_those_of_a_new_network():
    backbone = randomize(tiny(use_abs_pos_embed=True))
    backbone.reset_parameters()
    for name, parameter in backbone.named_parameters():
        values = parameter.detach()
        if 'norm' in name:
            assert torch.equal(values, torch.full_like(values, name.endswith('weight')))
        elif name.startswith('patch_embed'):
            assert 0 < values.abs().max() <= (3 * 4 * 4) ** -0.5  # torch's bound for convolutions
        elif name.endswith('bias'):
            assert not values.any()
        else:
            torch.testing.assert_close(values.std().item(), 0.02, atol=0.004, rtol=0)


@pytest.mark.parametrize(
    ('name', 'layer'),
    [
        ('backbone.patch_embed.projection.weight', 0),
        ('backbone.stages.1.blocks.0.norm1.bias', 3),
        ('backbone.stages.1.downsample.reduction.weight', 4),
        ('backbone.norm1.bias', 9),
        ('head.weight', 9),
    ],
)
def test_layers_are_the_embedding_the_blocks_and_the_head(name, layer):
    assert tiny().get_layer_depth(name, 'backbone.') == (layer, 10)


@pytest.mark.parametrize('name', ['t', 'tiny', 'swin_t', 'swin_tiny', 'Swin-T'])
def test_names_of_an_architecture(name):
    with torch.device('meta'):
        assert SwinBackbone(name).arch == SwinBackbone('t').arch


@pytest.mark.parametrize(('name', 'hint'), [('swin_x', ''), ('swin_lrge', "; did you mean 'large'")])
def test_an_unknown_architecture_is_quoted_in_the_error(name, hint):
    with pytest.raises(ValueError, match=f"swin_' in front, got '{name}'{hint}"):
        create_backbone(name)


@pytest.mark.parametrize('backend', ['auto', 'reference'])
@pytest.mark.parametrize('size', [(1, 1), (1, 40), (3, 5), (31, 33), (64, 64), (97, 130)])
def test_sizes_of_maps_are_rounded_up(size, backend):
    backbone = tiny(attn_backend=backend).eval()
    outs = backbone(torch.randn(2, 3, *size))
    assert backbone.out_channels == (16, 32, 64, 128)
    assert backbone.out_strides == (4, 8, 16, 32)
    for out, channels, stride in zip(outs, backbone.out_channels, backbone.out_strides, strict=True):
        assert out.shape == (2, channels, -(-size[0] // stride), -(-size[1] // stride))
        assert out.is_contiguous()


def test_an_empty_batch_passes_forward_and_backward():
    backbone = tiny()
    outs = backbone(torch.randn(0, 3, 40, 40, requires_grad=True))
    assert [out.shape[0] for out in outs] == [0, 0, 0, 0]
    sum(out.sum() for out in outs).backward()


def test_channels_last_input_gives_the_same_outputs():
    backbone = tiny().eval()
    img = torch.randn(2, 3, 50, 70)
    for out, expected in zip(backbone(img.to(memory_format=torch.channels_last)), backbone(img), strict=True):
        assert torch.allclose(out, expected, atol=1e-5)


def test_images_of_a_batch_are_independent():
    backbone = randomize(tiny()).double().eval()
    imgs = torch.randn(3, 3, 45, 61, dtype=torch.float64)
    together = backbone(imgs)
    for index in range(3):
        for whole, alone in zip(together, backbone(imgs[index : index + 1]), strict=True):
            assert torch.allclose(whole[index], alone[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    'options',
    [
        {},
        {'out_indices': (0, 2)},
        {'out_indices': (3,)},
        {'out_indices': (1,)},
        {'use_abs_pos_embed': True},
        {'qkv_bias': False},
        {'qk_scale': 0.0},
        {'patch_norm': False},
        {'use_rel_pos_bias': False},
        {'use_shift': False},
        {'mlp_ratio': 2.5},
        {'in_channels': 5},
        {'window_size': 12},
        {'window_size': (3, 5)},
        {'window_size': 1},
        {'patch_size': 2},
        {'with_cp': True},
        {'with_cp': (True, False, True, False)},
        {'drop_rate': 0.1, 'attn_drop_rate': 0.1, 'drop_path_rate': 0.5},
        {'act_cfg': {'type': 'ReLU'}, 'norm_cfg': {'type': 'LN', 'eps': 1e-6}},
    ],
    ids=str,
)
def test_every_parameter_gets_a_gradient(options):
    backbone = tiny(**options)
    img = torch.randn(2, options.get('in_channels', 3), 45, 61)
    outs = backbone(img)
    assert len(outs) == len(backbone.out_indices)
    sum((out * torch.randn_like(out)).sum() for out in outs).backward()
    for name, parameter in backbone.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


def test_out_indices_select_maps_and_omit_later_stages():
    full = tiny().eval()
    part = tiny(out_indices=(2, 1)).eval()
    part.load_state_dict({name: value for name, value in full.state_dict().items() if name in part.state_dict()})
    img = torch.randn(1, 3, 50, 70)
    for out, expected in zip(part(img), full(img)[1:3], strict=True):
        assert torch.equal(out, expected)
    assert (part.out_channels, part.out_strides) == ((32, 64), (8, 16))
    assert len(part.stages) == 3
    assert part.stages[-1].downsample is None


def test_any_number_of_stages():
    backbone = SwinBackbone({'embed_dims': 16, 'depths': (1, 2), 'num_heads': (2, 2)}, strides=(4, 3), patch_size=4)
    outs = backbone(torch.randn(1, 3, 50, 70))
    assert [tuple(out.shape) for out in outs] == [(1, 16, 13, 18), (1, 32, 5, 6)]


@pytest.mark.parametrize('kind', [SwinBackbone, SwinV2Backbone])
def test_a_window_per_stage(kind):
    """Each stage is that of a model with its window in all stages."""
    windows = [2, (3, 5), 4, 2]
    model = randomize(kind(**TINY, window_size=windows, clamp_window=True)).eval()
    assert model.window_size == model.windows == ((2, 2), (3, 5), (4, 4), (2, 2))
    x = model.embed(torch.rand(1, 3, 96, 150))
    for stage, window in zip(model.stages, windows, strict=True):
        of_one_window = kind(**TINY, window_size=window, clamp_window=True).eval()
        other = of_one_window.stages[list(model.stages).index(stage)]
        other.load_state_dict(stage.state_dict())
        out, x_after = stage(x)
        torch.testing.assert_close(out, other(x)[0], rtol=0, atol=0)
        x = x_after


def test_with_cp_per_stage_recomputes_only_those_blocks():
    calls = []
    backbone = tiny(with_cp=(True, False, False, True))
    for name, module in backbone.named_modules():
        if isinstance(module, SwinBlock):
            module.attn.w_msa.proj.register_forward_pre_hook(lambda *_, name=name: calls.append(name))
    sum(out.sum() for out in backbone(torch.randn(1, 3, 32, 32))).backward()
    assert sorted({name for name in calls if calls.count(name) == 2}) == [
        'stages.0.blocks.0',
        'stages.0.blocks.1',
        'stages.3.blocks.0',
        'stages.3.blocks.1',
    ]


@pytest.mark.parametrize('frozen_stages', [-1, 0, 1, 2, 4])
def test_frozen_stages_are_frozen_from_the_start_and_after_train(frozen_stages):
    backbone = tiny(frozen_stages=frozen_stages, use_abs_pos_embed=True, drop_rate=0.5)
    prefixes = ['patch_embed.', 'absolute_pos_embed'] if frozen_stages >= 0 else []
    for stage in range(frozen_stages):
        prefixes += [f'stages.{stage}.', f'norm{stage}.']
    for _ in range(2):
        for name, parameter in backbone.named_parameters():
            assert parameter.requires_grad != name.startswith(tuple(prefixes)), name
        for name, module in backbone.named_modules():
            if name:
                assert module.training != (f'{name}.').startswith((*prefixes, 'pos_drop.' if prefixes else '-')), name
        assert backbone.train() is backbone
    assert backbone.eval() is backbone
    assert not any(module.training for module in backbone.modules())


def test_drop_path_rises_linearly_and_is_off_in_evaluation():
    backbone = tiny(drop_path_rate=0.7)
    rates = [module.drop_path.drop_prob for module in backbone.modules() if isinstance(module, SwinBlock)]
    assert rates == pytest.approx([0.1 * step for step in range(8)])
    assert drop_path_rates(0.7, (1, 1)) == [[0.0], [0.7]]
    assert drop_path_rates(0.7, (1,)) == [[0.0]]
    img = torch.randn(1, 3, 32, 32)
    backbone.eval()
    assert torch.equal(backbone(img)[3], backbone(img)[3])


def test_drop_path_keeps_the_expectation():
    from swin_dense.models.layers import DropPath

    dropped = DropPath(0.3)(torch.ones(20_000, 1, 1, 1))
    assert dropped.mean().item() == pytest.approx(1.0, abs=0.02)
    assert dropped.unique().tolist() == pytest.approx([0.0, 1 / 0.7])
    assert DropPath(1.0)(torch.ones(9, 2, 2, 1)).abs().max() == 0


def test_absolute_position_is_interpolated_bicubically_to_the_grid():
    backbone = tiny(use_abs_pos_embed=True, pretrain_img_size=(32, 48), out_indices=(0,))
    assert backbone.absolute_pos_embed.shape == (1, 8 * 12, 16)
    assert backbone.position_grid == (8, 12)
    maps = backbone.absolute_pos_embed.transpose(1, 2).view(1, 16, 8, 12)
    expected = torch.nn.functional.interpolate(maps, size=(10, 9), mode='bicubic')
    img, seen = torch.randn(2, 3, 40, 36), []
    tokens = backbone.patch_embed(img)
    backbone.pos_drop.register_forward_hook(lambda module, args, out: seen.append(args[0]))
    backbone(img)
    assert torch.equal(seen[0], tokens + expected.permute(0, 2, 3, 1))


def test_without_a_qk_term_attention_averages_the_values():
    """With qk_scale=0 and no bias, all keys have equal weights, so the output is the mean of the values."""
    backbone = tiny(qk_scale=0.0, use_rel_pos_bias=False, use_shift=False, window_size=4)
    attn = backbone.stages[0].blocks[0].attn
    x = torch.randn(1, 4, 4, 16)
    values = attn.w_msa.qkv(x)[..., 32:]
    expected = attn.w_msa.proj(values.mean((1, 2), keepdim=True)).expand(1, 4, 4, 16)
    assert torch.allclose(attn(x), expected, atol=1e-6)


def test_a_trace_at_batch_1_is_right_at_batch_2():
    backbone = randomize(tiny()).eval()
    with warnings.catch_warnings():  # a trace warns that it fixes sizes
        warnings.simplefilter('ignore')
        traced = torch.jit.trace(backbone, torch.randn(1, 3, 45, 61), check_trace=False)
    img = torch.randn(2, 3, 45, 61)
    for out, expected in zip(traced(img), backbone(img), strict=True):
        assert torch.allclose(out, expected, atol=1e-4)


@pytest.mark.parametrize('kind', [SwinBackbone, SwinV2Backbone])
def test_the_state_dict_contains_all_parameters_and_nothing_else(kind):
    backbone = kind(**TINY, use_abs_pos_embed=True)
    assert set(backbone.state_dict()) == {name for name, _ in backbone.named_parameters()}


def test_create_backbone_returns_a_backbone_in_evaluation_mode():
    backbone = create_backbone('swin_t', out_indices=(0,))
    assert not backbone.training
    assert backbone.out_channels == (96,)


@pytest.mark.parametrize(
    ('options', 'error', 'words'),
    [
        ({'embed_dim': 96}, TypeError, ['embed_dim', "'embed_dims'"]),
        ({'ape': True}, TypeError, ['use_abs_pos_embed']),
        ({'use_checkpoint': True}, TypeError, ['with_cp']),
        ({'in_chans': 4}, TypeError, ['in_channels']),
        ({'window_sise': 7}, TypeError, ['window_sise', "did you mean 'window_size'"]),
        ({'pretrained': 'x.pth'}, TypeError, ['SwinDense', 'create_backbone']),
        ({'arch': 'xl'}, ValueError, ['xl', "'t', 's', 'b', 'l', 'tiny'"]),
        ({'arch': 3}, TypeError, ['arch', 'int']),
        ({'arch': {'embed_dims': 96}}, ValueError, ['depths', 'num_heads']),
        ({'embed_dims': 100}, ValueError, ['num_heads[0] = 3', '100']),
        ({'num_heads': (3, 6, 12, 25)}, ValueError, ['num_heads[3] = 25', '768']),
        ({'depths': (2, 2, 6)}, ValueError, ['depths=(2, 2, 6)', 'num_heads=(3, 6, 12, 24)', 'give both']),
        ({'depths': 2}, TypeError, ['depths', 'list']),
        ({'depths': (2, 0, 6, 2)}, ValueError, ['depths', 'at least 1']),
        ({'window_size': b'77'}, TypeError, ['window_size', 'integer', "b'77'"]),
        ({'window_size': -7}, ValueError, ['window_size', '-7', 'at least 1']),
        ({'window_size': 7.0}, TypeError, ['window_size', '7.0']),
        ({'window_size': (7, 7, 7)}, ValueError, ['a (height, width) pair', 'each of the 4 stages, got 3: (7, 7, 7)']),
        ({'window_size': [(7, 7)] * 2}, ValueError, ['each of the 4 stages, got 2: [(7, 7), (7, 7)]']),
        ({'window_size': [7, 7, (7, 0), 7]}, ValueError, ['window_size[2]', 'at least 1, got 0']),
        ({'pretrain_img_size': (112, 112, 112)}, ValueError, ['pretrain_img_size', '(112, 112, 112)']),
        ({'pretrain_img_size': 3, 'use_abs_pos_embed': True}, ValueError, ['pretrain_img_size', 'at least 4']),
        ({'out_indices': (0, 4)}, ValueError, ['out_indices', '0 to 3', '(0, 4)']),
        ({'out_indices': (1, 1)}, ValueError, ['out_indices', '(1, 1)']),
        ({'out_indices': ()}, ValueError, ['out_indices', 'empty']),
        ({'strides': (4, 2, 2)}, ValueError, ['strides', '4', '3']),
        ({'strides': (2, 2, 2, 2)}, ValueError, ['strides[0]', 'patch_size']),
        ({'frozen_stages': 5}, ValueError, ['frozen_stages', '5']),
        ({'frozen_stages': -2}, ValueError, ['frozen_stages', '-2']),
        ({'with_cp': (True, False)}, ValueError, ['with_cp', '4', '2']),
        ({'with_cp': 'yes'}, ValueError, ['with_cp', "'mlp'", 'yes']),
        ({'with_cp': 1}, TypeError, ['with_cp', "'mlp'", '1']),
        ({'with_cp': (True, False, 'mlp', None)}, ValueError, ['with_cp', "'mlp'", 'None']),
        ({'drop_path_rate': 1.5}, ValueError, ['drop_path_rate', '1.5']),
        ({'drop_rate': 'a'}, TypeError, ['drop_rate', "'a'"]),
        ({'mlp_ratio': 0.001}, ValueError, ['mlp_ratio', '0.001', '96']),
        ({'in_channels': 0}, ValueError, ['in_channels', '0']),
        ({'qkv_bias': 1}, TypeError, ['qkv_bias', '1']),
        ({'act_cfg': {'type': 'Gelu'}}, ValueError, ['act_cfg', "did you mean 'GELU'"]),
        ({'norm_cfg': {'type': 'BN'}}, ValueError, ['norm_cfg', 'BN', 'LN']),
        ({'norm_cfg': None}, TypeError, ['norm_cfg', 'None']),
        ({'norm_cfg': {'type': 'LN', 'epsilon': 1}}, TypeError, ['norm_cfg', 'epsilon']),
        ({'act_cfg': {'type': 'GELU', 'slope': 1}}, TypeError, ['act_cfg', 'slope']),
        ({'attn_backend': 'flash'}, ValueError, ['attn_backend', 'flash', 'sdpa']),
    ],
    ids=str,
)
def test_wrong_options_say_what_is_allowed(options, error, words):
    with pytest.raises(error) as caught, torch.device('meta'):
        SwinBackbone(**options)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ('img', 'error', 'words'),
    [
        (torch.zeros(3, 32, 32), ValueError, ['(B, 3, H, W)', '(3, 32, 32)']),
        (torch.zeros(1, 4, 32, 32), ValueError, ['3 channels', 'got 4', 'in_channels=4']),
        (torch.zeros(1, 3, 32, 32, dtype=torch.uint8), TypeError, ['floating-point', 'torch.uint8', 'normalise']),
        (torch.zeros(1, 3, 32, 32).double(), TypeError, ['torch.float64', 'weights are torch.float32', 'autocast']),
        (torch.zeros(1, 3, 0, 32), ValueError, ['at least 1 pixel', '(1, 3, 0, 32)']),
        ('image.png', TypeError, ['torch.Tensor', 'str']),
    ],
    ids=['rank', 'channels', 'integers', 'float64', 'empty', 'path'],
)
def test_errors_for_invalid_images_state_what_is_allowed(img, error, words):
    backbone = tiny()
    with pytest.raises(error) as caught:
        backbone(img)
    for word in words:
        assert word in str(caught.value)

"""Options, shapes, dtypes, gradients and errors of the backbone."""

import math
import re
from unittest import mock

import pytest
import torch

from swin_dense import SwinBackbone, SwinV2Backbone, create_backbone
from swin_dense.models.layers import DropPath
from swin_dense.models.options import drop_path_by_block
from swin_dense.models.swin import SwinBlock
from swin_dense.utils import memory
from tests.conftest import TINY, assert_near, randomize
from tests.derivatives import weighted_sum

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
            assert values.std().item() == pytest.approx(0.02, abs=0.004)


@pytest.mark.parametrize('name', ['t', 'tiny', 'swin_t', 'swin_tiny', 'Swin-T'])
def test_names_of_an_architecture(name):
    with torch.device('meta'):
        backbone, short = SwinBackbone(name), SwinBackbone('t')
    assert backbone.arch == short.arch
    assert backbone.windows == ((7, 7),) * 4


@pytest.mark.parametrize(
    ('name', 'hint'),
    [
        ('swin_x', ''),
        ('swin_lrge', "; did you mean 'large'"),
        ('swint', "; did you mean 'swin_t'"),
        ('swinv2t', "; did you mean 'swinv2_t'"),
        ('swin-t.in1k', "; did you mean 'swin_t.in1k'"),
    ],
)
def test_an_unknown_architecture_is_quoted_in_the_error(name, hint):
    with pytest.raises(ValueError, match=f"swin_' in front, got '{name}'{hint}"):
        create_backbone(name)


@pytest.mark.parametrize('backend', ['auto', 'reference'])
@pytest.mark.parametrize(
    'size',
    [
        (1, 40),
        (3, 5),
        (31, 33),
        (64, 64),
    ],
)
def test_sizes_of_maps_are_rounded_up(size, backend):
    backbone = tiny(attn_backend=backend).eval()
    assert backbone.out_channels == (16, 32, 64, 128)
    assert backbone.out_strides == (4, 8, 16, 32)
    assert backbone.strides == (4, 2, 2, 2)
    outs = backbone(torch.randn(2, 3, *size))
    for out, channels, stride in zip(outs, backbone.out_channels, backbone.out_strides, strict=True):
        height, width = (math.ceil(side / stride) for side in size)
        assert out.shape == (2, channels, height, width)
        assert out.is_contiguous()


def test_an_empty_batch_passes_forward_and_backward():
    backbone = tiny()
    outs = backbone(torch.randn(0, 3, 40, 40, requires_grad=True))
    assert [out.shape[0] for out in outs] == [0, 0, 0, 0]
    sum(out.sum() for out in outs).backward()


def test_channels_last_input_gives_the_same_outputs():
    backbone = tiny().eval()
    img = torch.randn(2, 3, 50, 70)
    assert_near(
        backbone(img.to(memory_format=torch.channels_last)),
        backbone(img),
        1e-5,
    )


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
        {'mlp_ratio': 1 / 16},  # one hidden channel
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
    weighted_sum(outs).backward()
    for name, parameter in backbone.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


@pytest.mark.parametrize('kind', [SwinBackbone, SwinV2Backbone])
def test_out_indices_select_maps_and_omit_later_stages(kind):
    full = kind(TINY).eval()
    part = kind(TINY, out_indices=(2, 1)).eval()
    missing, _ = part.load_state_dict(full.state_dict(), strict=False)
    assert not missing
    img = torch.randn(1, 3, 50, 70)
    assert_near(part(img), full(img)[1:3], 0)
    assert (part.out_channels, part.out_strides) == ((32, 64), (8, 16))
    assert len(part.stages) == 3
    assert part.stages[-1].downsample is None


def test_any_number_of_stages():
    arch = {
        'embed_dims': 16,
        'depths': (1, 2),
        'num_heads': (2, 2),
    }
    backbone = SwinBackbone(arch, strides=(4, 3), patch_size=4)
    first, second = backbone(torch.randn(1, 3, 50, 70))
    assert first.shape == (1, 16, 13, 18)
    assert second.shape == (1, 32, 5, 6)


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


@pytest.mark.parametrize('frozen_stages', [-1, 0, 1, 2, 4])
def test_frozen_stages_are_frozen_from_the_start_and_after_train(frozen_stages):
    backbone = tiny(frozen_stages=frozen_stages, use_abs_pos_embed=True, drop_rate=0.5)
    frozen = ()
    if frozen_stages >= 0:
        frozen += ('patch_embed.', 'absolute_pos_embed', 'pos_drop.')
    for stage in range(frozen_stages):
        frozen += (f'stages.{stage}.', f'norm{stage}.')
    for _ in range(2):
        for name, parameter in backbone.named_parameters():
            assert parameter.requires_grad is not name.startswith(frozen), name
        for name, module in backbone.named_modules():
            assert module.training is not f'{name}.'.startswith(frozen), name
        assert backbone.train() is backbone
    assert backbone.eval() is backbone
    assert not any(module.training for module in backbone.modules())


def test_drop_path_rises_linearly_and_is_off_in_evaluation():
    backbone = tiny(drop_path_rate=0.7)
    blocks = [module for module in backbone.modules() if isinstance(module, SwinBlock)]
    rates = [block.drop_path.drop_prob for block in blocks]
    assert rates == pytest.approx([0.1 * step for step in range(8)])
    assert drop_path_by_block(0.7, (1, 1)) == [[0.0], [0.7]]
    assert drop_path_by_block(0.7, (1,)) == [[0.0]]
    img = torch.randn(1, 3, 32, 32)
    backbone.eval()
    assert torch.equal(backbone(img)[3], backbone(img)[3])


def test_drop_path_keeps_the_expectation():
    dropped = DropPath(0.3)(torch.ones(20_000, 1, 1, 1))
    assert dropped.mean().item() == pytest.approx(1.0, abs=0.02)
    assert dropped.unique().tolist() == pytest.approx([0.0, 1 / 0.7])
    assert not DropPath(1.0)(torch.ones(9, 2, 2, 1)).any()


@pytest.mark.parametrize(
    'grid',
    [(10, 9), (8, 12)],
    ids=['another', 'its own'],
)
def test_absolute_position_is_interpolated_bicubically_to_the_grid(grid):
    backbone = tiny(
        use_abs_pos_embed=True,
        pretrain_img_size=(32, 48),
        out_indices=(0,),
    )
    assert backbone.absolute_pos_embed.shape == (1, 8 * 12, 16)
    assert backbone.position_grid == (8, 12)
    maps = backbone.absolute_pos_embed.transpose(1, 2).view(1, 16, 8, 12)
    expected = torch.nn.functional.interpolate(maps, size=grid, mode='bicubic')
    img, seen = torch.randn(2, 3, 4 * grid[0], 4 * grid[1]), []
    tokens = backbone.patch_embed(img)
    backbone.pos_drop.register_forward_hook(lambda module, args, out: seen.append(args[0]))
    backbone(img)
    assert torch.equal(seen[0], tokens + expected.permute(0, 2, 3, 1))


@pytest.mark.parametrize('kind', [SwinBackbone, SwinV2Backbone])
def test_the_state_dict_contains_all_parameters_and_no_buffer_but_the_windows_of_v2(kind):
    backbone = kind(**TINY, use_abs_pos_embed=True)
    others = set(backbone.state_dict()) - {name for name, _ in backbone.named_parameters()}
    blocks = [f'stages.{stage}.blocks.{block}' for stage, depth in enumerate(TINY['depths']) for block in range(depth)]
    expected = [] if kind is SwinBackbone else [f'{block}.attn.w_msa.relative_coords_table' for block in blocks]
    assert sorted(others) == expected


WRONG_TYPES = [
    ({'embed_dim': 96}, "unknown option 'embed_dim'; did you mean 'embed_dims'? The options are arch, "),
    ({'pretrained': 'x.pth'}, "'pretrained' is an option of SwinDense in mmengine configs; for SwinBackbone use"),
    ({'pretrained_window_size': 8}, 'SwinV2Backbone'),
    ({'arch': 3}, 'arch, the first argument, must be one of'),
    ({'depths': 2}, 'depths must be a list of integers, got 2'),
    ({'window_size': b'77'}, "window_size must be an integer, got b'77' of type bytes"),
    ({'window_size': 7.0}, 'window_size must be an integer, got 7.0 of type float'),
    ({'window_size': torch.tensor(7.0)}, 'window_size must be an integer, got tensor(7.) of type Tensor'),
    ({'with_cp': 1}, "with_cp must be True, False, 'mlp' or a list with one of them per stage, got 1"),
    ({'drop_rate': 'a'}, "drop_rate must be a number, got 'a' of type str"),
    ({'qkv_bias': 1}, 'qkv_bias must be True or False, got 1'),
    ({'norm_cfg': None}, 'norm_cfg must be a dict with the key "type", got None'),
    ({'norm_cfg': {'type': 'LN', 'epsilon': 1}}, 'norm_cfg has an invalid argument: '),
    ({'act_cfg': {'type': 'GELU', 'slope': 1}}, 'act_cfg has an invalid argument: '),
]
WRONG_VALUES = [
    ({'arch': 'xl'}, "arch must be one of ['t', 's', 'b', 'l', 'tiny', 'small', 'base', 'large'], with or without"),
    ({'arch': 'swinv2_t'}, 'SwinV2Backbone'),
    ({'arch': {'embed_dims': 96}}, "exactly the keys ['embed_dims', 'depths', 'num_heads'], got ['embed_dims']"),
    ({'embed_dims': 100}, 'num_heads[0] = 3 does not divide the 100 channels of stage 0'),
    ({'num_heads': (3, 6, 12, 25)}, 'num_heads[3] = 25 does not divide the 768 channels of stage 3'),
    ({'depths': (2, 2, 6)}, 'got depths=(2, 2, 6) and num_heads=(3, 6, 12, 24); give both'),
    ({'depths': (2, 0, 6, 2)}, 'every entry of depths must be at least 1, got 0'),
    ({'window_size': -7}, 'window_size must be at least 1, got -7'),
    ({'window_size': (7, 7, 7)}, 'one of them for each of the 4 stages, got 3: (7, 7, 7)'),
    ({'window_size': [(7, 7)] * 2}, 'for each of the 4 stages, got 2: [(7, 7), (7, 7)]'),
    ({'window_size': [7, 7, (7, 0), 7]}, 'window_size[2] must be at least 1, got 0'),
    ({'pretrain_img_size': (9, 9, 9)}, 'pretrain_img_size must be one integer or a (height, width) pair'),
    ({'pretrain_img_size': 3, 'use_abs_pos_embed': True}, 'pretrain_img_size must be at least 4, got 3'),
    ({'out_indices': (0, 4)}, 'out_indices must be different stages from 0 to 3, got (0, 4)'),
    ({'out_indices': (1, 1)}, 'out_indices must be different stages from 0 to 3, got (1, 1)'),
    ({'out_indices': ()}, 'out_indices must not be empty'),
    ({'strides': (4, 2, 2)}, 'strides must have one entry per stage, that is 4, got 3: (4, 2, 2)'),
    ({'strides': (2, 2, 2, 2)}, 'strides[0] must equal patch_size, because patches do not overlap; got 2 and 4'),
    ({'frozen_stages': 5}, 'frozen_stages must be between -1 and 4, the number of stages built, got 5'),
    ({'frozen_stages': -2}, 'frozen_stages must be at least -1, got -2'),
    ({'with_cp': (True, False)}, 'with_cp must have one entry for each of the 4 stages, got 2: (True, False)'),
    ({'with_cp': 'yes'}, "with_cp must be True (recompute blocks), 'mlp' (only their MLPs) or False, got 'yes'"),
    ({'with_cp': (True, False, 'mlp', None)}, "'mlp' (only their MLPs) or False, got None"),
    ({'drop_path_rate': 1.5}, 'drop_path_rate must lie between 0 and 1, got 1.5'),
    ({'mlp_ratio': 0.001}, 'mlp_ratio=0.001 gives no hidden channels for 96 channels'),
    ({'in_channels': 0}, 'in_channels must be at least 1, got 0'),
    ({'act_cfg': {'type': 'Gelu'}}, "got 'Gelu'; did you mean 'GELU'?"),
    ({'norm_cfg': {'type': 'BN'}}, "norm_cfg[\"type\"] must be one of ['LN', 'LayerNorm'], got 'BN'"),
    ({'attn_backend': 'flash'}, "attn_backend must be one of ['auto', 'sdpa', 'reference', 'triton'], got 'flash'"),
]


@pytest.mark.parametrize(('options', 'message'), WRONG_TYPES, ids=str)
def test_options_of_a_wrong_type(options, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        SwinBackbone(**options)


@pytest.mark.parametrize(('options', 'message'), WRONG_VALUES, ids=str)
def test_options_of_a_wrong_value(options, message):
    with pytest.raises(ValueError, match=re.escape(message)), torch.device('meta'):
        SwinBackbone(**options)


def test_several_unknown_options_are_named_at_once():
    with pytest.raises(TypeError) as error:
        SwinBackbone(window_sise=7, img_size=224)
    message = str(error.value)
    assert "'window_sise'; did you mean 'window_size'?" in message
    assert "'img_size': images of any size work" in message
    assert 'pretrained_window_size' not in message


IMAGE = torch.zeros(1, 3, 32, 32)


@pytest.mark.parametrize(
    ('img', 'message'),
    [
        ('image.png', 'img must be a torch.Tensor, got str'),
        (IMAGE.byte(), 'img must be a floating-point tensor, got torch.uint8; normalise the image first'),
        (IMAGE.double(), 'img is torch.float64, but the weights are torch.float32; convert one of them'),
        (IMAGE.to_sparse(), 'img must be a dense tensor, got torch.sparse_coo; pad images to one size, or call'),
        (IMAGE.to_mkldnn(), 'img must be a dense tensor, got torch._mkldnn; pad images to one size, or call'),
        (torch.nested.nested_tensor([IMAGE[0], IMAGE[0]]), 'img must be a dense tensor, got nested; pad images to'),
    ],
    ids=['path', 'integers', 'float64', 'sparse', 'mkldnn', 'nested'],
)
def test_images_of_a_wrong_type(img, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        tiny()(img)


def test_torch_fx_is_told_what_to_use():
    with pytest.raises(TypeError, match=r'torch\.fx cannot trace .* use torch\.export'):
        torch.fx.symbolic_trace(tiny())


def test_a_backbone_on_a_cpu_keeps_what_passes_free_for_the_next(monkeypatch):
    keep_freed = mock.Mock()
    monkeypatch.setattr(memory, 'keep_freed', keep_freed)
    with torch.device('meta'):
        tiny()
    keep_freed.assert_not_called()
    backbone = tiny()
    keep_freed.assert_called_once()
    backbone(IMAGE)
    keep_freed.assert_called_once()


@pytest.mark.parametrize(
    ('img', 'message'),
    [
        (IMAGE[0], 'img must have the shape (B, 3, H, W), got (3, 32, 32)'),
        (
            torch.zeros(1, 4, 32, 32),
            'img must have 3 channels, got 4 in the shape (1, 4, 32, 32); build the backbone with in_channels=4, or',
        ),
        (torch.zeros(1, 3, 0, 32), 'height and width of img must be at least 1 pixel, got the shape (1, 3, 0, 32)'),
    ],
    ids=['rank', 'channels', 'empty'],
)
def test_images_of_a_wrong_size(img, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        tiny()(img)

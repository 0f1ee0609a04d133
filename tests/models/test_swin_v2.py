"""Swin V2, except the comparisons with the paper in test_paper.py and with other libraries in tests/peers."""

import re

import pytest
import torch

from swin_dense import SwinBackbone, SwinClassifier, SwinV2Backbone, create_backbone, extract_pyramid, load_checkpoint
from swin_dense.analysis.flop_counter import count
from swin_dense.checkpoint import CheckpointError, export_state_dict
from swin_dense.models.attention import ShiftedWindowAttention, WindowAttention
from swin_dense.models.swin_v2 import CosineWindowAttention
from tests.conftest import TINY, equal_weights, needs_half, randomize
from tests.derivatives import doubles


def make(seed=0, **options):
    options = {**TINY, 'window_size': 4, 'drop_path_rate': 0.0, **options}
    return randomize(SwinV2Backbone(**options), seed).double()


def first_attention(model):
    return model.stages[0].blocks[0].attn


def position_bias(model):
    """Return the position bias of the first block."""
    return first_attention(model).w_msa.relative_bias(model.window_size)


@pytest.mark.parametrize(
    ('dtype', 'tolerance'),
    [
        pytest.param(torch.float16, 2e-2, marks=needs_half),
        (torch.bfloat16, 1e-1),
    ],
)
def test_low_precision_with_zero_tokens(dtype, tolerance):
    """A zero token has a zero key; normalising it in half precision must not divide by zero."""
    model = make(num_heads=(2, 2, 2, 2), qkv_bias=False)
    attn = model.stages[0].blocks[1].attn
    x = doubles(1, 5, 7, 16)
    x[0, 2] = 0
    expected = attn(x)
    found = attn.to(dtype)(x.to(dtype))
    assert (found - expected).abs().max() < tolerance * expected.abs().max()


def test_scales_are_clamped_and_have_a_gradient_below():
    attn = CosineWindowAttention(8, 2, window_size=(4, 4)).double()
    torch.testing.assert_close(
        attn.logit_scale.exp(), torch.full_like(attn.logit_scale, 10.0)
    )  # without a backbone, too
    assert attn.q_bias is not None
    x = doubles(1, 4, 4, 8)
    with torch.no_grad():
        attn.logit_scale[0] = 100
        attn.logit_scale[1] = 1
    out = ShiftedWindowAttention(attn, (0, 0))(x)
    out.square().sum().backward()
    of_clamped, of_free = attn.logit_scale.grad
    assert of_clamped == 0
    assert of_free != 0
    queries_of_clamped = attn.project(x)[..., :4]
    lengths = queries_of_clamped.norm(dim=-1)
    torch.testing.assert_close(lengths, torch.full_like(lengths, 100))


def test_a_new_block_is_the_identity():
    model = randomize(SwinV2Backbone(**TINY)).eval()
    model.reset_parameters()
    block = model.stages[0].blocks[1]
    x = torch.randn(1, 5, 6, 16)
    assert torch.equal(block(x), x)
    w_msa = block.attn.w_msa
    torch.testing.assert_close(w_msa.logit_scale.exp(), torch.full((1, 1, 1), 10.0))
    assert not w_msa.q_bias.any()
    assert not w_msa.v_bias.any()


@pytest.mark.parametrize(
    'norm_cfg',
    [
        {'type': 'LN', 'elementwise_affine': False},
        lambda channels: torch.nn.Identity(),
    ],
)
def test_norms_without_weights(norm_cfg):
    model = SwinV2Backbone(**TINY, norm_cfg=norm_cfg)
    outs = model(torch.randn(1, 3, 40, 40))
    assert all(out.isfinite().all() for out in outs)


def test_a_window_of_one_token_gives_finite_maps():
    outs = make(window_size=1)(doubles(1, 3, 9, 5))
    assert all(out.isfinite().all() for out in outs)


def test_the_pretrained_window_scales_the_offsets():
    """With pretrained_window_size, an offset of 3 tokens has the same bias in every window."""
    bias = position_bias(make(window_size=4))
    wider = position_bias(make(window_size=6, pretrained_window_size=4))
    inside = wider.view(-1, 6, 6, 6, 6)[:, :4, :4, :4, :4]
    torch.testing.assert_close(inside.reshape(bias.shape), bias)
    assert not torch.allclose(position_bias(make(window_size=6)), wider)


def test_a_key_bias_is_applied_also_in_the_padding():
    attn = first_attention(make())
    attn.w_msa.qkv.bias = torch.nn.Parameter(doubles(48))
    x = doubles(1, 7, 10, 16)
    padded = torch.nn.functional.pad(x, (0, 0, 0, 2, 0, 1))
    torch.testing.assert_close(attn(x), attn(padded)[:, :7, :10])


@pytest.mark.parametrize(
    ('options', 'error', 'words'),
    [
        ({'qk_scale': 0.5}, ValueError, 'learns a scale per head'),
        ({'use_rel_pos_bias': False}, ValueError, 'always has a position bias'),
        ({'pretrained_window_size': (8, 8)}, ValueError, 'one entry per stage'),
        ({'pretrained_window_size': 1}, ValueError, 'at least 2'),
        ({'pretrain_window_size': 8}, TypeError, "did you mean 'pretrained_window_size'"),
        ({'arch': 'swin_t'}, ValueError, 'belongs to SwinBackbone'),
    ],
)
def test_wrong_options_say_what_is_allowed(options, error, words):
    with pytest.raises(error, match=words) as caught:
        SwinV2Backbone(**options)
    if error is TypeError:  # it lists the options, of which V2 lacks two
        assert not re.search('qk_scale|use_rel_pos_bias', str(caught.value))


def test_the_defaults_of_v1_are_accepted():
    with torch.device('meta'):
        backbone = SwinV2Backbone(**TINY, qk_scale=None, use_rel_pos_bias=True)
    assert backbone.window_size == (8, 8)


def test_names_build_the_right_network():
    with torch.device('meta'):
        for name in ('swinv2_t', 'swin_v2_tiny', 'SwinV2-T'):
            backbone = create_backbone(name, window_size=16)
            assert type(backbone) is SwinV2Backbone
            assert backbone.window_size == (16, 16)
            assert not backbone.training
        assert type(create_backbone('swin_t')) is SwinBackbone


def test_checkpoints_of_the_other_version_are_refused(caplog):
    v1, v2 = SwinBackbone(**TINY), make(1)
    with pytest.raises(CheckpointError, match=r'a Swin V2.*Build SwinV2Backbone') as e:
        v1.load_state_dict(v2.state_dict())
    assert 'allow_partial' not in str(e.value)  # no weights would match
    with pytest.raises(CheckpointError, match='It is a Swin V1'):
        load_checkpoint(v2, export_state_dict(v1, 'mmdet'))
    with pytest.raises(ValueError, match='mmdet has no Swin V2'):
        export_state_dict(v2, 'mmdet')
    fresh = make(2)
    report = load_checkpoint(fresh, {'model': export_state_dict(v2, 'official')}, log=None)
    assert 'Swin V2' in str(report)
    assert equal_weights(v2, fresh)


def test_a_file_of_a_different_window_needs_pretrained_window_size():
    file = export_state_dict(make(window_size=8), 'official')
    with pytest.raises(CheckpointError, match=r'pretrained_window_size=\(8, 8, 8, 8\)'):
        load_checkpoint(make(window_size=6), file)
    load_checkpoint(make(window_size=6, pretrained_window_size=8), file)


def test_a_note_says_that_the_windows_of_the_pretraining_are_unknown():
    state = {name: x for name, x in make(window_size=8).state_dict().items() if 'coords' not in name}
    words = 'taken to be those of the model, 6x6; if they were others'
    unknown = load_checkpoint(make(window_size=6), state, log=None)
    known = load_checkpoint(make(window_size=6, pretrained_window_size=8), state, log=None)
    assert words in str(unknown)
    assert words not in str(known)
    with_windows = torch.nn.ModuleDict({'backbone': make(window_size=8)}).state_dict()
    with pytest.raises(CheckpointError, match=r'pretrained_window_size=\(8, 8, 8, 8\)'):
        load_checkpoint(make(window_size=6), with_windows)


@pytest.mark.parametrize(
    ('name', 'window', 'size', 'parameters', 'gflops'),
    [
        ('swinv2_t', 16, 256, 28_347_154, 6.6),
        pytest.param('swinv2_s', 8, 256, 49_728_418, 11.5, marks=pytest.mark.long),
        ('swinv2_b', 24, 384, 87_918_816, 54.7),
        pytest.param('swinv2_l', 16, 256, 196_739_932, 47.5, marks=pytest.mark.long),
    ],
)
def test_published_parameters_and_flops(name, window, size, parameters, gflops):
    with torch.device('meta'):
        result = count(SwinClassifier(name, window_size=window), size, size)
    assert result.parameters[''] == parameters
    # The published figures exclude the position networks.
    position = sum(flops for module, flops in result.flops.items() if module.endswith('cpb_mlp'))
    assert (result.flops[''] - position) / 1e9 == pytest.approx(gflops, abs=0.05)


@torch.no_grad()
def test_tiles_are_exact():
    backbone = make().eval()
    photo = torch.rand(3, 200, 310, dtype=torch.float64)
    whole = extract_pyramid(backbone, photo)
    tiled = extract_pyramid(backbone, photo, tile=128)
    for stride, expected in whole.items():
        torch.testing.assert_close(tiled[stride], expected)


def test_files_of_simmim_name_the_position_network_rpe_mlp():
    source, backbone = make(1), make(2)
    official = export_state_dict(source, 'official')
    state = {'encoder.mask_token': torch.zeros(1, 1, 16)}
    for name, tensor in official.items():
        renamed = name.replace('cpb_mlp', 'rpe_mlp')
        state[f'encoder.{renamed}'] = tensor
    report = load_checkpoint(backbone, {'model': state}, log=None)
    assert (report.family, report.version) == ('simmim', 2)
    assert equal_weights(source, backbone)


@pytest.mark.parametrize('kind', [SwinBackbone, SwinV2Backbone])
def test_clamped_windows_fit_inside_small_maps(kind):
    model = kind(**TINY, window_size=(4, 6), clamp_window=True)
    attn = model.stages[0].blocks[1].attn
    assert attn.windows_on(5, 9) == ((4, 6), (2, 3))
    assert attn.windows_on(4, 9) == ((4, 4), (0, 0))
    assert attn.windows_on(3, 9) == ((3, 3), (0, 0))
    assert attn.windows_on(9, 6) == ((4, 6), (0, 0))
    assert attn.windows_on(9, 5) == ((4, 5), (0, 0))
    assert ShiftedWindowAttention(attn.w_msa, (2, 3)).windows_on(3, 5) == ((4, 6), (2, 3))
    x = torch.randn(1, 3, 2, 16)
    assert attn(x).shape == x.shape


def test_a_clamped_window_of_v1_uses_the_biases_of_its_offsets():
    attn = randomize(WindowAttention(8, 2, window_size=(5, 5)))
    whole = attn.relative_bias((5, 5)).view(2, 5, 5, 5, 5)
    inside = whole[:, :3, :3, :3, :3].reshape(2, 9, 9)
    assert torch.equal(attn.relative_bias((3, 3)), inside)
    assert attn.qkv.bias is not None

"""Swin V2, except the comparisons with other libraries, which are in tests/peers/test_networks.py."""

import pytest
import torch
import torch.nn.functional as F

from swin_dense import SwinBackbone, SwinClassifier, SwinV2Backbone, create_backbone, extract_pyramid, load_checkpoint
from swin_dense.analysis.flop_counter import count
from swin_dense.checkpoint import CheckpointError, export_state_dict
from swin_dense.models.attention import ShiftedWindowAttention, WindowAttention
from swin_dense.models.swin_v2 import CosineWindowAttention
from tests.conftest import TINY, equal_weights, needs_half, randomize


def make(seed=0, **options):
    return randomize(SwinV2Backbone(**{**TINY, 'window_size': 4, 'drop_path_rate': 0.0, **options}), seed).double()


def run(model, img):
    """Return the maps and the gradients of the image and all parameters."""
    img = img.clone().requires_grad_()
    outs = model(img)
    weights = [torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out).sin() for out in outs]
    loss = sum((out * weight).sum() for out, weight in zip(outs, weights, strict=True))
    return [*outs, *torch.autograd.grad(loss, [img, *model.parameters()])]


@pytest.mark.parametrize('options', [{}, {'qkv_bias': False}, {'with_cp': True}, {'window_size': (4, 6)}])
def test_the_default_backend_equals_the_reference(options):
    img = torch.randn(2, 3, 50, 61, dtype=torch.float64)
    found = run(make(**options), img)
    expected = run(make(**{**options, 'with_cp': False}, attn_backend='reference'), img)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert all(gradient.abs().max() > 0 for gradient in found[4:])


@pytest.mark.parametrize(
    ('dtype', 'tolerance'), [pytest.param(torch.float16, 2e-2, marks=needs_half), (torch.bfloat16, 1e-1)]
)
def test_low_precision_with_zero_tokens(dtype, tolerance):
    """A zero token has a zero key; normalising it in half precision must not divide by zero."""
    exact = make(num_heads=(2, 2, 2, 2), qkv_bias=False)
    low = make(num_heads=(2, 2, 2, 2), qkv_bias=False).to(dtype)
    attn, low_attn = exact.stages[0].blocks[1].attn, low.stages[0].blocks[1].attn
    x = torch.randn(1, 5, 7, 16, dtype=torch.float64)
    x[0, 2] = 0
    found, expected = low_attn(x.to(dtype)), attn(x)
    assert (found - expected).abs().max() < tolerance * expected.abs().max()


def test_attention_is_that_of_the_paper():
    """Cosine scores times a factor per head, plus 16 times the sigmoid of a network on log-spaced offsets."""
    attn = randomize(CosineWindowAttention(8, 2, window_size=(2, 4))).double()
    x = torch.randn(1, 2, 4, 8, dtype=torch.float64)
    qkv = F.linear(x, attn.qkv.weight, torch.cat([attn.q_bias, torch.zeros(8), attn.v_bias]))
    q, k, v = qkv.view(8, 3, 2, 4).permute(1, 2, 0, 3)
    place = torch.cartesian_prod(torch.arange(2.0), torch.arange(4.0)).double()
    offset = (place[:, None] - place) / torch.tensor([1, 3]) * 8
    bias = attn.cpb_mlp(offset.sign() * (1 + offset.abs()).log2() / 3).permute(2, 0, 1)
    scores = F.cosine_similarity(q[:, :, None], k[:, None], dim=-1) * attn.logit_scale.exp() + 16 * bias.sigmoid()
    expected = attn.proj((scores.softmax(-1) @ v).transpose(0, 1).flatten(1)).view(x.shape)
    torch.testing.assert_close(attn(x, (2, 4), (0, 0)), expected, rtol=1e-6, atol=1e-6)  # offsets are float32


def test_scales_are_clamped_and_have_a_gradient_below():
    attn = CosineWindowAttention(8, 2, window_size=(4, 4)).double()
    x = torch.randn(1, 4, 4, 8, dtype=torch.float64)
    with torch.no_grad():
        attn.logit_scale[0], attn.logit_scale[1] = 100, 1
    ShiftedWindowAttention(attn, (0, 0))(x).square().sum().backward()
    assert attn.logit_scale.grad[0] == 0
    assert attn.logit_scale.grad[1] != 0
    assert torch.isclose(attn.project(x)[..., :4].norm(dim=-1), torch.tensor(100.0, dtype=torch.float64)).all()


def test_a_new_block_is_the_identity():
    block = SwinV2Backbone(**TINY).eval().stages[0].blocks[1]
    x = torch.randn(1, 5, 6, 16)
    assert torch.equal(block(x), x)


@pytest.mark.parametrize(
    'norm_cfg', [{'type': 'LN', 'elementwise_affine': False}, lambda channels: torch.nn.Identity()]
)
def test_norms_without_weights(norm_cfg):
    model = SwinV2Backbone(**TINY, norm_cfg=norm_cfg)
    assert all(out.isfinite().all() for out in model(torch.randn(1, 3, 40, 40)))


def test_a_window_of_one_token_gives_finite_maps():
    assert all(map.isfinite().all() for map in make(window_size=1)(torch.randn(1, 3, 9, 5, dtype=torch.float64)))


def test_the_pretrained_window_scales_the_offsets():
    """With pretrained_window_size, an offset of 3 tokens has the same bias in every window."""
    small, large = make(window_size=4), make(window_size=6, pretrained_window_size=(4, 4, 4, 4))
    bias, wider = (model.stages[0].blocks[0].attn.w_msa.relative_bias(model.window_size) for model in (small, large))
    inside = wider.view(-1, 6, 6, 6, 6)[:, :4, :4, :4, :4].reshape(bias.shape)
    torch.testing.assert_close(inside, bias)
    assert not torch.allclose(make(window_size=6).stages[0].blocks[0].attn.w_msa.relative_bias((6, 6)), wider)


def test_gradients_per_image():
    block = make().stages[0].blocks[1]
    x = torch.randn(2, 9, 7, 16, dtype=torch.float64)
    parameters = dict(block.named_parameters())

    def loss(parameters, x):
        return torch.func.functional_call(block, parameters, (x[None],)).square().sum()

    singles = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    expected = torch.autograd.grad(block(x[1:]).square().sum(), list(parameters.values()))
    for single, alone in zip(singles.values(), expected, strict=True):
        torch.testing.assert_close(single[1], alone, rtol=1e-9, atol=1e-9)


def test_a_key_bias_is_applied_also_in_the_padding():
    ours, plain = make(), make(attn_backend='reference')
    for model in (ours, plain):
        bias = torch.nn.Parameter(torch.linspace(-1, 1, 48, dtype=torch.float64))
        model.stages[0].blocks[0].attn.w_msa.qkv.bias = bias
    # An explicitly padded map must give the same result as one whose padding has the bias as keys and values.
    x = torch.randn(1, 7, 10, 16, dtype=torch.float64)
    found, expected = (model.stages[0].blocks[0].attn(x) for model in (ours, plain))
    torch.testing.assert_close(found, expected)
    padded = torch.nn.functional.pad(x, (0, 0, 0, 2, 0, 1))
    torch.testing.assert_close(found, ours.stages[0].blocks[0].attn(padded)[:, :7, :10])


@pytest.mark.parametrize(
    ('options', 'error', 'words'),
    [
        ({'qk_scale': 0.5}, ValueError, 'learns a scale per head'),
        ({'use_rel_pos_bias': False}, ValueError, 'always has a position bias'),
        ({'pretrained_window_size': (8, 8)}, ValueError, 'one entry per stage'),
        ({'pretrained_window_size': 1}, ValueError, 'at least 2'),
        ({'pretrain_window_size': 8}, TypeError, "did you mean 'pretrained_window_size'"),
        ({'arch': 'swin_t'}, ValueError, 'belongs to SwinBackbone'),
        ({'ape': True}, TypeError, "'use_abs_pos_embed'"),
    ],
)
def test_wrong_options_say_what_is_allowed(options, error, words):
    with pytest.raises(error, match=words):
        SwinV2Backbone(**options)


def test_errors_of_v1_name_v2():
    with pytest.raises(ValueError, match='SwinV2Backbone'):
        SwinBackbone('swinv2_t')
    with pytest.raises(TypeError, match='SwinV2Backbone'):
        SwinBackbone(pretrained_window_size=8)


def test_names_build_the_right_network():
    with torch.device('meta'):
        for name in ('swinv2_t', 'swin_v2_tiny', 'SwinV2-T'):
            backbone = create_backbone(name, window_size=16)
            assert type(backbone) is SwinV2Backbone
            assert (backbone.window_size, backbone.training) == ((16, 16), False)
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
    state, words = dict(make(window_size=8).state_dict()), 'taken to be those of the model, 6x6; if they were others'
    assert words in str(load_checkpoint(make(window_size=6), state, log=None))
    assert words not in str(load_checkpoint(make(window_size=6, pretrained_window_size=8), state, log=None))


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
def test_a_trace_and_tiles_are_right_at_other_sizes():
    backbone = make().eval()
    traced = torch.jit.trace(backbone, torch.randn(1, 3, 64, 64, dtype=torch.float64), check_trace=False)
    img = torch.rand(2, 3, 50, 61, dtype=torch.float64)
    torch.testing.assert_close(traced(img), backbone(img))
    photo = torch.rand(3, 200, 310, dtype=torch.float64)
    whole, tiled = extract_pyramid(backbone, photo), extract_pyramid(backbone, photo, tile=128)
    for stride, expected in whole.items():
        torch.testing.assert_close(tiled[stride], expected)


def test_files_of_simmim_name_the_position_network_rpe_mlp():
    source, backbone = make(1), make(2)
    official = export_state_dict(source, 'official')
    state = {f'encoder.{name.replace("cpb_mlp", "rpe_mlp")}': tensor for name, tensor in official.items()}
    report = load_checkpoint(backbone, {'model': {**state, 'encoder.mask_token': torch.zeros(1, 1, 16)}}, log=None)
    assert (report.family, report.version) == ('simmim', 2)
    assert equal_weights(source, backbone)


@pytest.mark.parametrize('kind', [SwinBackbone, SwinV2Backbone])
def test_clamped_windows_fit_inside_small_maps(kind):
    attn = kind(**{**TINY, 'window_size': 4}, clamp_window=True).stages[0].blocks[1].attn

    assert attn.windows_on(5, 9) == ((4, 4), (2, 2))
    assert attn.windows_on(4, 9) == ((4, 4), (0, 0))
    assert attn.windows_on(3, 9) == ((3, 3), (0, 0))
    assert attn(torch.randn(1, 3, 2, 16)).shape == (1, 3, 2, 16)


def test_a_clamped_window_of_v1_uses_the_biases_of_its_offsets():
    attn = randomize(WindowAttention(8, 2, window_size=(5, 5)))
    inside = attn.relative_bias((5, 5)).view(2, 5, 5, 5, 5)[:, :3, :3, :3, :3].reshape(2, 9, 9)
    assert torch.equal(attn.relative_bias((3, 3)), inside)

"""Each row of the paper's ablation removes its component, on every backend, and its checkpoints convert."""

import pytest
import torch

from swin_dense import SwinBackbone, export_state_dict, load_checkpoint
from swin_dense.models.attention import ShiftedWindowAttention, WindowAttention
from tests.conftest import TINY, equal_weights, randomize

ROWS = {
    'no shift': {'use_shift': False},
    'no position': {'use_rel_pos_bias': False},
    'absolute': {'use_rel_pos_bias': False, 'use_abs_pos_embed': True},
    'absolute and relative': {'use_abs_pos_embed': True},
    'no appearance': {'qk_scale': 0.0},
    'relative': {},
}


def make(seed=0, **options):
    options = {**TINY, 'window_size': 4, 'drop_path_rate': 0.0, 'pretrain_img_size': 32, **options}
    return randomize(SwinBackbone(**options), seed).double()


@pytest.mark.parametrize('options', ROWS.values(), ids=ROWS)
def test_every_backend_agrees_and_every_parameter_learns(options):
    img = torch.randn(2, 3, 41, 50, dtype=torch.float64)
    found = {}
    for backend in ('auto', 'reference'):
        model = make(**options, attn_backend=backend)
        outs = model(img)
        weights = [torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out).sin() for out in outs]
        gradients = torch.autograd.grad(
            sum((x * w).sum() for x, w in zip(outs, weights, strict=True)), model.parameters()
        )
        found[backend] = [*outs, *gradients]
        for (name, parameter), gradient in zip(model.named_parameters(), gradients, strict=True):
            gradient = (
                gradient[2 * gradient.shape[0] // 3 :] if 'qkv' in name and options == {'qk_scale': 0.0} else gradient
            )
            assert gradient.abs().max() > 0, f'{name} of {tuple(parameter.shape)}'
    torch.testing.assert_close(found['auto'], found['reference'], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize('family', ['official', 'mmdet', 'timm', 'torchvision', 'transformers'])
@pytest.mark.parametrize('options', ROWS.values(), ids=ROWS)
def test_checkpoints_of_all_families_round_trip(options, family):
    first, second = make(1, **options), make(2, **options)
    load_checkpoint(second, export_state_dict(first, family), log=None)
    assert equal_weights(first, second)


@pytest.mark.parametrize(('use_rel_pos_bias', 'is_blind'), [(False, True), (True, False)])
def test_without_position_a_permutation_within_windows_permutes_the_output(use_rel_pos_bias, is_blind):
    w_msa = WindowAttention(8, 2, (4, 4), use_rel_pos_bias=use_rel_pos_bias)
    attn = randomize(ShiftedWindowAttention(w_msa, (0, 0))).double()
    x = torch.randn(1, 4, 4, 8, dtype=torch.float64)
    order = torch.randperm(16)

    def permute(x):
        return x.flatten(1, 2)[:, order].view_as(x)

    assert torch.allclose(attn(permute(x)), permute(attn(x)), atol=1e-12) == is_blind


@torch.no_grad()
@pytest.mark.parametrize(('use_shift', 'is_isolated'), [(False, True), (True, False)])
def test_without_shift_windows_are_independent_within_a_stage(use_shift, is_isolated):
    model = make(use_shift=use_shift, out_indices=(0,)).eval()
    img = torch.randn(1, 3, 32, 32, dtype=torch.float64)
    other = img.clone()
    other[..., 16:] = 0
    left, changed = (model(image)[0][..., :4] for image in (img, other))  # windows of the left half
    assert torch.equal(left, changed) == is_isolated


@torch.no_grad()
def test_without_appearance_attention_is_linear_in_the_image():
    attn = randomize(ShiftedWindowAttention(WindowAttention(8, 2, (4, 4), qk_scale=0.0), (0, 0))).double()
    x, y = torch.randn(2, 1, 4, 4, 8, dtype=torch.float64)
    zero = attn(torch.zeros_like(x))
    torch.testing.assert_close(attn(x + y) - zero, attn(x) + attn(y) - 2 * zero)  # linear in the image


@torch.no_grad()
def test_absolute_position_alone_distinguishes_positions():
    flat = torch.ones(1, 3, 32, 32, dtype=torch.float64)
    blind, seeing = (make(use_rel_pos_bias=False, use_abs_pos_embed=flag).eval()(flat)[0] for flag in (False, True))
    assert blind.flatten(2).std(2).max() < 1e-12
    assert seeing.flatten(2).std(2).max() > 1e-3


@pytest.mark.parametrize('row', ['no position', 'absolute', 'absolute and relative'])
def test_weights_of_the_full_model_are_refused_by_an_ablation(row):
    with pytest.raises(ValueError, match='build the model with use_'):
        load_checkpoint(make(**ROWS[row]), make().state_dict())

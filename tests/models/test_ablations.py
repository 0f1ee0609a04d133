"""Each row of the paper's ablation removes its component, on every backend, and its checkpoints convert."""

import pytest
import torch

from swin_dense import SwinBackbone, export_state_dict, load_checkpoint
from swin_dense.models.attention import ShiftedWindowAttention, WindowAttention
from tests.conftest import TINY, assert_same, equal_weights, randomize
from tests.derivatives import doubles, maps_and_gradients

ROWS = {
    'no shift': {'use_shift': False},
    'no position': {'use_rel_pos_bias': False},
    'absolute': {'use_rel_pos_bias': False, 'use_abs_pos_embed': True},
    'absolute and relative': {'use_abs_pos_embed': True},
    'no appearance': {'qk_scale': 0.0},
    'relative': {},
}
COMMON = {**TINY, 'window_size': 4, 'drop_path_rate': 0.0, 'pretrain_img_size': 32}
of_every_row = pytest.mark.parametrize('options', ROWS.values(), ids=ROWS)


def make(seed=0, **options):
    model = SwinBackbone(**COMMON, **options)
    return randomize(model, seed).double()


@of_every_row
def test_every_backend_agrees_and_every_parameter_learns(options):
    img = doubles(2, 3, 41, 50)
    model = make(**options)
    found = maps_and_gradients(model, img)
    assert_same(found, maps_and_gradients(make(**options, attn_backend='reference'), img))
    names = [name for name, _ in model.named_parameters()]
    for name, gradient in zip(names, found[4:], strict=True):
        values = len(gradient) // 3 if 'qkv' in name else len(gradient)
        assert gradient[-values:].any(), name  # without appearance, queries and keys do not learn


@pytest.mark.parametrize('family', ['official', 'mmdet', 'timm', 'torchvision', 'transformers'])
@of_every_row
def test_checkpoints_of_all_families_round_trip(options, family):
    first, second = make(1, **options), make(2, **options)
    load_checkpoint(second, export_state_dict(first, family), log=None)
    assert equal_weights(first, second)


@pytest.mark.parametrize('has_position', [False, True])
def test_without_position_a_permutation_within_windows_permutes_the_output(has_position):
    w_msa = WindowAttention(8, 2, (4, 4), use_rel_pos_bias=has_position)
    attn = randomize(ShiftedWindowAttention(w_msa, (0, 0))).double()
    x = doubles(1, 4, 4, 8)
    order = torch.randperm(16)

    def permute(x):
        return x.flatten(1, 2)[:, order].view_as(x)

    is_blind = torch.allclose(
        attn(permute(x)),
        permute(attn(x)),
        atol=1e-12,
    )
    assert is_blind is not has_position


@torch.no_grad()
@pytest.mark.parametrize('use_shift', [False, True])
@pytest.mark.parametrize('axis', [2, 3])
def test_without_shift_windows_are_independent_within_a_stage(use_shift, axis):
    model = make(use_shift=use_shift, out_indices=(0,)).eval()
    img = doubles(1, 3, 32, 32)
    other = img.clone()
    other.narrow(axis, 16, 16).zero_()
    first = model(img)[0].narrow(axis, 0, 4)
    changed = model(other)[0].narrow(axis, 0, 4)
    assert torch.equal(first, changed) is not use_shift


@torch.no_grad()
def test_without_appearance_attention_averages_the_values():
    """Without scores and position, all keys have equal weights."""
    w_msa = randomize(WindowAttention(8, 2, (4, 4), qk_scale=0.0, use_rel_pos_bias=False))
    x = torch.randn(1, 4, 4, 8)
    values = w_msa.qkv(x)[..., 16:]
    expected = w_msa.proj(values.mean((1, 2), keepdim=True)).expand_as(x)
    torch.testing.assert_close(ShiftedWindowAttention(w_msa, (0, 0))(x), expected)


@pytest.mark.parametrize('row', ['no position', 'absolute', 'absolute and relative'])
def test_weights_of_the_full_model_are_refused_by_an_ablation(row):
    with pytest.raises(ValueError, match='build the model with use_'):
        load_checkpoint(make(**ROWS[row]), make().state_dict())

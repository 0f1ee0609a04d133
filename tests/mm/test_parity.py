"""With the same weights, outputs and gradients equal those of mmdet's and mmseg's Swin in float64."""

import mmdet.models.backbones
import mmseg.models.backbones
import pytest
import torch

from swin_dense import SwinBackbone, SwinDense
from tests.conftest import TINY, randomize, some

PEERS = {
    'mmdet': mmdet.models.backbones.SwinTransformer,
    'mmseg': mmseg.models.backbones.SwinTransformer,
}
# Heights and widths: 1 to 256 pixels, multiples of the patch and of the window, and others.
SIZES = """
    1x1 1x64 3x5 4x4 7x200 16x16 28x28 29x27 31x33 32x32 56x57 63x100 64x64 97x130 112x112 128x96 150x61 199x301 224x224
    225x223 256x192
"""
TOLERANCE = 1e-9


def pair(peer, backend, **options):
    """Return a peer with random weights and a SwinBackbone with the same weights, in float64 and evaluation mode."""
    theirs = randomize(PEERS[peer](**TINY, **options)).double()
    theirs.eval()  # returns None in both frameworks
    ours = SwinBackbone(**TINY, attn_backend=backend, **options).double().eval()
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def gradients_in_our_names(theirs, ours):
    """Convert the peer's gradients like a checkpoint, which is valid because renaming and reordering are linear."""
    carrier = SwinBackbone(ours.arch, window_size=ours.window_size).double()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    carrier.load_state_dict({**theirs.state_dict(), **gradients})
    return dict(carrier.named_parameters())


def assert_equal(theirs, ours, img):
    expected, outs = theirs(img), ours(img)
    weights = [torch.randn_like(out) for out in outs]
    for out, exact in zip(outs, expected, strict=True):
        assert (out - exact).abs().max() < TOLERANCE, img.shape
    for model, maps in ((theirs, expected), (ours, outs)):
        model.zero_grad()
        torch.autograd.backward(maps, weights)
    exact_gradients = gradients_in_our_names(theirs, ours)
    for name, parameter in ours.named_parameters():
        exact = exact_gradients[name]
        assert (parameter.grad - exact).abs().max() <= TOLERANCE * max(1.0, exact.abs().max()), (img.shape, name)


def blocks_of(model):
    return [block for stage in model.stages for block in stage.blocks]


def test_hooks_on_attention_dropout_see_the_same_weights():
    theirs, ours = pair('mmdet', 'auto')
    seen = []
    for model in (theirs, ours):
        for block in blocks_of(model):
            block.attn.w_msa.attn_drop.register_forward_hook(lambda module, args, out: seen.append(out))
    img = torch.randn(2, 3, 50, 71, dtype=torch.float64)
    theirs(img)
    expected, seen[:] = list(seen), []
    ours(img)
    assert len(seen) == sum(TINY['depths'])
    torch.testing.assert_close(seen, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize('backend', some(['auto', 'reference'], every=2))
@pytest.mark.parametrize(
    ('peer', 'window_size'),
    [
        ('mmdet', 7),
        ('mmseg', 12),
        pytest.param('mmdet', 12, marks=pytest.mark.long),
        pytest.param('mmseg', 7, marks=pytest.mark.long),
    ],
)
def test_outputs_and_gradients_equal_at_many_sizes(peer, window_size, backend):
    theirs, ours = pair(peer, backend, window_size=window_size)
    for size in SIZES.split():
        height, width = map(int, size.split('x'))
        assert_equal(theirs, ours, torch.randn(2, 3, height, width, dtype=torch.float64))


@pytest.mark.slow
@pytest.mark.parametrize('backend', some(['auto', 'reference'], every=2))
@pytest.mark.parametrize(
    ('size', 'window_size'),
    [
        ((512, 512), 7),
        ((800, 1333), 12),
        pytest.param((512, 512), 12, marks=pytest.mark.long),
        pytest.param((800, 1333), 7, marks=pytest.mark.long),
    ],
)
def test_outputs_and_gradients_equal_at_detection_sizes(size, window_size, backend):
    theirs, ours = pair('mmdet', backend, window_size=window_size)
    assert_equal(theirs, ours, torch.randn(1, 3, *size, dtype=torch.float64))


@pytest.mark.parametrize(
    'options',
    [
        {'qkv_bias': False},
        {'qk_scale': 0.3},
        {'patch_norm': False},
        {'mlp_ratio': 2},
        {'out_indices': (1, 3)},
        {'patch_size': 2, 'strides': (2, 2, 2, 2)},
        {'strides': (4, 2, 2, 1)},
        {'strides': (4, 2, 4, 2)},
        {'in_channels': 3, 'window_size': 1},
        {'act_cfg': {'type': 'ReLU'}, 'norm_cfg': {'type': 'LN', 'eps': 1e-3}},
        {'use_abs_pos_embed': True, 'pretrain_img_size': (76, 64)},  # of as many patches: mmdet resizes no map
    ],
    ids=str,
)
def test_options_have_the_same_meaning(options):
    theirs, ours = pair('mmdet', 'auto', **options)
    img = torch.randn(2, 3, 75, 61, dtype=torch.float64)
    for out, exact in zip(ours(img), theirs(img), strict=True):
        assert (out - exact).abs().max() < TOLERANCE


def test_drop_path_and_dropout_have_the_same_rates():
    """Compare the rates, because the random draws differ between implementations."""
    rates = {'drop_rate': 0.1, 'attn_drop_rate': 0.2, 'drop_path_rate': 0.3}
    theirs, ours = PEERS['mmdet'](**TINY, **rates), SwinDense(**TINY, **rates)
    assert ours.pos_drop.p == 0.1
    for exact, block in zip(blocks_of(theirs), blocks_of(ours), strict=True):
        assert block.drop_path.drop_prob == pytest.approx(exact.attn.drop.drop_prob)
        assert block.drop_path.drop_prob == pytest.approx(exact.ffn.dropout_layer.drop_prob)
        assert block.attn.w_msa.attn_drop.p == exact.attn.w_msa.attn_drop.p == 0.2
        assert block.attn.w_msa.proj_drop.p == 0.1
        assert block.ffn.layers[2].p == 0.1

"""Attention weights give the output of the attention; Grad-CAM against the derivative along each channel."""

import pytest
import torch

from swin_dense import SwinBackbone
from swin_dense.analysis.explain import grad_cam, token_attention
from swin_dense.features.images import normalize, read_image
from swin_dense.utils.choices import IMAGENET_MEAN, IMAGENET_STD
from tests.conftest import TINY, photograph, randomize

PHOTOGRAPH = photograph(75, 106)


def input_of(backbone, stage, block):
    """Return the input of a block's attention for the photograph, (H, W, C)."""
    seen = []
    handle = backbone.stages[stage].blocks[block].norm1.register_forward_hook(lambda *args: seen.append(args[2]))
    image = normalize(read_image(PHOTOGRAPH), IMAGENET_MEAN, IMAGENET_STD)
    with torch.no_grad():
        backbone(image[None].double())
    handle.remove()
    return seen[0][0]


@pytest.mark.parametrize(
    'options',
    [{}, {'window_size': (3, 5)}, {'qkv_bias': False}, {'qk_scale': 0.3}, {'use_rel_pos_bias': False}],
    ids=str,
)
@pytest.mark.parametrize('block', [0, 1])
def test_attention_weights_give_the_output_of_the_attention(options, block):
    """The weights of a token, with the values of all tokens and of padding, give what the module returns there."""
    backbone = randomize(SwinBackbone(embed_dims=8, depths=(2, 2), num_heads=(2, 4), **options)).double().eval()
    # The middle, the seam of the shift, and cells next to padding. The maps have 19 x 27 and 10 x 14 cells.
    for stage, pixel in ((0, (40, 51)), (0, (0, 0)), (1, (74, 105)), (1, (3, 100))):
        attention = token_attention(backbone, PHOTOGRAPH, stage, block, pixel)
        stride = 4 * 2**stage
        row, column = pixel[0] // stride, pixel[1] // stride
        assert (attention.stride, attention.cell, attention.image_size) == (stride, (row, column), (75, 106))
        torch.testing.assert_close(attention.weights.sum((1, 2)) + attention.padding, torch.ones(2 * 2**stage).double())
        attn, x = backbone.stages[stage].blocks[block].attn, input_of(backbone, stage, block)
        qkv = attn.w_msa.qkv
        heads = (len(attention.padding), -1)
        with torch.no_grad():
            values = qkv(x)[..., 2 * x.shape[2] :].unflatten(2, heads)
            of_padding = qkv(torch.zeros_like(x[0, 0]))[2 * x.shape[2] :].unflatten(0, heads)
            mixed = torch.einsum('ahw,hwad->ad', attention.weights, values) + attention.padding[:, None] * of_padding
            expected = attn.w_msa.proj(mixed.flatten())
            torch.testing.assert_close(attn(x[None])[0, row, column], expected, rtol=1e-9, atol=1e-12)


def test_attention_in_training_mode_is_deterministic_and_keeps_no_gradients():
    backbone = randomize(SwinBackbone(**TINY, drop_path_rate=0.9, attn_drop_rate=0.5)).train()
    one = token_attention(backbone, PHOTOGRAPH, 2, 1, (40, 50))
    other = token_attention(backbone, PHOTOGRAPH, 2, 1, (40, 50))
    assert torch.equal(one.weights, other.weights)
    assert backbone.training
    assert not one.weights.requires_grad
    assert all(parameter.grad is None for parameter in backbone.parameters())


@pytest.mark.parametrize(
    ('stage', 'block', 'pixel', 'message'),
    [
        (4, 0, (0, 0), 'stage must lie between 0 and 3, got 4'),
        (0, 2, (0, 0), 'block must lie between 0 and 1, got 2'),
        (0, 0, (75, 0), 'pixel row must .* 0 and 74, got 75'),
        (0, 0, (0, -1), 'pixel column must be at least 0'),
    ],
)
def test_attention_refuses(stage, block, pixel, message):
    with pytest.raises(ValueError, match=message):
        token_attention(SwinBackbone(**TINY), PHOTOGRAPH, stage, block, pixel)


@pytest.mark.parametrize(('stage', 'sign'), [(0, -1), (1, 1)])
def test_grad_cam_is_the_derivative_along_each_channel(stage, sign):
    """The derivative for adding a constant to a channel is the sum of its gradients; Grad-CAM takes their mean."""
    backbone = randomize(SwinBackbone(embed_dims=4, depths=(2, 2), num_heads=(1, 2))).double().eval()
    x = normalize(read_image(PHOTOGRAPH), IMAGENET_MEAN, IMAGENET_STD)[None].double()
    added = torch.zeros(backbone.out_channels[stage], dtype=torch.float64, requires_grad=True)
    seen = []

    def target(maps):
        return sign * (maps[8] * torch.arange(8)[:, None, None]).square().mean()

    def add(module, args, output):
        seen.append(output[0][0])
        changed = output[0] + added
        return changed, changed if module.downsample is None else module.downsample(changed)

    with backbone.stages[stage].register_forward_hook(add):
        (slopes,) = torch.autograd.grad(target(dict(zip((4, 8), backbone(x), strict=True))), added)
    rows, columns, _ = seen[0].shape
    expected = (seen[0].detach() * slopes / (rows * columns)).sum(-1).clamp(min=0)
    assert expected.max() > 0
    torch.testing.assert_close(grad_cam(backbone, PHOTOGRAPH, stage, target), expected, rtol=1e-9, atol=1e-12)


def test_grad_cam_of_a_frozen_backbone_and_the_default_target():
    backbone = randomize(SwinBackbone(**TINY, frozen_stages=4)).train()
    default = grad_cam(backbone, PHOTOGRAPH, 2)
    assert default.shape == (5, 7)
    assert default.max() > 0
    with torch.no_grad():
        image = normalize(read_image(PHOTOGRAPH), IMAGENET_MEAN, IMAGENET_STD)
        strongest = int(backbone.eval()(image[None])[-1].mean((0, 2, 3)).argmax())
    chosen = grad_cam(backbone, PHOTOGRAPH, 2, lambda maps: maps[32][:, strongest].mean())
    torch.testing.assert_close(default, chosen)

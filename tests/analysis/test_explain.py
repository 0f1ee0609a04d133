"""Attention weights against their definition in loops, Grad-CAM against finite differences."""

import numpy as np
import pytest
import torch

from swin_dense import SwinBackbone
from swin_dense.analysis.explain import grad_cam, token_attention
from swin_dense.features.images import normalize, read_image
from swin_dense.utils.choices import IMAGENET_MEAN, IMAGENET_STD
from tests.conftest import TINY, photograph, randomize

PHOTOGRAPH = photograph(75, 106)


def attend_by_definition(attn, x, cell):
    """Compute attention weights in loops, by softmax over the positions of the padded map in the query's window.

    Returns:
        The weights of the real tokens, (A, H, W), and the total weight of padding, (A,).
    """
    height, width, channels = x.shape
    w_msa = attn.w_msa
    window, shift, heads = w_msa.window_size, attn.shift, w_msa.num_heads
    padded = [-(-side // step) * step for side, step in zip((height, width), window, strict=True)]
    head_dim = channels // heads
    scale, table = w_msa.scale, w_msa.relative_position_bias_table

    def project(row, column):
        token = x[row, column] if row < height and column < width else torch.zeros_like(x[0, 0])
        projected = token @ w_msa.qkv.weight.T
        return projected if w_msa.qkv.bias is None else projected + w_msa.qkv.bias

    def rolled(position, axis):
        return (position - shift[axis]) % padded[axis]

    query = project(*cell)[:channels].reshape(heads, head_dim)
    scores = {}
    for row in range(padded[0]):
        for column in range(padded[1]):
            shares_window = all(
                rolled(k, a) // window[a] == rolled(q, a) // window[a]
                for a, (k, q) in enumerate(zip((row, column), cell, strict=True))
            )
            # The mask separates tokens that were not neighbours before the roll.
            is_near = all(
                rolled(k, a) - rolled(q, a) == k - q for a, (k, q) in enumerate(zip((row, column), cell, strict=True))
            )
            if shares_window and is_near:
                key = project(row, column)[channels : 2 * channels].reshape(heads, head_dim)
                score = (query * key).sum(1) * scale
                if table is not None:
                    offset = (cell[0] - row + window[0] - 1) * (2 * window[1] - 1) + cell[1] - column + window[1] - 1
                    score = score + table[offset]
                scores[row, column] = score
    weights = torch.stack(list(scores.values())).softmax(0)
    real, padding = torch.zeros(heads, height, width, dtype=x.dtype), torch.zeros(heads, dtype=x.dtype)
    for (row, column), weight in zip(scores, weights, strict=True):
        if row < height and column < width:
            real[:, row, column] = weight
        else:
            padding += weight
    return real, padding


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
def test_attention_equals_its_definition(options, block):
    backbone = randomize(SwinBackbone(embed_dims=8, depths=(2, 2), num_heads=(2, 4), **options)).double().eval()
    # The middle, the seam of the shift, and cells next to padding. The maps have 19 x 27 and 10 x 14 cells.
    for stage, pixel in ((0, (40, 51)), (0, (0, 0)), (1, (74, 105)), (1, (3, 100))):
        attention = token_attention(backbone, PHOTOGRAPH, stage, block, pixel)
        stride = 4 * 2**stage
        assert attention.stride == stride
        assert attention.cell == (pixel[0] // stride, pixel[1] // stride)
        assert attention.image_size == (75, 106)
        with torch.no_grad():
            real, padding = attend_by_definition(
                backbone.stages[stage].blocks[block].attn, input_of(backbone, stage, block), attention.cell
            )
        torch.testing.assert_close(attention.weights, real, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(attention.padding, padding, rtol=1e-9, atol=1e-12)


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
    image = PHOTOGRAPH[:44, :60]
    x = normalize(read_image(image), IMAGENET_MEAN, IMAGENET_STD)[None].double()

    def target(maps):
        return sign * (maps[8] * torch.arange(8)[:, None, None]).square().mean()

    def raised(channel, step):
        def hook(module, args, output):
            direction = torch.zeros(output[0].shape[-1], dtype=output[0].dtype)
            direction[channel] = step
            changed = output[0] + direction
            return changed, changed if module.downsample is None else module.downsample(changed)

        handle = backbone.stages[stage].register_forward_hook(hook)
        with torch.no_grad():
            value = target(dict(zip((4, 8), backbone(x), strict=True)))
        handle.remove()
        return value.item()

    seen = []
    handle = backbone.stages[stage].register_forward_hook(lambda *args: seen.append(args[2][0]))
    with torch.no_grad():
        backbone(x)
    handle.remove()
    (activation,) = seen[0]
    step = 1e-5
    slopes = [(raised(c, step) - raised(c, -step)) / (2 * step) for c in range(activation.shape[-1])]
    weights = np.array(slopes) / (activation.shape[0] * activation.shape[1])
    expected = np.maximum((activation.numpy() * weights).sum(-1), 0)
    cam = grad_cam(backbone, image, stage, target)
    assert expected.max() > 0
    np.testing.assert_allclose(cam.numpy(), expected, rtol=1e-5, atol=1e-7 * expected.max())


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


def test_grad_cam_refuses():
    backbone = SwinBackbone(**TINY)
    with pytest.raises(ValueError, match='does not depend on stage 3'):
        grad_cam(backbone, PHOTOGRAPH, 3, lambda maps: maps[4].mean())
    with pytest.raises(ValueError, match=r'does not depend on stage 3.*detach'):
        grad_cam(backbone, PHOTOGRAPH, 3, lambda maps: maps[32].detach().mean())
    with pytest.raises(ValueError, match='one number'):
        grad_cam(backbone, PHOTOGRAPH, 3, lambda maps: maps[4])
    with pytest.raises(ValueError, match='stage must lie'):
        grad_cam(backbone, PHOTOGRAPH, 7)

"""Compare the backbones in float64 with a Swin that is written out from the papers, with torch alone.

Nothing but the names and shapes of the parameters comes from the package: scale, order of the position bias, mask,
padding, order of the merging and norms are written here again, token by token where that is short.
"""

import math

import pytest
import torch
import torch.nn.functional as F

from swin_dense import SwinBackbone, SwinV2Backbone
from tests.conftest import TINY, assert_near, randomize
from tests.derivatives import doubles, weighted_sum

WINDOW = 4
SIZES = [
    (1, 1),
    (13, 70),
    (50, 61),
    (64, 64),
]


def norm(x, state, name):
    weight = state[f'{name}.weight']
    return F.layer_norm(x, weight.shape, weight, state[f'{name}.bias'], 1e-5)


def linear(x, state, name):
    return F.linear(x, state[f'{name}.weight'], state.get(f'{name}.bias'))


def mlp(x, state, name):
    hidden = linear(x, state, f'{name}.layers.0.0')
    hidden = 0.5 * hidden * (1 + torch.erf(hidden / math.sqrt(2)))
    return linear(hidden, state, f'{name}.layers.1')


def offsets():
    """Return the offset (y, x) of each query from each key of a window, (T, T, 2)."""
    place = torch.cartesian_prod(torch.arange(WINDOW), torch.arange(WINDOW))
    return place[:, None] - place


def scores_of_v1(q, k, state, name):
    """Softmax(q k^T / sqrt(d) + B), where B is looked up by the offset in a table that is ordered row by row."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    y, x = (offsets() + WINDOW - 1).unbind(-1)
    table = state[f'{name}.relative_position_bias_table']
    bias = table[y * (2 * WINDOW - 1) + x]
    return scores + bias.permute(2, 0, 1)


def scores_of_v2(q, k, state, name):
    """cos(q, k) / tau + B, where a network computes B from log-spaced offsets: 16 sigmoid(network)."""
    cosines = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT
    factors = state[f'{name}.logit_scale'].clamp(max=math.log(100)).exp()
    relative = 8 * offsets().double() / (WINDOW - 1)
    spaced = relative.sign() * torch.log2(1 + relative.abs()) / math.log2(8)
    hidden = linear(spaced, state, f'{name}.cpb_mlp.0').relu()
    bias = 16 * linear(hidden, state, f'{name}.cpb_mlp.2').sigmoid()
    return cosines * factors + bias.permute(2, 0, 1)


def padded(x, side):
    """Pad a map (B, H, W, C) with zeros below and at the right, to multiples of a side."""
    _, height, width, _ = x.shape
    below = -height % side
    right = -width % side
    return F.pad(x, (0, 0, 0, right, 0, below))


def regions(height, width, shift):
    """Number the parts of a rolled map of which attention must not mix tokens: they come from different edges."""
    is_moved_row = torch.arange(height) >= height - shift
    is_moved_column = torch.arange(width) >= width - shift
    return 2 * is_moved_row[:, None].long() + is_moved_column.long()


def attention(x, state, name, heads, shift, is_v2):
    """Attend within the windows of a padded and rolled map, one window after the other."""
    _, height, width, channels = x.shape
    x = padded(x, WINDOW)
    x = torch.roll(
        x,
        (-shift, -shift),
        (1, 2),
    )
    qkv = linear(x, state, f'{name}.qkv')
    if is_v2:
        q_bias, v_bias = state[f'{name}.q_bias'], state[f'{name}.v_bias']
        qkv = qkv + torch.cat([q_bias, torch.zeros_like(q_bias), v_bias])
    region = regions(*x.shape[1:3], shift)
    out = torch.zeros_like(x)
    for top in range(0, height, WINDOW):
        for left in range(0, width, WINDOW):
            rows, columns = slice(top, top + WINDOW), slice(left, left + WINDOW)
            tokens = qkv[:, rows, columns].flatten(1, 2)
            of_heads = tokens.unflatten(2, (3, heads, channels // heads))
            q, k, v = of_heads.permute(2, 0, 3, 1, 4)
            scores = (scores_of_v2 if is_v2 else scores_of_v1)(q, k, state, name)
            of_tokens = region[rows, columns].flatten()
            scores = scores - 100.0 * (of_tokens[:, None] != of_tokens).double()
            attended = (scores.softmax(-1) @ v).transpose(1, 2)
            out[:, rows, columns] = attended.reshape(-1, WINDOW, WINDOW, channels)
    out = torch.roll(out, (shift, shift), (1, 2))
    out = out[:, :height, :width]
    return linear(out, state, f'{name}.proj')


def block(x, state, name, heads, shift, is_v2):
    def attend(x):
        return attention(x, state, f'{name}.attn.w_msa', heads, shift, is_v2)

    if is_v2:
        x = x + norm(attend(x), state, f'{name}.norm1')
        return x + norm(mlp(x, state, f'{name}.ffn'), state, f'{name}.norm2')
    x = x + attend(norm(x, state, f'{name}.norm1'))
    return x + mlp(norm(x, state, f'{name}.norm2'), state, f'{name}.ffn')


def merge(x, state, name, is_v2):
    """Join 2x2 neighbours, with the order of mmdet's nn.Unfold: by channel, and then row by row."""
    x = padded(x, 2)
    four = [
        x[:, 0::2, 0::2],
        x[:, 0::2, 1::2],
        x[:, 1::2, 0::2],
        x[:, 1::2, 1::2],
    ]
    x = torch.stack(four, -1).flatten(3)
    if is_v2:
        return norm(linear(x, state, f'{name}.reduction'), state, f'{name}.norm')
    return linear(norm(x, state, f'{name}.norm'), state, f'{name}.reduction')


def embed(img, state):
    height, width = img.shape[2:]
    img = F.pad(img, (0, -width % 4, 0, -height % 4))
    name = 'patch_embed.projection'
    x = F.conv2d(
        img,
        state[f'{name}.weight'],
        state[f'{name}.bias'],
        stride=4,
    )
    return norm(x.permute(0, 2, 3, 1), state, 'patch_embed.norm')


def pyramid(img, state, is_v2):
    x = embed(img, state)
    maps = []
    for stage, heads in enumerate(TINY['num_heads']):
        for index in range(TINY['depths'][stage]):
            shift = WINDOW // 2 if index % 2 else 0
            x = block(x, state, f'stages.{stage}.blocks.{index}', heads, shift, is_v2)
        maps.append(norm(x, state, f'norm{stage}').permute(0, 3, 1, 2))
        if stage < 3:
            x = merge(x, state, f'stages.{stage}.downsample', is_v2)
    return maps


@pytest.mark.parametrize('backend', ['auto', 'reference'])
@pytest.mark.parametrize('size', SIZES, ids=str)
@pytest.mark.parametrize('kind', [SwinBackbone, SwinV2Backbone])
def test_maps_and_gradients_are_those_of_the_paper(kind, size, backend):
    model = randomize(
        kind(
            **TINY,
            window_size=WINDOW,
            drop_path_rate=0.0,
            attn_backend=backend,
        )
    ).double()
    img = doubles(2, 3, *size)
    state = {name: parameter.detach().requires_grad_() for name, parameter in model.named_parameters()}
    found = model(img)
    expected = pyramid(img, state, kind is SwinV2Backbone)
    # The offsets of V2 are in float32, in which the published weights were trained.
    tolerance = 1e-5 if kind is SwinV2Backbone else 1e-9
    assert_near(found, tuple(expected), tolerance)
    grads = torch.autograd.grad(weighted_sum(found), list(model.parameters()))
    wanted_grads = torch.autograd.grad(weighted_sum(expected), list(state.values()))
    for name, ours, wanted in zip(state, grads, wanted_grads, strict=True):
        distance = 10 * tolerance * max(wanted.abs().max().item(), 1.0)
        torch.testing.assert_close(
            ours,
            wanted,
            rtol=tolerance,
            atol=distance,
            msg=name,
        )

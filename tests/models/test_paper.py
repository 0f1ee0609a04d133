"""Compare the backbones in float64 with a Swin that is written from the papers, only with torch.

Attention within windows is that of tests/textbook.py. Scale, order of the position bias, order of the merging and norms
are written here again; only the names and shapes of the parameters come from the package.
"""

import math

import pytest
import torch
import torch.nn.functional as F

from swin_dense import SwinBackbone, SwinV2Backbone
from swin_dense.ops.windows import WindowSpec
from tests import textbook
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


def bias_of_v1(state, name):
    """Return the bias of each head, (A, T, T), looked up by the offset in a table that is ordered row by row."""
    y, x = (offsets() + WINDOW - 1).unbind(-1)
    table = state[f'{name}.relative_position_bias_table']
    return table[y * (2 * WINDOW - 1) + x].permute(2, 0, 1)


def bias_of_v2(state, name):
    """Return the bias that a network computes from log-spaced offsets: 16 sigmoid(network)."""
    relative = 8 * offsets().double() / (WINDOW - 1)
    spaced = relative.sign() * torch.log2(1 + relative.abs()) / math.log2(8)
    hidden = linear(spaced, state, f'{name}.cpb_mlp.0').relu()
    return 16 * linear(hidden, state, f'{name}.cpb_mlp.2').sigmoid().permute(2, 0, 1)


def attention(x, state, name, heads, shift, is_v2):
    """Attend as tests/textbook.py does; a padding token is 0 before the projection, so its bias is left."""
    qkv = linear(x, state, f'{name}.qkv')
    bias = state.get(f'{name}.qkv.bias')
    if is_v2:
        q_bias, v_bias = state[f'{name}.q_bias'], state[f'{name}.v_bias']
        bias = torch.cat([q_bias, torch.zeros_like(q_bias), v_bias])
        q, k, v = (qkv + bias).chunk(3, -1)
        factors = state[f'{name}.logit_scale'].clamp(max=math.log(100)).exp()[:, 0]
        q, k = (F.normalize(part.unflatten(-1, (heads, -1)), dim=-1) for part in (q, k))
        qkv = torch.cat([(q * factors).flatten(-2), k.flatten(-2), v], -1)
    scale = 1.0 if is_v2 else (x.shape[3] // heads) ** -0.5
    spec = WindowSpec(heads, (WINDOW, WINDOW), (shift, shift), scale)
    relative = (bias_of_v2 if is_v2 else bias_of_v1)(state, name)
    out = textbook.window_attention(qkv, relative, bias[x.shape[3] :], spec)
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
    height, width = x.shape[1:3]
    x = F.pad(x, (0, 0, 0, width % 2, 0, height % 2))
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

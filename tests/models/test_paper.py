"""Compare the backbones in float64 with a Swin that is written out from the papers, with torch alone.

Nothing but the names and shapes of the parameters comes from the package: scale, order of the position bias, mask,
padding, order of the merging and norms are written here again, token by token where that is short.
"""

import math

import pytest
import torch
import torch.nn.functional as F

from swin_dense import SwinBackbone, SwinV2Backbone
from tests.conftest import TINY, randomize

WINDOW = 4
SIZES = [(1, 1), (13, 70), (50, 61), (64, 64)]


def norm(x, state, name):
    return F.layer_norm(x, x.shape[-1:], state[f'{name}.weight'], state[f'{name}.bias'], 1e-5)


def mlp(x, state, name):
    hidden = F.linear(x, state[f'{name}.layers.0.0.weight'], state[f'{name}.layers.0.0.bias'])
    hidden = 0.5 * hidden * (1 + torch.erf(hidden / math.sqrt(2)))
    return F.linear(hidden, state[f'{name}.layers.1.weight'], state[f'{name}.layers.1.bias'])


def offsets():
    """Return the offset (y, x) of each query from each key of a window, (T, T, 2)."""
    place = torch.cartesian_prod(torch.arange(WINDOW), torch.arange(WINDOW))
    return place[:, None] - place


def scores_of_v1(q, k, state, name):
    """Softmax(q k^T / sqrt(d) + B), where B is looked up by the offset in a table that is ordered row by row."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    y, x = (offsets() + WINDOW - 1).unbind(-1)
    table = state[f'{name}.relative_position_bias_table']
    return scores + table[y * (2 * WINDOW - 1) + x].permute(2, 0, 1)


def scores_of_v2(q, k, state, name):
    """cos(q, k) / tau + B, where a network computes B from log-spaced offsets: 16 sigmoid(network)."""
    cosines = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
    factors = state[f'{name}.logit_scale'].clamp(max=math.log(100)).exp()
    relative = 8 * offsets().double() / (WINDOW - 1)
    spaced = relative.sign() * torch.log2(1 + relative.abs()) / math.log2(8)
    hidden = F.linear(spaced, state[f'{name}.cpb_mlp.0.weight'], state[f'{name}.cpb_mlp.0.bias']).relu()
    bias = 16 * F.linear(hidden, state[f'{name}.cpb_mlp.2.weight']).sigmoid()
    return cosines * factors + bias.permute(2, 0, 1)


def attention(x, state, name, heads, shift, is_v2):
    """Attend within the windows of a padded and rolled map, one window after the other."""
    batch, height, width, channels = x.shape
    rows, columns = math.ceil(height / WINDOW), math.ceil(width / WINDOW)
    padded = x.new_zeros(batch, rows * WINDOW, columns * WINDOW, channels)
    padded[:, :height, :width] = x
    bias = state.get(f'{name}.qkv.bias')
    if is_v2:
        q_bias, v_bias = state[f'{name}.q_bias'], state[f'{name}.v_bias']
        bias = torch.cat([q_bias, torch.zeros_like(q_bias), v_bias])
    qkv = F.linear(padded, state[f'{name}.qkv.weight'], bias)
    qkv = torch.roll(qkv, (-shift, -shift), (1, 2))
    # Tokens from the other edge of the map, of which attention must not mix those of different edges.
    is_moved_row = torch.arange(rows * WINDOW) >= rows * WINDOW - shift
    is_moved_column = torch.arange(columns * WINDOW) >= columns * WINDOW - shift
    region = 2 * is_moved_row[:, None].long() + is_moved_column.long()
    out = torch.zeros_like(padded)
    for top in range(0, rows * WINDOW, WINDOW):
        for left in range(0, columns * WINDOW, WINDOW):
            inside = slice(top, top + WINDOW), slice(left, left + WINDOW)
            tokens = qkv[:, inside[0], inside[1]].reshape(batch, WINDOW * WINDOW, 3, heads, channels // heads)
            q, k, v = tokens.permute(2, 0, 3, 1, 4)
            scores = (scores_of_v2 if is_v2 else scores_of_v1)(q, k, state, name)
            regions = region[inside].flatten()
            scores = scores - 100.0 * (regions[:, None] != regions).double()
            attended = (scores.softmax(-1) @ v).transpose(1, 2)
            out[:, inside[0], inside[1]] = attended.reshape(batch, WINDOW, WINDOW, channels)
    out = torch.roll(out, (shift, shift), (1, 2))[:, :height, :width]
    return F.linear(out, state[f'{name}.proj.weight'], state[f'{name}.proj.bias'])


def block(x, state, name, heads, shift, is_v2):
    attn = f'{name}.attn.w_msa'
    if is_v2:
        x = x + norm(attention(x, state, attn, heads, shift, is_v2), state, f'{name}.norm1')
        return x + norm(mlp(x, state, f'{name}.ffn'), state, f'{name}.norm2')
    x = x + attention(norm(x, state, f'{name}.norm1'), state, attn, heads, shift, is_v2)
    return x + mlp(norm(x, state, f'{name}.norm2'), state, f'{name}.ffn')


def merge(x, state, name, is_v2):
    """Join 2x2 neighbours, with the order of mmdet's nn.Unfold: by channel, and then row by row."""
    _, height, width, _ = x.shape
    x = F.pad(x, (0, 0, 0, width % 2, 0, height % 2))
    four = [x[:, row::2, column::2] for row in (0, 1) for column in (0, 1)]
    x = torch.stack(four, -1).flatten(3)
    weight = state[f'{name}.reduction.weight']
    if is_v2:
        return norm(F.linear(x, weight), state, f'{name}.norm')
    return F.linear(norm(x, state, f'{name}.norm'), weight)


def pyramid(img, state, is_v2):
    height, width = img.shape[2:]
    img = F.pad(img, (0, -width % 4, 0, -height % 4))
    x = F.conv2d(img, state['patch_embed.projection.weight'], state['patch_embed.projection.bias'], stride=4)
    x = norm(x.permute(0, 2, 3, 1), state, 'patch_embed.norm')
    maps = []
    for stage, (depth, heads) in enumerate(zip(TINY['depths'], TINY['num_heads'], strict=True)):
        for index in range(depth):
            shift = WINDOW // 2 if index % 2 else 0
            x = block(x, state, f'stages.{stage}.blocks.{index}', heads, shift, is_v2)
        maps.append(norm(x, state, f'norm{stage}').permute(0, 3, 1, 2))
        if stage + 1 < len(TINY['depths']):
            x = merge(x, state, f'stages.{stage}.downsample', is_v2)
    return maps


@pytest.mark.parametrize('backend', ['auto', 'reference'])
@pytest.mark.parametrize('size', SIZES, ids=str)
@pytest.mark.parametrize('kind', [SwinBackbone, SwinV2Backbone])
def test_maps_and_gradients_are_those_of_the_paper(kind, size, backend):
    model = randomize(kind(**TINY, window_size=WINDOW, drop_path_rate=0.0, attn_backend=backend)).double()
    img = torch.randn(2, 3, *size, dtype=torch.float64)
    found = model(img)
    state = {name: parameter.detach().requires_grad_() for name, parameter in model.named_parameters()}
    expected = pyramid(img, state, kind is SwinV2Backbone)
    # The offsets of V2 are in float32, in which the published weights were trained.
    tolerance = 1e-5 if kind is SwinV2Backbone else 1e-9
    for ours, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=tolerance, atol=tolerance)
    grads = torch.autograd.grad(sum(out.sin().sum() for out in found), list(model.parameters()))
    wanted_grads = torch.autograd.grad(sum(out.sin().sum() for out in expected), list(state.values()))
    for name, ours, wanted in zip(state, grads, wanted_grads, strict=True):
        scale = wanted.abs().max().item()
        torch.testing.assert_close(ours, wanted, rtol=tolerance, atol=10 * tolerance * max(scale, 1.0), msg=name)

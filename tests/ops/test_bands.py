"""A map worked through in bands gives what the whole map gives."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swin_dense import SwinBackbone
from swin_dense.ops import bands
from swin_dense.ops.recompute import recompute_cheap


@pytest.fixture
def narrow(monkeypatch):
    monkeypatch.setattr(bands, 'BAND_TOKENS', 40)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_token_is_in_one_band_with_its_window(data):
    """The block adds to each token the sum of its window, computed from the official geometry."""
    from swin_dense.windows import merge, partition

    batch, height, width = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 40)), data.draw(st.integers(1, 20))
    window = (data.draw(st.integers(1, 7)), data.draw(st.integers(1, 7)))
    shift = tuple(data.draw(st.integers(0, side - 1)) for side in window)
    x = torch.randn(batch, height, width, 2, dtype=torch.float64)
    factors = torch.randn(batch, 1, dtype=torch.float64)
    sizes = []

    def block(x, shift, per_image):
        sizes.append(x.shape[:3].numel())
        windows = partition(x, window, shift)
        windows = windows + windows.sum(2, keepdim=True) + (window[0] * shift[1])
        return merge(windows, x.shape[1:3], window, shift) * per_image.view(-1, 1, 1, 1)

    expected = block(x, shift, factors)
    sizes.clear()
    original, bands.BAND_TOKENS = bands.BAND_TOKENS, 40
    try:
        torch.testing.assert_close(bands.in_bands(block, x, window, shift, factors), expected)
    finally:
        bands.BAND_TOKENS = original
    # One row of windows is the least, and the last band takes over what is left.
    assert max(sizes) <= 2 * max(60, window[0] * width + shift[0] * width)


@pytest.mark.parametrize('with_cp', [False, True])
def test_a_model_in_bands_has_the_same_outputs_and_gradients(monkeypatch, with_cp):
    results = []
    for tokens in (10**9, 60):
        monkeypatch.setattr(bands, 'BAND_TOKENS', tokens)
        torch.manual_seed(0)
        model = SwinBackbone(embed_dims=16, depths=(2, 2), num_heads=(2, 2), strides=(4, 2), window_size=4,
                             drop_path_rate=0.5, with_cp=with_cp).double()  # fmt: skip
        img = torch.randn(3, 3, 70, 90, dtype=torch.float64, requires_grad=True)
        outs = model(img)
        sum(out.square().sum() for out in outs).backward()
        results.append([*outs, img.grad, *(parameter.grad for parameter in model.parameters())])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-12)


def test_an_image_keeps_or_drops_a_branch_as_a_whole(narrow):
    torch.manual_seed(0)
    block = (
        SwinBackbone(embed_dims=8, depths=(2,), num_heads=(2,), strides=(4,), drop_path_rate=0.9).layers[0].blocks[1]
    )
    assert block.drop_path.drop_prob == 0.9
    x = torch.randn(20, 24, 24, 8)
    unchanged = (block(x) == x).flatten(1).float().mean(1)
    # An image with one branch dropped still changes everywhere; one with both stays as it is, in every band.
    assert all(share == 1.0 or share < 0.01 for share in unchanged.tolist())
    assert 0 < (unchanged == 1.0).sum() < 20


def test_recomputing_keeps_only_the_input():
    linear = torch.nn.Linear(4, 8)
    x = torch.randn(5, 4, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        plain = linear(torch.nn.functional.gelu(x))
    assert torch.Size([5, 4]) in kept
    calls = []

    def counted(x):
        calls.append(x.shape)
        return torch.nn.functional.gelu(x)

    products = []
    handle = linear.register_forward_hook(lambda *_: products.append(1))
    ours = recompute_cheap(x, counted, linear)
    (ours_grad,) = torch.autograd.grad(ours.square().sum(), x)
    (expected_grad,) = torch.autograd.grad(plain.square().sum(), x)
    handle.remove()
    assert torch.equal(ours, plain)
    torch.testing.assert_close(ours_grad, expected_grad)
    assert len(calls) == 2  # the cheap function twice
    assert len(products) == 1  # the product once


def test_recomputing_draws_the_same_numbers():
    x = torch.randn(50, 8, requires_grad=True)
    drop, linear = torch.nn.Dropout(0.5), torch.nn.Linear(8, 1, bias=False)
    out = recompute_cheap(x, drop, linear)
    out.sum().backward()
    kept = (x.grad != 0).float()
    torch.testing.assert_close(out, torch.nn.functional.linear(x * kept * 2, linear.weight))
    torch.testing.assert_close(linear.weight.grad, (x * kept * 2).sum(0, keepdim=True))

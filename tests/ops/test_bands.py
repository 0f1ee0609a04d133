"""A map worked through in bands gives what the whole map gives."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swin_dense import SwinBackbone
from swin_dense.ops import bands
from swin_dense.windows import merge, partition


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_token_is_in_one_band_with_its_window(data):
    """Each token gets the sum of its window, computed from the official geometry, band by band and at once."""
    batch, height, width = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 40)), data.draw(st.integers(1, 20))
    window = (data.draw(st.integers(1, 7)), data.draw(st.integers(1, 7)))
    shift = tuple(data.draw(st.integers(0, side - 1)) for side in window)
    x = torch.randn(batch, height, width, 2, dtype=torch.float64)
    out, sizes = torch.full_like(x, torch.nan), []

    def add_window_sums(x, shift):
        windows = partition(x, window, shift)
        return merge(windows + windows.sum(2, keepdim=True), x.shape[1:3], window, shift)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bands, 'BAND_TOKENS', 40)
        for band in bands.cut(slice(0, batch), x, window, shift):
            part = band.of(x)
            sizes.append(part.shape[:3].numel())
            band.put(out, add_window_sums(part, band.shift))
    torch.testing.assert_close(out, add_window_sums(x, shift))
    # One row of windows is the least, and the last band takes over what is left.
    assert max(sizes) <= 2 * max(60, window[0] * width + shift[0] * width)
    assert sum(sizes) == x.shape[:3].numel()


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

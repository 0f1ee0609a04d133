"""Processing a map in chunks gives the same result as processing it at once."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swin_dense.ops import chunks
from tests.textbook import merge, partition


@given(data=st.data())
def test_every_token_is_in_one_chunk_with_its_window(data):
    """Add the sum of its window to each token, in chunks and at once, with the official window geometry."""
    batch, height, width = data.draw(st.integers(0, 5)), data.draw(st.integers(1, 40)), data.draw(st.integers(1, 20))
    window = (data.draw(st.integers(1, 7)), data.draw(st.integers(1, 7)))
    shift = tuple(data.draw(st.integers(0, side - 1)) for side in window)
    x = torch.randn(batch, height, width, 2, dtype=torch.float64)
    sizes = []

    def add_window_sums(x, window, shift):
        sizes.append(x.shape[:3].numel())
        windows = partition(x, window, shift)
        return merge(windows + windows.sum(2, keepdim=True), x.shape[1:3], window, shift)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, 'CHUNK_TOKENS', 40)
        out = chunks.run(add_window_sums, x, window, shift)
    assert sum(sizes) == x.shape[:3].numel()
    # A chunk has at least one row of windows, and the last chunk also takes the remainder.
    assert max(sizes) <= 2 * max(60, window[0] * width + shift[0] * width)
    torch.testing.assert_close(out, add_window_sums(x, window, shift))


def test_the_result_keeps_its_dtype():
    x = torch.randn(1, 128, 128, 8)
    assert chunks.run(lambda part, window, shift: part.bfloat16(), x, (4, 4), (0, 0)).dtype == torch.bfloat16


def test_only_maps_of_more_than_one_chunk_are_cut():
    assert not chunks.are_faster(torch.empty(1, 64, 128, 8))
    assert chunks.are_faster(torch.empty(1, 64, 129, 8))
    assert chunks.are_faster(torch.empty(1, 64, 64, 768))
    assert not chunks.are_faster(torch.empty(0, 640, 640, 8))

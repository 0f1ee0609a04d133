"""Processing a map in chunks gives the same result as processing it at once."""

import os
import platform
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swin_dense.ops import chunks
from tests.conftest import ROOT
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


# In a fresh process, because tests before may have freed larger blocks.
PAGES = """
import resource, statistics, torch
from swin_dense import SwinBackbone
model, img = SwinBackbone(dict(embed_dims=96, depths=(2, 2), num_heads=(3, 6))).eval(), torch.rand(1, 3, 224, 224)
faults = []
with torch.no_grad():
    for _ in range(16):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        model(img)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(statistics.median_low(faults[5:]))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != 'glibc', reason='other allocators keep memory by other rules')
def test_small_maps_find_the_memory_of_the_pass_before():
    settings = [name for name in os.environ if name.startswith('MALLOC_') or name in ('GLIBC_TUNABLES', 'LD_PRELOAD')]
    environment = {name: value for name, value in os.environ.items() if name not in settings}
    command = [sys.executable, '-c', PAGES]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    # Page faults of the median pass, because the heap may still grow in one or two of them; each pass has 2,000 to
    # 6,000 if glibc returns the memory.
    assert int(done.stdout) < 100

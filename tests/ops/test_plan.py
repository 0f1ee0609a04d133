"""Compare window plans with rolling and partitioning a map of indices, and test their cache."""

import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swin_dense.ops import gathered
from swin_dense.ops.gathered import MAX_PLANS, cached_plan, gpu_plan, plan_windows
from swin_dense.ops.windows import Grid
from tests.textbook import REGION_PENALTY, partition, region_ids

CPU = torch.device('cpu')
GRID = Grid(
    (14, 21),
    (7, 7),
    (3, 3),
)


@st.composite
def grids(draw):
    """Draw maps with and without padding, from one window to 25."""
    window = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    shift = tuple(draw(st.integers(0, side - 1)) for side in window)
    size = []
    for side in window:
        padding = draw(st.integers(0, side - 1))
        size.append(draw(st.integers(1, 5)) * side - padding)
    return Grid(tuple(size), window, shift)


@settings(max_examples=200)
@given(grids())
def test_plans_equal_rolling_and_partitioning(grid):
    (height, width), window, shift = grid
    padded = height + -height % window[0], width + -width % window[1]
    raster = torch.arange(padded[0] * padded[1]).view(padded)
    tokens_NT = partition(raster[None, :, :, None], window, shift).squeeze((0, 3))
    regions_NT = region_ids(*padded, window, shift)
    masks_NTT = REGION_PENALTY * (regions_NT[:, :, None] != regions_NT[:, None]).float()
    expected = {}
    for tokens, mask in zip(tokens_NT.tolist(), masks_NTT, strict=True):
        expected[tuple(tokens)] = mask

    plan = plan_windows(grid, CPU)
    assert plan.grid == grid
    assert plan.token_of_slot.dtype == plan.slot_of_token.dtype == torch.int32
    tokens = raster[:height, :width].flatten()
    assert torch.equal(plan.token_of_slot[plan.slot_of_token], tokens.int())
    windows = plan.token_of_slot.view(-1, window[0] * window[1])
    for group, mask in zip(windows.split(plan.groups), plan.masks, strict=True):
        for tokens in group.tolist():
            assert torch.equal(mask[0], expected.pop(tuple(tokens)))
    assert not expected
    assert len(plan.groups) <= 4  # of the middle, the last row, the last column and the last corner


def test_plans_are_cached_within_limits():
    plan = cached_plan(GRID, CPU)
    assert cached_plan(GRID, CPU) is plan
    for rows in range(MAX_PLANS):
        cached_plan(Grid((7 * rows + 7, 7), (7, 7), (3, 3)), CPU)
    assert cached_plan.cache_info().currsize == MAX_PLANS
    assert cached_plan(GRID, CPU) is not plan


@pytest.fixture
def capture(monkeypatch):
    """Return a function that begins or ends the capture of a CUDA graph; without a GPU, the cache is that of a CPU."""
    monkeypatch.setattr(gathered, '_gpu_plans', {})
    monkeypatch.setattr(gathered, '_captured_plans', {})

    def capture(is_capturing):
        monkeypatch.setattr(torch.cuda, 'is_current_stream_capturing', lambda: is_capturing)

    capture(False)
    return capture


@pytest.mark.usefixtures('capture')
@pytest.mark.parametrize('find_plan', [cached_plan, gpu_plan])
@pytest.mark.parametrize(
    'context',
    [torch.inference_mode(), torch.device('meta')],
    ids=['inference', 'meta'],
)
def test_a_plan_does_not_depend_on_where_it_was_made(context, find_plan):
    expected = plan_windows(GRID, CPU)
    cached_plan.cache_clear()
    with context:
        plan = find_plan(GRID, CPU)
    tables = (plan.token_of_slot, plan.slot_of_token, plan.masks)
    others = (expected.token_of_slot, expected.slot_of_token, expected.masks)
    for ours, wanted in zip(tables, others, strict=True):
        assert not ours.is_inference()
        assert torch.equal(ours, wanted)


def test_masks_of_a_gpu_have_rows_that_torch_need_not_copy():
    """Windows of 7 x 7 have 49 tokens, and rows of 56 numbers."""
    masks = torch.randn(4, 3, 49, 49)
    aligned = gathered._with_aligned_rows(masks)
    assert torch.equal(aligned, masks)
    assert aligned.stride() == (3 * 49 * 56, 49 * 56, 56, 1)
    eights = torch.zeros(1, 3, 64, 64)
    assert gathered._with_aligned_rows(eights) is eights


def test_a_plan_that_a_cuda_graph_reads_is_never_freed(capture):
    """Plans of 64 other geometries fill the cache after the capture; the memory of the graph's plan must stay."""
    plan, other = (gpu_plan(Grid((14, columns), (7, 7), (3, 3)), CPU) for columns in (21, 28))
    capture(True)
    assert gpu_plan(GRID, CPU) is plan
    memory, others_memory = weakref.ref(plan.token_of_slot), weakref.ref(other.token_of_slot)
    del plan, other
    capture(False)
    for rows in range(MAX_PLANS):
        gpu_plan(Grid((rows + 1, 7), (7, 7), (3, 3)), CPU)
        assert len(gathered._gpu_plans) <= MAX_PLANS
    assert memory() is not None
    assert others_memory() is None


def test_a_plan_made_during_a_capture_is_not_cached(capture):
    """Its tensors have no values before the graph is replayed."""
    capture(True)
    first, second = (gpu_plan(GRID, CPU) for _ in range(2))
    assert first is not second
    assert not gathered._gpu_plans

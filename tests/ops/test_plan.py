"""Compare window plans with rolling and partitioning a map of indices, and test their cache."""

import threading
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from swin_dense.ops import sdpa
from swin_dense.ops.sdpa import gpu_plan
from swin_dense.ops.windows import Grid, Plan, plan_windows
from swin_dense.utils import private
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
    for group, mask in zip(plan.token_of_slot.split(plan.groups), plan.masks, strict=True):
        for tokens in group.view(-1, window[0] * window[1]).tolist():
            assert torch.equal(mask[0], expected.pop(tuple(tokens)))
    assert not expected
    assert len(plan.groups) <= 4  # of the middle, the last row, the last column and the last corner


class SortedSizes(TorchDispatchMode):
    """Record how many numbers each sort has."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if 'sort' in str(func):
            self.sizes.append(args[0].numel())
        return func(*args, **(kwargs or {}))


def test_a_plan_sorts_windows_but_not_tokens():
    """A map of 200 x 304 tokens has 1,276 windows; a sort of its tokens takes longer than all else of the plan."""
    with SortedSizes() as sort:
        plan = plan_windows(Grid((200, 304), (7, 7), (3, 3)), CPU)
    assert sort.sizes == [len(plan.regions)] == [29 * 44]


@pytest.fixture(autouse=True)
def _no_plans(monkeypatch):
    monkeypatch.setattr(sdpa, '_plans', sdpa._Plans())
    monkeypatch.setattr(sdpa, '_captured_plans', {})
    monkeypatch.setattr(private, 'current_raw_stream', lambda device: 0)
    monkeypatch.setattr(torch.cuda, 'is_current_stream_capturing', lambda: False)


def cached_plan(grid, device):
    return sdpa._plans[grid, device]


def grid_of(columns):
    return Grid((14, columns), (7, 7), (3, 3))


def bytes_of(plan: Plan):
    return sum(table.nbytes for table in (plan.token_of_slot, plan.slot_of_token, plan.masks, plan.regions))


def total_bytes():
    return sum(bytes_of(plan) for plan in sdpa._plans.values())


@pytest.fixture
def room_for_four(monkeypatch):
    """Let the cache have room for three plans and another one, and return how many bytes these are at most."""
    limit = sum(bytes_of(plan_windows(grid_of(columns), CPU)) for columns in (21, 22, 23))
    monkeypatch.setattr(sdpa, 'MAX_PLAN_BYTES', limit)
    return limit + bytes_of(plan_windows(grid_of(59), CPU))


def test_plans_are_cached_within_a_limit_of_bytes(room_for_four):
    plan = cached_plan(GRID, CPU)
    for columns in (22, 23):
        cached_plan(grid_of(columns), CPU)
        assert cached_plan(GRID, CPU) is plan
    for columns in range(22, 60):
        cached_plan(grid_of(columns), CPU)
        assert total_bytes() <= room_for_four
    assert cached_plan(GRID, CPU) is not plan


def test_many_small_sizes_are_all_kept():
    """Twenty sizes of images have 160 plans, and take turns where their order is random."""
    sizes = [grid_of(columns) for columns in range(1, 161)]
    first = [cached_plan(grid, CPU) for grid in sizes]
    assert all(cached_plan(grid, CPU) is plan for grid, plan in zip(sizes, first, strict=True))


def test_threads_keep_the_limit(monkeypatch, room_for_four):
    """Eight threads make plans at once, twelve each."""
    barrier = threading.Barrier(8)

    def plan_at_once(*place):
        barrier.wait()
        return plan_windows(*place)

    monkeypatch.setattr(sdpa, 'plan_windows', plan_at_once)

    def run(thread):
        for step in range(12):
            gpu_plan(grid_of(1 + 12 * thread + step), CPU)

    threads = [threading.Thread(target=run, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    monkeypatch.setattr(sdpa, 'plan_windows', plan_windows)
    gpu_plan(GRID, CPU)
    assert total_bytes() <= room_for_four


def test_streams_have_plans_of_their_own(monkeypatch):
    """A stream would read the plan of another before it is written, or after its memory was given away."""
    first = gpu_plan(GRID, CPU)
    monkeypatch.setattr(private, 'current_raw_stream', lambda device: 7)
    second = gpu_plan(GRID, CPU)
    assert second is not first
    assert gpu_plan(GRID, CPU) is second


@pytest.fixture
def capture(monkeypatch):
    """Return a function that begins or ends the capture of a CUDA graph, which has a stream of its own."""

    def capture(is_capturing):
        monkeypatch.setattr(torch.cuda, 'is_current_stream_capturing', lambda: is_capturing)
        monkeypatch.setattr(private, 'current_raw_stream', lambda device: int(is_capturing))

    return capture


@pytest.mark.parametrize('find_plan', [cached_plan, gpu_plan])
@pytest.mark.parametrize(
    'context',
    [torch.inference_mode(), torch.device('meta')],
    ids=['inference', 'meta'],
)
def test_a_plan_does_not_depend_on_where_it_was_made(context, find_plan):
    expected = plan_windows(GRID, CPU)
    with context:
        plan = find_plan(GRID, CPU)
    tables = (plan.token_of_slot, plan.slot_of_token, plan.masks)
    others = (expected.token_of_slot, expected.slot_of_token, expected.masks)
    for ours, wanted in zip(tables, others, strict=True):
        assert not ours.is_inference()
        assert torch.equal(ours, wanted)


@pytest.mark.usefixtures('room_for_four')
def test_a_plan_that_cuda_graphs_read_is_never_freed(capture):
    """Other plans fill the cache between the captures of a size with two batches."""
    other = gpu_plan(grid_of(28), CPU)
    plan = gpu_plan(GRID, CPU)
    capture(True)
    assert gpu_plan(GRID, CPU) is plan
    memory, others_memory = weakref.ref(plan.token_of_slot), weakref.ref(other.token_of_slot)
    del plan, other
    capture(False)
    for columns in range(1, 30):
        if columns not in (21, 28):
            gpu_plan(grid_of(columns), CPU)
    gpu_plan(GRID, CPU)
    capture(True)
    gpu_plan(GRID, CPU)
    capture(False)
    assert memory() is not None
    assert others_memory() is None


def test_a_plan_made_during_a_capture_is_not_cached(capture):
    """Its tensors have no values before the graph is replayed."""
    capture(True)
    first, second = (gpu_plan(GRID, CPU) for _ in range(2))
    assert first is not second
    assert not sdpa._plans
    assert not sdpa._captured_plans

"""Compare window plans with explicit padding, rolling and partitioning; test their cache with streams and graphs."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swin_dense.ops import plan
from swin_dense.ops.windows import WindowSpec
from tests.ops.devices import needs_gpu
from tests.textbook import REGION_PENALTY, partition, region_ids, window_grid

CPU = torch.device('cpu')


def plan_by_partition(height, width, window, shift):
    """Partition a map of indices; return (tokens, mask) of each group, with token -1 for padding, and the slots."""
    rows, columns = window_grid(height, width, window)
    raster = torch.arange(1, height * width + 1).view(1, height, width, 1)
    tokens = partition(raster, window, shift)[0, :, :, 0] - 1
    ids = region_ids(height, width, window, shift)
    is_last_row = torch.arange(rows) == (rows - 1 if shift[0] else -1)
    is_last_column = torch.arange(columns) == (columns - 1 if shift[1] else -1)
    kinds = (2 * is_last_row[:, None] + is_last_column[None, :].int()).flatten()
    members = [windows for kind in range(4) if len(windows := (kinds == kind).nonzero()[:, 0])]
    masks = [REGION_PENALTY * (ids[windows[0]][:, None] != ids[windows[0]][None, :]).float() for windows in members]
    order = tokens[torch.cat(members)].flatten()
    slots = torch.empty(height * width, dtype=torch.int32)
    slots[order[order >= 0]] = torch.arange(len(order), dtype=torch.int32)[order >= 0]
    return [(tokens[windows].flatten(), mask) for windows, mask in zip(members, masks, strict=True)], slots


@st.composite
def geometries(draw):
    window = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    shift = tuple(draw(st.integers(0, side - 1)) for side in window)
    return draw(st.integers(1, 40)), draw(st.integers(1, 40)), window, shift


@settings(max_examples=200)
@given(geometries())
def test_plans_equal_padding_rolling_and_partitioning(geometry):
    groups, slots = plan_by_partition(*geometry)
    made = plan._build(*geometry, CPU)
    assert torch.equal(made.slots, slots)
    assert made.slots.dtype == torch.int32
    for group, (tokens, mask) in zip(made.groups, groups, strict=True):
        assert torch.equal(group.padding, (tokens < 0).nonzero()[:, 0])
        assert torch.equal(group.tokens.long(), tokens.clamp(min=0))
        assert group.tokens.dtype == torch.int32
        assert mask.any() if group.mask is not None else not mask.any()
        assert group.mask is None or torch.equal(group.mask, mask)


def test_unpacked_tables_equal_the_packed_ones():
    tables = [
        torch.arange(n, dtype=dtype) for n in (0, 1, 7, 64) for dtype in (torch.int32, torch.int64, torch.float32)
    ]
    for view, table in zip(plan._unpack(plan._pack(tables), tables), tables, strict=True):
        assert torch.equal(view, table)
        assert view.dtype == table.dtype


GEOMETRY = (9, 8, (7, 7), (3, 3), torch.device('cuda'))


@pytest.fixture
def gpu(monkeypatch):
    """Simulate a GPU for the plan cache; yield the state: the current stream, and whether it is capturing."""
    state = SimpleNamespace(stream=1, is_capturing=False)
    monkeypatch.setattr(plan, '_to_device', lambda tables, device: tables)
    monkeypatch.setattr(torch.cuda, 'is_current_stream_capturing', lambda: state.is_capturing)
    monkeypatch.setattr(torch.cuda, 'current_stream', lambda device: SimpleNamespace(cuda_stream=state.stream))
    monkeypatch.setattr(plan, '_captured', {})
    plan._cached.cache_clear()
    yield state
    plan._cached.cache_clear()


def test_every_stream_has_its_own_plan(gpu):
    first = plan.plan_windows(*GEOMETRY)
    gpu.stream = 2
    second = plan.plan_windows(*GEOMETRY)
    assert second is not first
    assert plan.plan_windows(*GEOMETRY) is second
    gpu.stream = 1
    assert plan.plan_windows(*GEOMETRY) is first


def test_a_captured_plan_outlives_the_cache(gpu):
    """A capture runs on a separate stream, and its graph keeps reading the plan after other plans are made."""
    warm = weakref.ref(plan.plan_windows(*GEOMETRY))
    gpu.stream, gpu.is_capturing = 7, True
    assert plan.plan_windows(*GEOMETRY) is warm()
    gpu.stream, gpu.is_capturing = 1, False
    for side in range(plan.MAX_PLANS):
        plan.plan_windows(side + 10, *GEOMETRY[1:])
    gc.collect()
    assert plan.plan_windows(*GEOMETRY) is not warm()
    gpu.is_capturing = True
    assert plan.plan_windows(*GEOMETRY) is warm()
    assert warm() is not None


def test_a_capture_uses_the_plan_of_the_last_active_stream(gpu):
    """This holds even if another stream built a plan later that has been evicted from the cache."""
    warm = plan.plan_windows(*GEOMETRY)
    gpu.stream = 2
    plan.plan_windows(*GEOMETRY)
    gpu.stream = 1
    for side in range(plan.MAX_PLANS):
        plan.plan_windows(*GEOMETRY)
        plan.plan_windows(side + 10, *GEOMETRY[1:])
    gc.collect()
    assert plan.plan_windows(*GEOMETRY) is warm
    gpu.is_capturing = True
    assert plan.plan_windows(*GEOMETRY) is warm


def test_a_plan_without_a_graph_is_evicted(gpu):
    first = weakref.ref(plan.plan_windows(*GEOMETRY))
    for side in range(plan.MAX_PLANS):
        assert first() is not None
        plan.plan_windows(side + 10, *GEOMETRY[1:])
    gc.collect()
    assert first() is None


def test_a_capture_without_a_warm_up_is_an_error(gpu):
    gpu.is_capturing = True
    with pytest.raises(RuntimeError, match='9 x 8 tokens in windows of 7 x 7; run the model once'):
        plan.plan_windows(*GEOMETRY)


@pytest.mark.parametrize('device', [pytest.param('cuda', marks=needs_gpu)])
def test_the_host_does_not_wait_for_the_gpu(device):
    plan.plan_windows(*GEOMETRY)  # the first pinned allocation of a process calls the driver
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode('error')
    try:
        made = plan.plan_windows(50, 84, (7, 7), (3, 3), torch.device(device))
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert torch.equal(made.slots.cpu(), plan._build(50, 84, (7, 7), (3, 3), CPU).slots)


@pytest.mark.parametrize('device', [pytest.param('cuda', marks=needs_gpu)])
def test_a_graph_replays_after_its_plan_is_evicted(device):
    from swin_dense.ops import window_attention

    qkv = torch.randn(1, 9, 8, 96, device=device)
    geometry = {'spec': WindowSpec(2, (7, 7), (3, 3), 0.25), 'backend': 'sdpa'}
    with torch.no_grad():
        expected = window_attention(qkv, None, None, **geometry)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = window_attention(qkv, None, None, **geometry)
        for side in range(10, 10 + plan.MAX_PLANS):
            window_attention(torch.randn(1, side, side, 96, device=device), None, None, **geometry)
        graph.replay()
    assert torch.equal(out, expected)

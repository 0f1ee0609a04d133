"""Compare window plans with rolling and partitioning a map of indices, and test their cache."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swin_dense.ops.sdpa import MAX_PLANS, plan_windows
from tests.textbook import REGION_PENALTY, partition, region_ids

CPU = torch.device('cpu')
GEOMETRY = (14, 21, (7, 7), (3, 3), CPU)


@st.composite
def geometries(draw):
    """Draw maps of whole windows."""
    window = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    shift = tuple(draw(st.integers(0, side - 1)) for side in window)
    rows, columns = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    return rows * window[0], columns * window[1], window, shift


@settings(max_examples=200)
@given(geometries())
def test_plans_equal_rolling_and_partitioning(geometry):
    height, width, window, shift = geometry
    tokens_NT = partition(torch.arange(height * width).view(1, height, width, 1), window, shift)[0, :, :, 0]
    regions_NT = region_ids(height, width, window, shift)
    masks_NTT = REGION_PENALTY * (regions_NT[:, :, None] != regions_NT[:, None]).float()
    expected = {tuple(tokens.tolist()): mask for tokens, mask in zip(tokens_NT, masks_NTT, strict=True)}

    plan = plan_windows(*geometry, CPU)
    assert plan.order.dtype == plan.raster.dtype == torch.int32
    assert torch.equal(plan.order[plan.raster], torch.arange(height * width, dtype=torch.int32))
    for group, mask in zip(plan.order.split(plan.sizes), plan.masks, strict=True):
        for window_ in group.view(-1, window[0] * window[1]).tolist():
            wanted = expected.pop(tuple(window_))
            # A mask of zeros would be added for nothing.
            assert wanted.any() if mask is not None else not wanted.any()
            assert mask is None or torch.equal(mask, wanted[None, None])
    assert not expected
    assert len(plan.sizes) <= 4  # of the middle, the last row, the last column and the last corner


def test_plans_are_cached_within_limits():
    plan = plan_windows(*GEOMETRY)
    assert plan_windows(*GEOMETRY) is plan
    for rows in range(MAX_PLANS):
        plan_windows(7 * rows + 7, 7, (7, 7), (3, 3), CPU)
    assert plan_windows.cache_info().currsize == MAX_PLANS
    assert plan_windows(*GEOMETRY) is not plan


@pytest.mark.parametrize('context', [torch.inference_mode(), torch.device('meta')], ids=['inference', 'meta'])
def test_a_plan_does_not_depend_on_where_it_was_made(context):
    expected = plan_windows(*GEOMETRY)
    plan_windows.cache_clear()
    with context:
        plan = plan_windows(*GEOMETRY)
    for ours, wanted in zip(
        (plan.order, plan.raster, *plan.masks[1:]), (expected.order, expected.raster, *expected.masks[1:]), strict=True
    ):
        assert not ours.is_inference()
        assert torch.equal(ours, wanted)
    assert plan.masks[0] is None

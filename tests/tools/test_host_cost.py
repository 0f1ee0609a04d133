"""The work of the host in a pass of a Swin-T has a limit, so that a call that each block makes is noticed."""

import sys

import pytest

from tests.conftest import ROOT

sys.path.insert(0, str(ROOT / 'benchmarks'))

import host_cost

# Python calls outside of torch's modules, and operations of torch, of a pass and of a training step. Both are what the
# code needs, and half a call for each of the 12 blocks: in eager mode a GPU waits for them. Some 1,030 calls more are
# within torch's modules, whose names and order are mmdet's.
LIMITS = {
    "torch's attention, as on a GPU": {'inference': (662, 2310), 'training step': (1198, 9480)},
    'the kernels, as on a GPU': {'inference': (846, 1070), 'training step': (1230, 3575)},
}


@pytest.mark.parametrize('row', LIMITS)
def test_the_host_does_no_more_than_before(row):
    for kind, counted in host_cost.count_ours(row).items():
        found = counted.row()
        calls, events = LIMITS[row][kind]
        assert found['Python calls outside of torch.nn'] <= calls, (kind, counted.python.most_common(60))
        assert found['torch operations'] <= events, (kind, counted.aten.most_common(30))

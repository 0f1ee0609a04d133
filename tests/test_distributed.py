"""Distributed training in processes started by torchrun."""

import pytest

from tests.distributed_worker import RUNS, WRAPPERS
from tests.processes import python


@pytest.mark.slow
def test_two_processes_give_the_losses_of_one():
    """Cover each output alone, frozen stages, checkpointing and drop path, without find_unused_parameters."""
    launch = ['-W', 'ignore', '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', '2']
    done = python(*launch, '-m', 'tests.distributed_worker')
    assert done.stdout.count(': passed') == len(RUNS) * len(WRAPPERS)

"""Distributed training in processes started by torchrun."""

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.distributed_worker import RUNS, WRAPPERS


@pytest.mark.slow
def test_two_processes_give_the_losses_of_one():
    """Cover each output alone, frozen stages, checkpointing and drop path, without find_unused_parameters."""
    command = [sys.executable, '-W', 'ignore', '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', '2']
    environment = {**os.environ, 'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1'}
    done = subprocess.run(
        [*command, '-m', 'tests.distributed_worker'], capture_output=True, text=True, env=environment, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(': passed') == len(RUNS) * len(WRAPPERS)

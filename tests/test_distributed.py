"""Several processes, as torchrun starts them."""

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.distributed_worker import CASES, TOLERANCES, WAYS


@pytest.mark.slow
def test_two_processes_train_as_one_does():
    """Without find_unused_parameters, for every output, frozen stages, recomputation and drop path."""
    command = [sys.executable, '-W', 'ignore', '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', '2']
    environment = {**os.environ, 'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1'}
    done = subprocess.run(
        [*command, '-m', 'tests.distributed_worker'], capture_output=True, text=True, env=environment, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(': well') == len(TOLERANCES) * len(CASES) * len(WAYS)

"""Training with several processes gives the weights of one process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT, TINY
from tests.processes import cli, environment
from tests.workbench.tiny_training import TinyRegressor, write_config

pytestmark = [pytest.mark.slow, pytest.mark.long]

# DDP and FSDP need every parameter to be used, so the backbone has only the norm of the last map, which the head reads.
EXTRA = """
model['backbone']['out_indices'] = (3,)
optim_wrapper['optimizer'] = dict(type='SGD', lr=1e-3, momentum=0.9)
load_from = {start!r}
train_dataloader['batch_size'] = {batch_size}
"""


@pytest.fixture(scope='module')
def start(tmp_path_factory):
    """Return a file of initial weights, because the runners of mmengine would draw different ones."""
    path = tmp_path_factory.mktemp('start') / 'start.pth'
    model = TinyRegressor(
        dict(
            type='SwinDense',
            drop_path_rate=0.0,
            out_indices=(3,),
            **TINY,
        )
    )
    torch.save({'state_dict': model.state_dict()}, path)
    return str(path)


@pytest.fixture(scope='module')
def single(start, tmp_path_factory):
    """Return the weights after twelve iterations in one process with a batch of two images."""
    folder = tmp_path_factory.mktemp('single')
    cli(
        'train',
        write_config(folder, EXTRA.format(start=start, batch_size=2)),
        '--work-dir',
        folder / 'run',
    )
    weights = weights_of(folder / 'run')
    moved = (weights['head.weight'] - torch.load(start)['state_dict']['head.weight']).abs().max()
    assert moved > 1e-3  # far more than the tolerance of the comparisons
    return weights


def weights_of(work_dir):
    """Return the weights of the last checkpoint."""
    return dict(torch.load(work_dir / 'iter_12.pth')['state_dict'])


def test_two_nodes_give_the_weights_of_one_process(start, single, tmp_path):
    """Run the documented command for several machines once for each of two nodes, which share this machine."""
    to_torchrun = f'{Path(sys.executable).parent}{os.pathsep}{os.environ["PATH"]}'
    nodes = {'NNODES': '2', 'MASTER_ADDR': '127.0.0.1', 'PORT': '29577'}
    running = []
    for rank in ('0', '1'):
        folder = tmp_path / rank
        folder.mkdir()
        config = write_config(folder, EXTRA.format(start=start, batch_size=1))
        command = [ROOT / 'tools/dist_train.sh', config, '1', '--work-dir', folder / 'run']
        variables = {**environment(), **nodes, 'PATH': to_torchrun, 'NODE_RANK': rank}
        with open(folder / 'output.txt', 'w') as output:
            running.append(
                subprocess.Popen(
                    command,
                    env=variables,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
    statuses = [process.wait() for process in running]
    assert statuses == [0, 0], [path.read_text()[-5000:] for path in tmp_path.glob('*/output.txt')]
    torch.testing.assert_close(weights_of(tmp_path / '0/run'), single, rtol=1e-4, atol=1e-6)
    assert not list((tmp_path / '1').glob('run/*.pth'))

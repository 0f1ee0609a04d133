"""Training with several processes, on one machine and on two hosts, gives the weights of one process."""

import contextlib
import os
import subprocess
import sys

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
    model = TinyRegressor(dict(type='SwinDense', drop_path_rate=0.0, out_indices=(3,), **TINY))
    torch.save({'state_dict': model.state_dict()}, path)
    return str(path)


@pytest.fixture(scope='module')
def single(start, tmp_path_factory):
    """Return the weights after twelve iterations in one process with a batch of two images."""
    folder = tmp_path_factory.mktemp('single')
    cli('train', write_config(folder, EXTRA.format(start=start, batch_size=2)), '--work-dir', folder / 'run')
    weights = weights_of(folder / 'run')
    moved = (weights['head.weight'] - torch.load(start)['state_dict']['head.weight']).abs().max()
    assert moved > 1e-3  # far more than the tolerance of the comparisons
    return weights


def weights_of(work_dir):
    """Return the weights of the last checkpoint."""
    return dict(torch.load(work_dir / 'iter_12.pth')['state_dict'])


@contextlib.contextmanager
def two_hosts():
    """Connect two network namespaces, 10.77.0.1 and 10.77.0.2, by a virtual cable; skip the test if not permitted."""
    names = [f'swin-{os.getpid()}-{index}' for index in (1, 2)]
    created = []
    try:
        for name in names:
            if not ip(f'netns add {name}'):
                pytest.skip('creating network namespaces is not permitted here')
            created.append(name)
        if not ip(f'-n {names[0]} link add cable type veth peer name cable netns {names[1]}'):
            pytest.skip('connecting network namespaces is not permitted here')
        for index, name in enumerate(names, 1):
            assert ip(f'-n {name} address add 10.77.0.{index}/24 dev cable')
            assert all(ip(f'-n {name} link set {device} up') for device in ('lo', 'cable'))
        yield names
    finally:
        for name in created:
            ip(f'netns delete {name}')


def ip(words):
    """Run the ip command of iproute2; return whether it exists and succeeds."""
    try:
        return subprocess.run(['ip', *words.split()], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def test_two_hosts_give_the_weights_of_one_process(start, single, tmp_path):
    """Run the documented command for several machines on hosts that are connected only by the virtual cable."""
    settings = {
        **environment(),
        'PATH': os.pathsep.join([os.path.dirname(sys.executable), os.environ['PATH']]),  # to torchrun
        'GLOO_SOCKET_IFNAME': 'cable',
        **{'NNODES': '2', 'MASTER_ADDR': '10.77.0.1', 'PORT': '29500'},
    }
    with two_hosts() as hosts:
        processes = []
        for rank, host in enumerate(hosts):
            folder = tmp_path / host
            folder.mkdir()
            config = write_config(folder, EXTRA.format(start=start, batch_size=1))
            training = [ROOT / 'tools/dist_train.sh', config, '1', '--work-dir', folder / 'run']
            with open(folder / 'output.txt', 'w') as output:
                processes.append(
                    subprocess.Popen(
                        ['ip', 'netns', 'exec', host, *map(str, training)],
                        env={**settings, 'NODE_RANK': str(rank)},
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )
        statuses = [process.wait() for process in processes]
    assert statuses == [0, 0], [(tmp_path / host / 'output.txt').read_text()[-5000:] for host in hosts]
    torch.testing.assert_close(weights_of(tmp_path / hosts[0] / 'run'), single, rtol=1e-4, atol=1e-6)
    assert not list((tmp_path / hosts[1]).glob('run/*.pth'))

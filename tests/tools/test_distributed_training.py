"""Trainings by several processes, on one machine and on two, end with the weights of one by one process."""

import contextlib
import os
import shutil
import subprocess
import sys

import pytest
import torch

import swin_dense  # noqa: F401  its import lets torch.load read the checkpoints of mmengine
from tests.conftest import ROOT
from tests.tools.test_runners import environment, train
from tests.tools.tiny_training import write_config

SGD = "optim_wrapper['optimizer'] = dict(type='SGD', lr=1e-2, momentum=0.9)\n"
PAIR = SGD + "train_dataloader['batch_size'] = 1\n"
SHARDED = """
runner_type = 'FlexibleRunner'
strategy = dict(
    type='FSDPStrategy', state_dict_cfg='full', model_wrapper=dict(auto_wrap_policy='swin_auto_wrap_policy'))
"""


@pytest.fixture(scope='module')
def alone(tmp_path_factory):
    """Return the weights after twelve iterations of one process with two images each."""
    folder = tmp_path_factory.mktemp('alone')
    train(write_config(folder, SGD), '--work-dir', folder / 'run')
    return torch.load(folder / 'run' / 'iter_12.pth')['state_dict']


@contextlib.contextmanager
def two_hosts():
    """Make two network namespaces with a cable between them, 10.77.0.1 and 10.77.0.2, where the user may."""
    names = [f'swin-{os.getpid()}-{index}' for index in (1, 2)]
    made = []
    try:
        for name in names:
            if not shutil.which('ip') or subprocess.run(['ip', 'netns', 'add', name], capture_output=True).returncode:
                pytest.skip('network namespaces may not be made here')
            made.append(name)
        cable = [
            'ip',
            '-n',
            names[0],
            'link',
            'add',
            'cable',
            'type',
            'veth',
            'peer',
            'name',
            'cable',
            'netns',
            names[1],
        ]
        if subprocess.run(cable, capture_output=True).returncode:
            pytest.skip('network namespaces may not be connected here')
        for index, name in enumerate(names, 1):
            subprocess.run(['ip', '-n', name, 'address', 'add', f'10.77.0.{index}/24', 'dev', 'cable'], check=True)
            for device in ('lo', 'cable'):
                subprocess.run(['ip', '-n', name, 'link', 'set', device, 'up'], check=True)
        yield names
    finally:
        for name in made:
            subprocess.run(['ip', 'netns', 'delete', name], check=True)


@pytest.mark.slow
@pytest.mark.long
def test_two_hosts_train_as_one_process_does(alone, tmp_path):
    """The command of the page on several GPUs, on hosts that see each other through a cable alone."""
    with two_hosts() as hosts:
        processes = []
        for rank, host in enumerate(hosts):
            folder = tmp_path / host
            folder.mkdir()
            path = os.pathsep.join([os.path.dirname(sys.executable), os.environ['PATH']])  # to torchrun
            settings = {
                'PATH': path,
                'NNODES': '2',
                'NODE_RANK': str(rank),
                'MASTER_ADDR': '10.77.0.1',
                'PORT': '29500',
            }
            command = [ROOT / 'tools' / 'dist_train.sh', write_config(folder, PAIR), '1', '--work-dir', folder / 'run']
            processes.append(
                subprocess.Popen(
                    ['ip', 'netns', 'exec', host, *map(str, command)],
                    env={**environment(), **settings, 'GLOO_SOCKET_IFNAME': 'cable'},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        said = [process.communicate()[0] for process in processes]
        assert [process.returncode for process in processes] == [0, 0], said
    found = torch.load(tmp_path / hosts[0] / 'run' / 'iter_12.pth')['state_dict']
    torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-6)
    assert not list((tmp_path / hosts[1]).glob('run/*.pth'))


@pytest.mark.slow
@pytest.mark.long
def test_mmengines_fsdp_strategy_trains_and_resumes(alone, tmp_path):
    config = write_config(tmp_path, PAIR + SHARDED)
    together = [sys.executable, '-W', 'ignore', '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', '2']
    command = [*together, ROOT / 'tools/train.py', config, '--launcher', 'pytorch', '--work-dir', tmp_path / 'run']
    for options in (['--cfg-options', 'train_cfg.max_iters=6'], ['--resume']):
        done = subprocess.run([*map(str, command), *options], capture_output=True, text=True, env=environment())
        assert done.returncode == 0, done.stdout + done.stderr
    assert 'resumed epoch: 0, iter: 6' in done.stdout
    found = torch.load(tmp_path / 'run' / 'iter_12.pth')['state_dict']
    torch.testing.assert_close(dict(found), dict(alone), rtol=1e-4, atol=1e-6)

"""`swin-dense train` resumes a training, and reports errors."""

import re
from pathlib import Path

import pytest

from swin_dense.commands._mm import process_of
from tests.processes import cli, python
from tests.workbench.configs.data import SEGMENTOR, make_masks, written
from tests.workbench.tiny_training import TESTED, saved, write_config


def train(config, work_dir, *arguments, **options):
    return cli('train', config, '--work-dir', work_dir, *arguments, **options)


def test_a_killed_training_is_resumed(tmp_path):
    train(write_config(tmp_path), tmp_path / 'undisturbed')
    killed = write_config(tmp_path, "custom_hooks = [dict(type='Killed', at=5)]\n")
    assert train(killed, tmp_path / 'killed', check=False).returncode == -9
    assert 'iter_4.pth' in train(write_config(tmp_path), tmp_path / 'killed', '--resume').stdout
    assert saved(tmp_path / 'killed') == saved(tmp_path / 'undisturbed')


def test_runner_type_and_strategy_are_used(tmp_path):
    strategy = (
        "runner_type = 'FlexibleRunner'\nstrategy = dict(type='SingleDeviceStrategy')\ntrain_cfg['max_iters'] = 2\n"
    )
    done = train(write_config(tmp_path, strategy), tmp_path / 'run')
    assert 'FlexibleRunner' in done.stdout
    assert (tmp_path / 'run' / 'iter_2.pth').is_file()


def test_a_test_builds_and_reads_the_model_once(tmp_path):
    """mmengine's own runner, which builds and reads another, measures the same, also with the average of EMAHook."""
    config, work_dir = write_config(tmp_path, TESTED), tmp_path / 'run'
    train(config, work_dir, '--set', 'train_cfg.max_iters=2')
    given = [work_dir / 'iter_2.pth', '--work-dir', work_dir, '--set', 'resume=True']
    once = cli('test', config, *given).stdout
    twice = python('-c', TESTS_WITH_MMENGINE, config, *given[:1]).stdout
    assert once.count('a model was built') == 1
    assert [log.count('Loads checkpoint by') for log in (once, twice)] == [0, 1]
    for line in (r'a hook sees iteration 2\n', r'Load checkpoint from \S+iter_2.pth', r'guess: -?\d\.\d+'):
        assert re.findall(line, once) == re.findall(line, twice) != []


TESTS_WITH_MMENGINE = """
import sys
from mmengine.config import Config
from mmengine.runner import Runner
config = Config.fromfile(sys.argv[1])
config.work_dir, config.load_from = 'mmengine', sys.argv[2]
Runner.from_cfg(config).test()
"""


def test_an_error_during_training_shows_its_traceback_but_missing_weights_do_not(tmp_path):
    """A ValueError of a library during training is not reported as wrong usage."""
    config = write_config(tmp_path, "train_dataloader['dataset']['type'] = 'BrokenImages'\n")
    done = train(config, tmp_path / 'run', check=False)
    assert done.returncode == 1
    assert 'Traceback' in done.stderr
    assert 'an image that cannot be read' in done.stderr.splitlines()[-1]
    weights = "model['backbone']['init_cfg'] = dict(type='Pretrained', checkpoint='http://127.0.0.1:1/swin.pth')\n"
    done = train(write_config(tmp_path, weights), tmp_path / 'run', check=False)
    assert done.returncode == 1
    assert 'Traceback' not in done.stderr


def test_to_resume_without_a_last_checkpoint_is_an_error(tmp_path):
    """mmengine would start anew, with a line in its log."""
    config, run = write_config(tmp_path), tmp_path / 'run'
    done = train(config, run, '--resume', check=False)
    assert done.returncode == 2
    assert f'{run} has no file last_checkpoint, so there is no training to resume. Leave --resume out' in done.stderr
    run.mkdir()
    (run / 'last_checkpoint').write_text(f'{run}/iter_4.pth')
    done = train(config, run, '--resume', check=False)
    assert done.returncode == 2
    assert f'there is no checkpoint {run}/iter_4.pth, which {run}/last_checkpoint names' in done.stderr


COUNTS_THREADS = """
import atexit, os, torch
from mmengine.config import Config
from torch import nn
from swin_dense.workbench import training

def threads():
    return len(os.listdir('/proc/self/task'))

def train():
    training.join_processes(Config({'launcher': 'pytorch'}))
    runner = [nn.parallel.DistributedDataParallel(nn.Linear(1, 1))]
    runner.append(runner)  # a reference cycle, as runners of mmengine have
    runner[0](torch.ones(1, 1)).sum().backward()

nn.Linear(1, 1)(torch.ones(1, 1)).sum().backward()
before = threads()
atexit.register(lambda: print(during > before, threads() - before))  # runs after handlers that are registered later
train()
during = threads()
"""


@pytest.mark.skipif(not Path('/proc/self/task').is_dir(), reason='counts threads as Linux lists them')
def test_the_threads_of_a_process_group_end_before_python():
    """One that frees a tensor while Python ends aborts the process, at the end of a training that has succeeded."""
    address = {'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': '0', 'RANK': '0', 'WORLD_SIZE': '1'}
    assert python('-c', COUNTS_THREADS, **address).stdout == 'True 0\n'


@pytest.mark.slow
def test_the_first_of_several_processes_checks_the_data_and_ends_all_on_an_error(tmp_path):
    """It asks the evaluators, and takes the step before training, while the others wait."""
    written(tmp_path, '--data-root', make_masks(tmp_path / 'roads'), '--classes', 'a,b', '--iters', '2', name=SEGMENTOR)
    train = ['torch.distributed.run', '--standalone', '--nproc-per-node', '2', '-m', 'swin_dense', 'train']
    command = ['-W', 'ignore', '-m', *train, tmp_path / 'mine.py', '--launcher', 'pytorch', '--work-dir']
    done = python(*command, tmp_path / 'run')
    assert done.stderr.count('val: a perfect model would score mIoU 100.000') == 1
    assert (tmp_path / 'run/iter_2.pth').is_file()
    damage = ['--set', 'model.decode_head.loss_decode.class_weight=[1.0]']
    done = python(*command, tmp_path / 'never', *damage, status=1)
    assert done.stderr.count('swin-dense train: error:') == done.stderr.count('raises RuntimeError: weight') == 1
    assert not [*tmp_path.glob('never/*')]


@pytest.mark.parametrize(
    ('launcher', 'variables', 'process'),
    [
        ('none', {'RANK': '1', 'WORLD_SIZE': '2'}, (0, 1)),
        ('pytorch', {'RANK': '1', 'WORLD_SIZE': '2'}, (1, 2)),
        ('slurm', {'SLURM_PROCID': '3', 'SLURM_NTASKS': '4'}, (3, 4)),
        ('mpi', {'OMPI_COMM_WORLD_RANK': '5', 'OMPI_COMM_WORLD_SIZE': '8'}, (5, 8)),
    ],
)
def test_processes_are_numbered_as_their_launcher_does(monkeypatch, launcher, variables, process):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert process_of(launcher) == process

"""Training after a kill, with damaged checkpoints, on a full disk, or with a concurrent training: nothing is lost."""

import multiprocessing
import random
import re
import shutil
import signal
import zipfile

import pytest
import torch
from filelock import FileLock
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.registry import DefaultScope
from mmengine.runner import Runner

from swin_dense.checkpoint import CheckpointError
from swin_dense.workbench import training
from swin_dense.workbench.checkpoints import check_training_checkpoint, newest_checkpoint
from tests.conftest import small_disk
from tests.processes import cli
from tests.workbench.tiny_training import CASES, differences, write_config


def train(config, work_dir, *arguments, **options):
    return cli('train', config, '--work-dir', work_dir, *arguments, **options)


@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory):
    """Return the work directory of an uninterrupted training of twelve iterations."""
    folder = tmp_path_factory.mktemp('undisturbed run')
    train(write_config(folder), folder / 'run')
    return folder / 'run'


@pytest.fixture
def work_dir(undisturbed, tmp_path):
    """Return a copy of ``undisturbed`` whose last_checkpoint names the file in the copy."""
    shutil.copytree(undisturbed, tmp_path / 'run')
    (tmp_path / 'run' / 'last_checkpoint').write_text(str(tmp_path / 'run' / 'iter_12.pth'))
    return tmp_path / 'run'


def cut(path):
    path.write_bytes(path.read_bytes()[:-1000])


def flip(path):
    """Flip the bits of one byte of the largest tensor."""
    with zipfile.ZipFile(path) as archive:
        largest = max(archive.infolist(), key=lambda info: info.file_size)
    content = bytearray(path.read_bytes())
    content[largest.header_offset + largest.file_size // 2] ^= 255
    path.write_bytes(content)


def test_weights_that_cannot_be_fetched_are_an_error_without_a_traceback(tmp_path):
    weights = "model['backbone']['init_cfg'] = dict(type='Pretrained', checkpoint='http://127.0.0.1:1/swin.pth')\n"
    done = train(write_config(tmp_path, weights), tmp_path / 'run', check=False)
    assert done.returncode == 1
    assert 'cannot be fetched' in done.stderr
    assert '--set model.backbone.init_cfg.checkpoint=FILE' in done.stderr
    assert 'Traceback' not in done.stderr


@pytest.mark.parametrize(('limit', 'is_at_its_end'), [(12, True), (13, False)])
def test_resuming_a_finished_training_tells_how_to_train_longer(work_dir, tmp_path, capsys, limit, is_at_its_end):
    config = Config.fromfile(write_config(tmp_path))
    config.merge_from_dict({'work_dir': str(work_dir), 'launcher': 'none', 'train_cfg.max_iters': limit})
    with training.held_alone(config, 'auto') as resumed:
        assert resumed.load_from == str(work_dir / 'iter_12.pth')
    assert ('to train longer: --set train_cfg.max_iters=N' in capsys.readouterr().out) == is_at_its_end


@pytest.mark.parametrize('damage', [cut, flip, lambda path: path.write_bytes(b'')], ids=['cut', 'flipped', 'emptied'])
def test_a_damaged_newest_checkpoint_is_named_and_the_previous_one_is_used(work_dir, damage):
    assert newest_checkpoint(work_dir) == (work_dir / 'iter_12.pth', [])
    damage(work_dir / 'iter_12.pth')
    found, (message,) = newest_checkpoint(work_dir)
    assert found == work_dir / 'iter_10.pth'
    assert 'iter_12.pth is damaged' in message
    with pytest.raises(CheckpointError, match=r'iter_12\.pth is damaged'):
        check_training_checkpoint(work_dir / 'iter_12.pth')


def test_last_checkpoint_may_be_empty_or_outdated(work_dir):
    (work_dir / 'last_checkpoint').write_text('')
    assert newest_checkpoint(work_dir) == (work_dir / 'iter_12.pth', [f'{work_dir / "last_checkpoint"} is empty'])
    (work_dir / 'last_checkpoint').write_text('/nowhere/iter_8.pth')
    assert newest_checkpoint(work_dir) == (work_dir / 'iter_8.pth', [])  # the folder was moved
    (work_dir / 'iter_8.pth').unlink()
    found, (message,) = newest_checkpoint(work_dir)
    assert found == work_dir / 'iter_12.pth'
    assert 'names /nowhere/iter_8.pth, which does not exist' in message


def test_last_checkpoint_may_name_another_folder(tmp_path):
    work_dir = tmp_path / 'run'
    work_dir.mkdir()
    for folder in work_dir, tmp_path:
        torch.save({'meta': {'iter': 2, 'time': '20260101'}, 'message_hub': {}}, folder / 'iter_2.pth')
    (work_dir / 'last_checkpoint').write_text(str(tmp_path / 'iter_2.pth'))
    assert newest_checkpoint(work_dir) == (tmp_path / 'iter_2.pth', [])


def test_last_checkpoint_may_name_an_address(tmp_path):
    (tmp_path / 'last_checkpoint').write_text('s3://bucket/run/iter_2.pth')
    assert newest_checkpoint(tmp_path) == ('s3://bucket/run/iter_2.pth', [])


def test_without_a_complete_checkpoint_resuming_is_an_error(work_dir):
    for path in work_dir.glob('*.pth'):
        cut(path)
    with pytest.raises(CheckpointError, match=r'no checkpoint in .* is complete'):
        newest_checkpoint(work_dir)
    (work_dir / 'iter_12.pth').unlink()
    torch.save({'state_dict': {}}, work_dir / 'weights.pth')
    with pytest.raises(CheckpointError, match='no training state to resume'):
        check_training_checkpoint(work_dir / 'weights.pth')


def test_a_training_killed_in_its_first_save_starts_from_the_beginning(tmp_path):
    assert newest_checkpoint(tmp_path / 'nowhere') == (None, [])
    (tmp_path / '.unfinished-iter_2.pth').write_bytes(b'half')
    (tmp_path / 'weights.pth').write_bytes(b'of somebody')
    assert newest_checkpoint(tmp_path) == (None, [])


KILLED = "custom_hooks = [dict(type='Killed', at=10**6)]\n"


def test_killed_at_chosen_moments_a_training_ends_as_if_undisturbed(undisturbed, tmp_path):
    """Kill the training also while it writes a checkpoint, with max_keep_ckpts=1."""
    config = write_config(tmp_path, KILLED + "default_hooks['checkpoint']['max_keep_ckpts'] = 1\n")
    run = tmp_path / 'run'
    for at, where, begun, left in (
        (1, 'half', 0, ['iter_2.pth']),
        (1, 'unnamed', 2, ['iter_4.pth']),
        (2, 'named', 4, ['iter_8.pth', 'iter_10.pth']),  # last_checkpoint is not yet updated
        (2, 'iteration', 8, ['iter_10.pth']),
    ):
        hook = [f'custom_hooks.0.at={at}', f'custom_hooks.0.where={where}']
        done = train(config, run, '--resume', '--set', *hook, check=False)
        assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
        resumed = re.search(r'resumed epoch: \d+, iter: (\d+)', done.stdout)
        assert (int(resumed[1]) if resumed else 0) == begun
        assert {path.name for path in run.glob('iter_*.pth')} == {*left}
        assert newest_checkpoint(run)[0].name == left[0]
    train(config, run, '--resume')
    assert [path.name for path in run.glob('*.pth')] == ['iter_12.pth']
    assert not list(run.glob('.unfinished-*'))
    assert differences(undisturbed, run) == []


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize('case', CASES)
def test_killed_at_random_moments_a_training_ends_as_if_undisturbed(case, tmp_path):
    """Drop path, augmentations and validations are random."""
    moments = [random.randrange(30) for _ in range(3)]
    print('killed at', moments)  # pytest shows it if the test fails
    config = write_config(tmp_path, CASES[case] + KILLED)
    train(config, tmp_path / 'undisturbed')
    for moment in moments:
        done = train(config, tmp_path / 'run', '--resume', '--set', f'custom_hooks.0.at={moment}', check=False)
        assert done.returncode in (0, -signal.SIGKILL), done.stdout + done.stderr
    train(config, tmp_path / 'run', '--resume')
    assert differences(tmp_path / 'undisturbed', tmp_path / 'run') == []


def test_checkpoints_hold_the_random_state_before_a_validation(tmp_path):
    """A resumed training does not repeat the validation, which draws random numbers."""
    config = Config.fromfile(write_config(tmp_path, CASES['iterations, read by the process itself']))
    config.update(work_dir=str(tmp_path / 'run'), randomness={'seed': 0})
    config.train_cfg.update(max_iters=2, val_interval=2)
    config.default_hooks.checkpoint.type = 'WholeCheckpointHook'
    states, hook = [], Hook()
    hook.after_train_iter = lambda *_, **__: states.append(torch.get_rng_state())
    with DefaultScope.overwrite_default_scope(None):
        runner = Runner.from_cfg(config)
        runner.register_hook(hook, 'LOWEST')
        runner.train()
    paths = [tmp_path / 'run' / f'{name}.pth' for name in ('iter_1', 'iter_2', 'best_guess_iter_2')]
    first, second, best = (torch.load(path)['meta']['random_states'][0]['torch'] for path in paths)
    assert torch.equal(first, states[0])
    assert torch.equal(second, states[1])
    assert torch.equal(best, states[1])


def test_a_full_disk_is_an_error_and_keeps_the_last_checkpoint(undisturbed, tmp_path):
    size = (undisturbed / 'iter_2.pth').stat().st_size
    disk = tmp_path / 'disk'
    disk.mkdir()
    with small_disk(disk, str(int(2.7 * size))):
        done = train(write_config(tmp_path), disk / 'run', check=False)
        assert done.returncode == 1
        assert 'No space left on device' in done.stderr.splitlines()[-1]
        assert '--resume' in done.stderr.splitlines()[-1]
        newest, _ = newest_checkpoint(disk / 'run')
        assert newest == disk / 'run' / 'iter_4.pth'
        assert not list((disk / 'run').glob('.unfinished-*'))


def test_a_concurrent_training_is_refused_before_checkpoints_are_read(work_dir):
    for path in work_dir.glob('*.pth'):
        cut(path)
    with FileLock(work_dir / '.training.lock'):
        done = train(write_config(work_dir.parent), work_dir, '--resume', check=False)
    assert done.returncode == 2
    assert 'another training is writing to' in done.stderr
    done = train(write_config(work_dir.parent), work_dir, '--resume', check=False)
    assert done.returncode == 2
    assert re.search(r'no checkpoint in .* is complete', done.stderr)


def test_the_lock_of_a_work_dir_is_released(tmp_path):
    """The same process can lock it again, as in a notebook that trains several models."""
    config = Config({'work_dir': str(tmp_path / 'run')})
    for _ in range(2):
        with training.held_alone(config, None) as held:
            assert held.work_dir == config.work_dir
            with pytest.raises(ValueError, match='another training'), training.held_alone(config, None):
                pass
    with FileLock(tmp_path / 'run' / '.training.lock', timeout=0):
        pass


def test_a_given_checkpoint_is_resumed_with_its_seed(tmp_path):
    path, config = tmp_path / 'iter_2.pth', Config({'work_dir': str(tmp_path / 'run')})
    torch.save({'meta': {'iter': 2, 'seed': 7}, 'message_hub': {}}, path)
    with training.held_alone(config, str(path)) as held:
        assert (held.resume, held.load_from, held.randomness.seed) == (True, str(path), 7)
    with pytest.raises(FileNotFoundError, match='no checkpoint'), training.held_alone(config, 'gone.pth'):
        pass


def test_an_explicitly_given_damaged_checkpoint_is_refused(work_dir):
    cut(work_dir / 'iter_10.pth')
    config = write_config(work_dir.parent)
    resumed = train(config, work_dir, '--resume', work_dir / 'iter_10.pth', check=False)
    assert resumed.returncode == 2
    assert re.search(r'iter_10\.pth is damaged.*--resume without a file', resumed.stderr)


@pytest.mark.parametrize('has_checkpoint', [True, False])
def test_rank_0_chooses_the_checkpoint_for_all_ranks(work_dir, has_checkpoint):
    """Rank 1 has a work directory without a checkpoint; if rank 0 fails, rank 1 raises the same error."""
    if not has_checkpoint:
        for path in work_dir.glob('*.pth'):
            cut(path)
    context = multiprocessing.get_context('forkserver')
    here = work_dir.parent
    folders = (work_dir, here / 'empty')
    processes = [context.Process(target=_hold, args=(rank, here, folder)) for rank, folder in enumerate(folders)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    first, second = ((here / f'{rank}.txt').read_text() for rank in range(2))
    assert first == second
    assert f'True, {work_dir / "iter_12.pth"}, seed 0' == first if has_checkpoint else 'is complete' in first
    assert not folders[1].exists()


def _hold(rank, here, work_dir):
    torch.distributed.init_process_group('gloo', init_method=f'file://{here}/store', rank=rank, world_size=2)
    try:
        with training.held_alone(Config({'work_dir': str(work_dir), 'randomness': {}}), 'auto') as config:
            outcome = f'{config.resume}, {config.load_from}, seed {config.randomness.seed}'
    except CheckpointError as error:
        outcome = str(error)
    (here / f'{rank}.txt').write_text(outcome)
    torch.distributed.destroy_process_group()


def test_runner_type_and_strategy_are_used(tmp_path):
    strategy = (
        "runner_type = 'FlexibleRunner'\nstrategy = dict(type='SingleDeviceStrategy')\ntrain_cfg['max_iters'] = 2\n"
    )
    done = train(write_config(tmp_path, strategy), tmp_path / 'run')
    assert 'FlexibleRunner' in done.stdout
    assert (tmp_path / 'run' / 'iter_2.pth').is_file()


def test_an_error_during_training_shows_its_traceback(tmp_path):
    """A ValueError of a library during training is not reported as wrong usage."""
    config = write_config(tmp_path, "train_dataloader['dataset']['type'] = 'BrokenImages'\n")
    done = train(config, tmp_path / 'run', check=False)
    assert done.returncode == 1
    assert 'Traceback' in done.stderr
    assert 'an image that cannot be read' in done.stderr.splitlines()[-1]

"""Trainings that are killed, find their checkpoints damaged, run out of disk, or meet another: nothing is lost."""

import random
import re
import shutil
import signal
import subprocess
import time
import zipfile

import pytest
import torch

import swin_dense  # noqa: F401  its import lets torch.load read the checkpoints of mmengine
from swin_dense.checkpoint import CheckpointError
from swin_dense.mm.checkpoints import check_training_checkpoint, newest_checkpoint
from tests.conftest import small_disk
from tests.tools.killed_training import CASES, differences, span_of, train_until_done
from tests.tools.test_runners import command_of, environment, train
from tests.tools.tiny_training import write_config


@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory):
    """Return the folder of a training of twelve iterations that nothing happened to."""
    folder = tmp_path_factory.mktemp('undisturbed run')
    train(write_config(folder), '--work-dir', folder / 'run')
    return folder / 'run'


@pytest.fixture
def work_dir(undisturbed, tmp_path):
    """Return a copy of it, with last_checkpoint naming the file in the copy."""
    shutil.copytree(undisturbed, tmp_path / 'run')
    (tmp_path / 'run' / 'last_checkpoint').write_text(str(tmp_path / 'run' / 'iter_12.pth'))
    return tmp_path / 'run'


def cut(path):
    path.write_bytes(path.read_bytes()[:-1000])


def flip(path):
    """Change a byte of a weight."""
    with zipfile.ZipFile(path) as archive:
        largest = max(archive.infolist(), key=lambda info: info.file_size)
    content = bytearray(path.read_bytes())
    content[largest.header_offset + largest.file_size // 2] ^= 255
    path.write_bytes(content)


@pytest.mark.parametrize('damage', [cut, flip, lambda path: path.write_bytes(b'')], ids=['cut', 'flipped', 'emptied'])
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(work_dir, damage):
    assert newest_checkpoint(work_dir) == (work_dir / 'iter_12.pth', [])
    damage(work_dir / 'iter_12.pth')
    found, (message,) = newest_checkpoint(work_dir)
    assert found == work_dir / 'iter_10.pth'
    assert 'iter_12.pth is damaged' in message
    with pytest.raises(CheckpointError, match=r'iter_12\.pth is damaged'):
        check_training_checkpoint(work_dir / 'iter_12.pth')


def test_last_checkpoint_may_be_empty_or_name_what_is_gone(work_dir):
    (work_dir / 'last_checkpoint').write_text('')
    assert newest_checkpoint(work_dir) == (work_dir / 'iter_12.pth', [f'{work_dir / "last_checkpoint"} is empty'])
    (work_dir / 'last_checkpoint').write_text('/nowhere/iter_8.pth')
    assert newest_checkpoint(work_dir) == (work_dir / 'iter_8.pth', [])  # the folder was moved
    (work_dir / 'iter_8.pth').unlink()
    found, (message,) = newest_checkpoint(work_dir)
    assert found == work_dir / 'iter_12.pth'
    assert 'names /nowhere/iter_8.pth, which is not there' in message


def test_where_no_checkpoint_is_whole_nothing_starts_anew(work_dir):
    for path in work_dir.glob('*.pth'):
        cut(path)
    with pytest.raises(CheckpointError, match=r'no checkpoint in .* is whole'):
        newest_checkpoint(work_dir)
    (work_dir / 'iter_12.pth').unlink()
    torch.save({'state_dict': {}}, work_dir / 'weights.pth')
    with pytest.raises(CheckpointError, match='no state of a training to resume'):
        check_training_checkpoint(work_dir / 'weights.pth')


def test_a_training_that_was_killed_in_its_first_save_starts_anew(tmp_path):
    assert newest_checkpoint(tmp_path / 'nowhere') == (None, [])
    (tmp_path / '.unfinished-iter_2.pth').write_bytes(b'half')
    (tmp_path / 'weights.pth').write_bytes(b'of somebody')
    assert newest_checkpoint(tmp_path) == (None, [])


@pytest.mark.slow
def test_killed_anywhere_it_ends_as_if_undisturbed(undisturbed, tmp_path):
    """Killed with SIGKILL, also while a checkpoint is written, with one checkpoint kept, a training loses nothing."""
    config = write_config(tmp_path, "default_hooks['checkpoint']['max_keep_ckpts'] = 1\n")
    run = tmp_path / 'run'
    begun = 0
    # The first two are killed in a save, as soon as its file is there unfinished; the third after an iteration.
    for wanted in ('.unfinished-iter_4.pth', '.unfinished-iter_8.pth', 'iter_10.pth'):
        process = subprocess.Popen(
            command_of(config, '--work-dir', run, '--resume'), stdout=subprocess.PIPE, text=True, env=environment()
        )
        while not (run / wanted).exists() and process.poll() is None:
            time.sleep(0.0002)
        process.send_signal(signal.SIGKILL)
        said = process.communicate()[0]
        resumed = re.search(r'resumed epoch: \d+, iter: (\d+)', said)
        assert (int(resumed[1]) if resumed else 0) == begun
        newest, _ = newest_checkpoint(run)
        assert newest is not None, f'after the kill at {wanted} no whole checkpoint was left'
        begun = int(re.search(r'\d+', newest.name)[0])
    assert begun >= 8
    train(config, '--work-dir', run, '--resume')
    assert [path.name for path in run.glob('*.pth')] == ['iter_12.pth']
    expected, found = (torch.load(folder / 'iter_12.pth') for folder in (undisturbed, run))
    for name, tensor in expected['state_dict'].items():
        assert torch.equal(found['state_dict'][name], tensor), name
    for index, state in expected['optimizer']['state'].items():
        assert all(torch.equal(found['optimizer']['state'][index][key], value) for key, value in state.items())


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize('case', CASES)
def test_killed_at_random_it_ends_as_if_undisturbed(case, tmp_path):
    """With drop path, augmentations and validations, which all draw. More often: benchmarks/killed_trainings.py."""
    seed = random.randrange(2**32)
    print('random.Random of', seed)  # shown where the test fails
    config = write_config(tmp_path, CASES[case])
    train(config, '--work-dir', tmp_path / 'undisturbed')
    (tmp_path / 'killed').mkdir()
    run = tmp_path / 'killed' / 'run'
    counts = train_until_done(config, run, 2, span_of(tmp_path / 'undisturbed'), random.Random(seed))
    print(counts)
    assert differences(tmp_path / 'undisturbed', run) == []


def test_a_full_disk_ends_it_with_a_message_and_the_last_checkpoint(undisturbed, tmp_path):
    size = (undisturbed / 'iter_2.pth').stat().st_size
    disk = tmp_path / 'disk'
    disk.mkdir()
    with small_disk(disk, str(int(2.7 * size))):
        done = train(write_config(tmp_path), '--work-dir', disk / 'run', check=False)
        assert done.returncode == 1
        assert 'No space left on device' in done.stderr.splitlines()[-1]
        assert '--resume' in done.stderr.splitlines()[-1]
        newest, _ = newest_checkpoint(disk / 'run')
        assert newest == disk / 'run' / 'iter_4.pth'
        assert not list((disk / 'run').glob('.unfinished-*'))


def test_a_second_training_in_a_work_dir_and_a_damaged_file_given_by_name_are_refused(work_dir):
    config = write_config(work_dir.parent, "train_cfg['max_iters'] = 100000\n")
    first = subprocess.Popen(command_of(config, '--work-dir', work_dir), stdout=subprocess.DEVNULL, env=environment())
    while not list(work_dir.glob('iter_1[468].pth')) and first.poll() is None:
        time.sleep(0.05)
    try:
        second = train(config, '--work-dir', work_dir, check=False)
    finally:
        first.kill()
        first.wait()
    assert second.returncode == 2
    assert 'another training is writing into' in second.stderr
    cut(work_dir / 'iter_10.pth')
    resumed = train(config, '--work-dir', work_dir, '--resume', work_dir / 'iter_10.pth', check=False)
    assert resumed.returncode == 2
    assert re.search(r'iter_10\.pth is damaged.*--resume without a file', resumed.stderr)

"""The runner that a config asks for is the runner that tools/train.py builds."""

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.tools.tiny_training import write_config


def command_of(*arguments):
    """Return the command line of a training."""
    return [sys.executable, '-W', 'ignore', *map(str, (ROOT / 'tools' / 'train.py', *arguments))]


def environment():
    """Return what a training needs to find the tests' modules and to share the machine."""
    return {**os.environ, 'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1'}


def train(*arguments, check=True):
    """Train as a user does."""
    done = subprocess.run(command_of(*arguments), capture_output=True, text=True, env=environment())
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def test_runner_type_and_strategy_are_heard(tmp_path):
    strategy = (
        "runner_type = 'FlexibleRunner'\nstrategy = dict(type='SingleDeviceStrategy')\ntrain_cfg['max_iters'] = 2\n"
    )
    done = train(write_config(tmp_path, strategy), '--work-dir', tmp_path / 'run')
    assert 'FlexibleRunner' in done.stdout
    assert (tmp_path / 'run' / 'iter_2.pth').is_file()


@pytest.mark.parametrize(
    ('lines', 'words'),
    [
        ("strategy = dict(type='DDPStrategy')\n", "add runner_type='FlexibleRunner'"),
        ("runner_type = 'Walker'\n", "no runner_type 'Walker'"),
    ],
)
def test_a_runner_that_nobody_would_get_is_refused(tmp_path, lines, words):
    done = train(write_config(tmp_path, lines), check=False)
    assert done.returncode == 2
    assert words in done.stderr

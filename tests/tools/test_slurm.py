"""tools/slurm_train.sh and slurm_test.sh: their arguments to srun, which a stand-in prints."""

import os

import pytest

from tests.conftest import ROOT
from tests.processes import completed


@pytest.mark.parametrize(
    ('script', 'tool', 'last', 'expected'),
    [
        ('slurm_train.sh', 'train.py', 'work dir', ['my config.py', '--work-dir', 'work dir']),
        ('slurm_test.sh', 'test.py', 'a b.pth', ['my config.py', 'a b.pth']),
    ],
)
def test_options_and_command_passed_to_srun(tmp_path, script, tool, last, expected):
    srun = tmp_path / 'srun'
    srun.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    srun.chmod(0o755)
    variables = {'GPUS': '16', 'GPUS_PER_NODE': '4', 'SRUN_ARGS': '--time=1:00 --quiet'}
    environment = {'PATH': f'{tmp_path}:{os.environ["PATH"]}', **variables}
    command = [ROOT / 'tools' / script, 'gpu', 'my job', 'my config.py', last, '--cfg-options', 'a=b c']
    lines = completed(command, env=environment).stdout.splitlines()
    assert {'--partition=gpu', '--job-name=my job', '--gres=gpu:4', '--ntasks=16', '--ntasks-per-node=4'} <= set(lines)
    assert {'--time=1:00', '--quiet'} <= set(lines)
    command = lines[lines.index(str(ROOT / 'tools' / tool)) + 1 :]
    assert command == [*expected, '--launcher', 'slurm', '--cfg-options', 'a=b c']

"""tools/slurm_train.sh and slurm_test.sh: their arguments to srun, which a stand-in prints."""

import os
import subprocess

import pytest

from tests.conftest import ROOT


@pytest.fixture
def run(tmp_path):
    srun = tmp_path / 'srun'
    srun.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    srun.chmod(0o755)

    def call(script, *arguments, **variables):
        environment = {'PATH': f'{tmp_path}:{os.environ["PATH"]}', **variables}
        return subprocess.run(
            [ROOT / 'tools' / script, *arguments],
            env=environment,
            capture_output=True,
            text=True,
        )

    return call


@pytest.mark.parametrize(
    ('script', 'tool', 'last', 'expected'),
    [
        ('slurm_train.sh', 'train.py', 'work dir', ['my config.py', '--work-dir', 'work dir']),
        ('slurm_test.sh', 'test.py', 'a b.pth', ['my config.py', 'a b.pth']),
    ],
)
def test_options_and_command_passed_to_srun(run, script, tool, last, expected):
    variables = {'GPUS': '16', 'GPUS_PER_NODE': '4', 'SRUN_ARGS': '--time=1:00 --quiet'}
    done = run(script, 'gpu', 'my job', 'my config.py', last, '--cfg-options', 'a=b c', **variables)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert {'--partition=gpu', '--job-name=my job', '--gres=gpu:4', '--ntasks=16', '--ntasks-per-node=4'} <= set(lines)
    assert {'--time=1:00', '--quiet'} <= set(lines)
    command = lines[lines.index(str(ROOT / 'tools' / tool)) + 1 :]
    assert command == [*expected, '--launcher', 'slurm', '--cfg-options', 'a=b c']


def test_missing_arguments_print_the_usage(run):
    done = run('slurm_train.sh', 'gpu', 'job', 'config.py')
    assert done.returncode != 0
    assert 'usage: tools/slurm_train.sh PARTITION JOB_NAME CONFIG WORK_DIR' in done.stderr

"""Run `swin-dense` in forked processes whose imports are preloaded, so that they start at once."""

import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

from tests.conftest import ROOT, quick_configs

_CONTEXT = multiprocessing.get_context('forkserver')
_CONTEXT.set_forkserver_preload(
    [
        'tests.processes',
        'swin_dense.__main__',
        'swin_dense.workbench.training',
        'swin_dense.workbench.configs.checking',
        'mmdet.apis',
        'mmseg.apis',
    ]
)


def cli(*arguments, check=True, cwd=ROOT):
    """Run the command line; return its exit status, stdout and stderr."""
    (done,) = _run(arguments, cwd, [{}])
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def cli_of_two_ranks(*arguments):
    """Run the command line in two processes, with the variables that torchrun sets; return what the first one did."""
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        shared = {'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(free.getsockname()[1]), 'WORLD_SIZE': '2'}
    done = _run(arguments, ROOT, [{**shared, 'RANK': rank, 'LOCAL_RANK': rank} for rank in '01'])
    assert [one.returncode for one in done] == [0, 0], ''.join(one.stdout + one.stderr for one in done)
    return done[0]


def _run(arguments, cwd, environments):
    """Run the command line once with each of the sets of environment variables, all at the same time."""
    with tempfile.TemporaryDirectory() as folder:
        files = [(Path(folder, f'out{index}'), Path(folder, f'err{index}')) for index in range(len(environments))]
        processes = [
            _CONTEXT.Process(target=_main, args=([*map(str, arguments)], *pair, cwd, variables))
            for pair, variables in zip(files, environments, strict=True)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        return [
            subprocess.CompletedProcess(arguments, process.exitcode, out.read_text(), err.read_text())
            for process, (out, err) in zip(processes, files, strict=True)
        ]


def _main(arguments, out, err, cwd, variables):
    os.environ.update(variables)
    for path, stream in ((out, sys.stdout), (err, sys.stderr)):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY), stream.fileno())
        stream.reconfigure(line_buffering=True)
    os.chdir(cwd)
    sys.path.insert(0, str(ROOT))
    warnings.simplefilter('ignore')
    from swin_dense.__main__ import main

    with quick_configs():
        sys.exit(main(arguments))


def python(*arguments, status=0, cwd=ROOT, **variables):
    """Run Python in a process of its own, expect an exit status, and return what it did."""
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, env={**environment(), **variables}, capture_output=True, text=True)
    assert done.returncode == status, done.stdout[-5000:] + done.stderr[-5000:]
    return done


def without(packages, *arguments, **options):
    """Run the command line as :func:`python` does, where some packages cannot be imported."""
    code = f'import sys; sys.modules.update(dict.fromkeys({[*packages]})); from swin_dense.__main__ import main; '
    return python('-c', f'{code} sys.exit(main(sys.argv[1:]))', *arguments, **options)


def environment():
    """Return environment variables with which a program can import this package and the tests, on one thread."""
    return {**os.environ, 'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1'}

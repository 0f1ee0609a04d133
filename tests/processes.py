"""Run `swin-dense` in forked processes whose imports are preloaded, so that they start at once."""

import multiprocessing
import os
import shutil
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
        'swin_dense.commands._main',
        'swin_dense.workbench.training',
        'swin_dense.workbench.checking.data',
        'mmdet.apis',
        'mmseg.apis',
    ]
)


def cli(*arguments, check=True, cwd=None, first=None):
    """Run the command line; return its exit status, stdout and stderr.

    ``first`` is a function that the process imports, and calls before the command.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, 'out'), Path(folder, 'err')
        process = _CONTEXT.Process(target=_main, args=([*map(str, arguments)], out, err, cwd or os.getcwd(), first))
        process.start()
        process.join()
        done = subprocess.CompletedProcess(
            arguments,
            process.exitcode,
            out.read_text(),
            err.read_text(),
        )
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def _main(arguments, out, err, cwd, first):
    for path, stream in ((out, sys.stdout), (err, sys.stderr)):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY), stream.fileno())
        stream.reconfigure(line_buffering=True)
    os.chdir(cwd)
    sys.path.insert(0, str(ROOT))
    warnings.simplefilter('ignore')
    from swin_dense.commands._main import main

    if first is not None:
        first()
    with quick_configs():
        sys.exit(main(arguments))


def completed(command, status=0, **options):
    """Run a program, expect an exit status, and return its output."""
    command = [*map(str, command)]
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == status, f'{" ".join(command)}\n{done.stdout[-5000:]}{done.stderr[-5000:]}'
    return done


def python(*arguments, status=0, cwd=None, **variables):
    """Run Python in a process of its own, expect an exit status, and return its output."""
    return completed([sys.executable, *arguments], status, cwd=cwd, env={**environment(), **variables})


def without(packages, *arguments, **options):
    """Run the command line as :func:`python` does, where some packages cannot be imported."""
    code = f'import sys; sys.modules.update(dict.fromkeys({[*packages]})); from swin_dense.commands._main import main; '
    return python('-c', f'{code} sys.exit(main(sys.argv[1:]))', *arguments, **options)


def environment():
    """Return environment variables with which a program can import this package and the tests, on one thread."""
    return {**os.environ, 'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1'}


def copy_clone(folder, without=()):
    """Copy all files that git does not ignore into a folder, but for those whose path begins with certain words."""
    listed = subprocess.run(['git', 'ls-files', '-z', '-co', '--exclude-standard'], cwd=ROOT, capture_output=True)
    assert listed.returncode == 0, listed.stderr
    for name in listed.stdout.decode().split('\0'):
        if name and (ROOT / name).is_file() and not name.startswith(tuple(without)):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def write_command(folder):
    """Write `swin-dense` of this package as a program in a folder, and return the folder."""
    folder.mkdir()
    command = folder / 'swin-dense'
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -W ignore -m swin_dense "$@"\n')
    command.chmod(0o755)
    return folder

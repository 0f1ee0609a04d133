"""mmcv from source: no wheel of it exists for the torch used here, so it is compiled, once per torch and machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kinds import ROOT
from machine import Unfit, compile_jobs, has_gpu, nvcc_version
from packages import Pip
from precompiled import header_compiled_once

# Measured: 77 files of C++ with gcc 12 and torch 2.13. Where the compiler does not take their header compiled: 36.
CPU_MINUTES = 8
# Where an installed wheel came from is recorded by pip, with the folder in its address.
ORIGIN = """
import importlib.metadata, mmcv.ops
print(importlib.metadata.distribution('mmcv').read_text('direct_url.json') or '{}')
"""


@dataclass(frozen=True)
class Build:
    """One way to compile mmcv.

    Attributes:
        key: names the folder of the wheel: the Python, the torch and the CUDA compiler that it is made with
        cuda: whether its operators are to run on a GPU too
        reason: why, or why not
    """

    key: str
    cuda: bool
    reason: str


def plan(torch: str, cuda: str | None) -> Build:
    """Decide how to compile.

    Args:
        torch: its version
        cuda: the 'major.minor' of CUDA that it was built with, None for a build without
    """
    nvcc, forced = nvcc_version(), os.environ.get('FORCE_CUDA') == '1'
    if not (has_gpu() or forced):
        wanted, reason = False, 'no GPU here'
    elif cuda is None:
        wanted, reason = False, f'torch {torch} is a build for CPUs, and does not use the GPU either'
    elif nvcc is None:
        wanted, reason = False, f'a GPU, but no nvcc: install CUDA {cuda}, then rm -r .venv and set up again'
    elif nvcc.split('.')[0] != cuda.split('.')[0]:
        wanted = False
        reason = f'torch {torch} is for CUDA {cuda} and nvcc is {nvcc}, which do not go together: install CUDA {cuda}'
    else:
        wanted, reason = True, f'torch {torch} for CUDA {cuda}, nvcc {nvcc}'
    python = f'cp{sys.version_info[0]}{sys.version_info[1]}'
    return Build(f'{python}-torch-{torch}-' + (f'cuda-{nvcc}' if wanted else 'cpu'), wanted, reason)


def wheel_folder(requirement: str, build: Build) -> Path:
    cache = Path(os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache')
    return cache / 'swin_dense' / requirement.replace('==', '-') / build.key


def finished_wheel(requirement: str, build: Build) -> Path | None:
    return next(wheel_folder(requirement, build).glob('*.whl'), None)


def in_place(pip: Pip, requirement: str, build: Build) -> bool:
    """Whether the environment holds this mmcv, working, and compiled in this way if set-up compiled it."""
    if f'mmcv=={pip.installed().get("mmcv")}' != requirement:
        return False
    asked = subprocess.run([pip.python, '-c', ORIGIN], capture_output=True, text=True)
    if asked.returncode:
        return False
    origin = json.loads(asked.stdout.splitlines()[-1]).get('url')
    return origin is None or build.key in origin.replace('%2B', '+')


def fetch_source(pip: Pip, requirement: str, folder: Path) -> Path:
    """Return the unpacked source, downloaded unless it is there, such that every Python can build it.

    It stays with the environment, so that a compile that was interrupted goes on with the files that are missing.
    """
    source = folder / requirement.replace('==', '-')
    if source.exists():
        return source
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        # Preparing its metadata fails on Python 3.13, see below, and that comes after unpacking.
        pip_arguments = ['--no-clean', '--no-deps', '--no-binary', 'mmcv', '--dest', scratch, requirement]
        pip_arguments += ['--build-constraint', str(ROOT / 'requirements/torch.txt')]
        done = subprocess.run(
            [str(pip.python), '-m', 'pip', 'download', *pip_arguments],
            env={**os.environ, 'TMPDIR': scratch},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        setup = next(Path(scratch).glob('*/mmcv_*/setup.py'), None)
        if setup is None:
            raise Unfit(f'{done.stdout}\n{requirement} could not be downloaded, pip says why above')
        # It reads its version from locals() after an exec(), which Python 3.13 no longer fills.
        text = setup.read_text()
        text = text.replace("version_file, 'exec'))\n", "version_file, 'exec'), globals())\n")
        setup.write_text(text.replace("return locals()['__version__']", "return globals()['__version__']"))
        setup.parent.rename(source)
    return source


def compile_wheel(pip: Pip, requirement: str, build: Build, source: Path) -> Path:
    """Return the wheel, compiled unless it is there.

    Where its operators for GPUs do not compile, those for CPUs still make a wheel, and a line says so.
    """
    folder = wheel_folder(requirement, build)
    folder.mkdir(parents=True, exist_ok=True)
    for cuda in (True, False) if build.cuda else (False,):
        # Without, a GPU has to be hidden as well: mmcv would look for nvcc where torch sees one.
        env = {'FORCE_CUDA': '1'} if cuda else {'FORCE_CUDA': '0', 'CUDA_VISIBLE_DEVICES': ''}
        env |= {'MMCV_WITH_OPS': '1', 'MAX_JOBS': str(compile_jobs())}
        key = f'{build.key}, CUDA {"on" if cuda else "off"}'
        with tempfile.TemporaryDirectory(dir=folder) as scratch, progress(source):
            options = ['-qq', '--no-deps', '--no-build-isolation', '--wheel-dir', scratch]
            try:
                with header_compiled_once(source, key):
                    pip.run('wheel', *options, source, env=env)
            except Unfit:
                if not cuda:
                    raise
                print(f'The operators of {requirement} for GPUs do not compile ({build.reason}); going on without.')
                continue
            made = next(Path(scratch).glob('*.whl'))
            return made.replace(folder / made.name)
    raise AssertionError('the last way to compile raises')


@contextmanager
def progress(source: Path) -> Iterator[None]:
    """Say every minute how many files are compiled."""
    finished = threading.Event()

    def watch() -> None:
        while not finished.wait(60):
            for steps in source.glob('build/temp*/build.ninja'):
                total = sum(line.startswith('build /') for line in steps.read_text().splitlines())
                print(f'   {len(list(steps.parent.rglob("*.o")))} of {total} files compiled', flush=True)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        finished.set()

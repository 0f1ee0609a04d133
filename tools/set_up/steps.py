"""The steps of a set-up: look at the machine, resolve everything, only then download, and compile last."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import machine
import mmcv_build
from kinds import ROOT, Kind, pinned
from machine import Unfit
from packages import Pip, cuda_of, is_triton

# Gigabytes of torch 2.13 with all that it requires and triton: (installed, downloaded).
TORCH_SIZES = {'cuda': (4.9, 2.8), 'cpu': (1.6, 0.4)}
# The minutes that a set-up takes without compiling, on a fast and on a slow connection.
MINUTES = '2 to 15 minutes'


def set_up(kind: Kind, folder: Path) -> None:
    requirements = kind.requirements()
    mmcv = pinned(requirements, 'mmcv')
    machine.check_python(*kind.pythons)
    machine.check_environment(folder)
    if mmcv:
        machine.check_compiler()
    pip = Pip(folder / 'bin/python')
    has_torch = any(folder.glob('lib/python*/site-packages/torch/version.py'))
    check_space(kind, folder, None if has_torch else 'cpu')

    folder.mkdir(parents=True, exist_ok=True)
    with lock(folder / 'set-up.lock'):
        say(f'1/4 Resolving the requirements of {folder}: seconds, nothing big is downloaded yet')
        make_environment(pip, folder, pinned(requirements, 'pip'))
        requirements = keep_torch(pip, folder, requirements)
        others = [line for line in requirements if line != mmcv]
        source = [mmcv_build.fetch_source(pip, mmcv, folder / 'src')] if mmcv else []
        found = pip.resolve(*others, *source)
        versions = {**pip.installed(), **{name: entry['version'] for name, entry in found.items()}}
        torch, cuda = versions['torch'], cuda_of(versions)
        build_of_torch = 'kept' if 'torch' not in found else f'for CUDA {cuda}' if cuda else 'for CPUs'
        print(f'   torch {torch}, {build_of_torch}; {len(found)} packages to install')
        if kind.triton and not brings_triton(pip, found):
            others += add_triton(pip, torch)
        if kind.no_deps:
            pip.resolve('--no-deps', *kind.requirements_without_deps())
        build = mmcv_build.plan(torch, cuda) if mmcv else None
        if mmcv and build:
            print(f'   {mmcv} {"with" if build.cuda else "without"} operators for GPUs: {build.reason}')
        check_space(kind, folder, None if has_torch else 'cuda' if cuda else 'cpu')

        say(f'2/4 Downloading and installing: {MINUTES}')
        pip.run('install', '-q', *others)
        if kind.no_deps:
            pip.run('install', '-q', '--no-deps', *kind.requirements_without_deps())
        if mmcv and build:
            install_mmcv(pip, mmcv, build, source[0])
        say('4/4 swin_dense itself')
        pip.run('install', '-qq', '--no-build-isolation', '--no-deps', '--editable', ROOT)
        # yapf, which mmengine imports, writes its cache in place when it is first imported: of the processes of a first
        # training, one would read what another has half written.
        subprocess.run([pip.python, '-c', 'import yapf.yapflib.yapf_api'], stderr=subprocess.DEVNULL)


def say(line: str) -> None:
    print(f'\n== {line}', flush=True)


def check_space(kind: Kind, folder: Path, torch: str | None) -> None:
    """Check the disks, for one of the builds of torch, or for none where it is there."""
    installed, downloaded = TORCH_SIZES[torch] if torch else (0.0, 0.0)
    # What is downloaded lies in the scratch folder until it is installed, and in pip's cache.
    cache = Path.home() / '.cache'
    machine.check_space(
        {
            folder: installed + kind.gigabytes,
            machine.scratch_folder(): downloaded + 0.3,
            cache: downloaded + 0.3,
        }
    )


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """Wait for another set-up of the same thing."""
    with path.open('w') as file:
        os.set_inheritable(file.fileno(), True)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            print(f'Waiting for another set-up, which holds {path}', flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def make_environment(pip: Pip, folder: Path, pinned_pip: str | None) -> None:
    """Make the environment, or complete it, with a pip that resolves without downloading."""
    has_pip = pip.python.exists() and not subprocess.run([pip.python, '-c', 'import pip']).returncode
    if not has_pip and subprocess.run([sys.executable, '-m', 'venv', folder]).returncode:
        raise Unfit(f'{sys.executable} could not make the environment {folder}, it says why above')
    if pinned_pip:
        pip.run('install', '-q', pinned_pip)


def keep_torch(pip: Pip, folder: Path, requirements: list[str]) -> list[str]:
    """Return the requirements with the torch that is installed in place of the pinned one."""
    version = pip.installed().get('torch')
    if version is None:
        return requirements
    oldest = re.findall(r'"torch>=([\d.]+)"', (ROOT / 'pyproject.toml').read_text())[0]
    if numbers(version) < numbers(oldest):
        raise Unfit(
            f'torch {version} in {folder} is older than {oldest}, the oldest supported: '
            f'{pip.python} -m pip uninstall torch, and the set-up installs another'
        )
    return [f'torch=={version}' if line.startswith('torch==') else line for line in requirements]


def numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r'\d+', version.split('+')[0])[:3]]


def brings_triton(pip: Pip, found: dict[str, dict]) -> bool:
    """Whether torch, installed or found, requires triton itself."""
    if 'torch' in found:
        requires = found['torch'].get('requires_dist', [])
    else:
        command = [str(pip.python), '-c', 'import importlib.metadata as m; print(*m.requires("torch"), sep="\\n")']
        requires = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return any(map(is_triton, requires))


def add_triton(pip: Pip, torch: str) -> list[str]:
    """Return the triton that goes with a torch that brings none, as requirements."""
    triton = pip.triton_for(torch)
    if triton is None:
        print(f'   No triton is published for torch {torch}: the tests of its kernels will be skipped')
        return []
    pip.resolve('--no-deps', triton)
    print(f'   torch brings no triton; with it goes {triton.split(";")[0]}')
    return [triton]


def install_mmcv(pip: Pip, mmcv: str, build: mmcv_build.Build, source: Path) -> None:
    if mmcv_build.in_place(pip, mmcv, build):
        say(f'3/4 {mmcv} is there')
        return
    folder = mmcv_build.wheel_folder(mmcv, build)
    folder.mkdir(parents=True, exist_ok=True)
    with lock(folder / 'lock'):
        wheel = mmcv_build.finished_wheel(mmcv, build)
        if wheel:
            say(f'3/4 {mmcv}, compiled before: {wheel}')
        else:
            jobs = machine.compile_jobs()
            minutes = mmcv_build.CPU_MINUTES / min(jobs, machine.cores())
            say(f'3/4 Compiling {mmcv}, once on this machine: about {minutes:.0f} minutes, {jobs} files at a time')
            wheel = mmcv_build.compile_wheel(pip, mmcv, build, source)
        pip.run('install', '-q', '--no-deps', '--force-reinstall', wheel)

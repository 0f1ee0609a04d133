"""What a machine must have, looked at before anything is downloaded."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path


class Unfit(Exception):
    """One line: what is wrong or missing, and the cure."""


def check_python(oldest: tuple[int, int], newest: tuple[int, int]) -> None:
    """Refuse a Python that is too old or cannot make environments; a newer one than was tried gets a warning."""
    here, shortest = sys.version_info[:2], '.'.join(map(str, oldest))
    name = f'python{here[0]}.{here[1]}'
    if here < oldest:
        raise Unfit(
            f'{sys.executable} is Python {here[0]}.{here[1]}, {shortest} or newer needed: make PYTHON=python3.12'
        )
    if here > newest:
        print(f'Python {here[0]}.{here[1]} has not been tried, {newest[0]}.{newest[1]} is the newest that has.')
    if not (importlib.util.find_spec('venv') and importlib.util.find_spec('ensurepip')):
        raise Unfit(f'{sys.executable} cannot make virtual environments: apt install {name}-venv')


def check_environment(venv: Path) -> None:
    """Refuse a folder whose Python is another than this one, or does not run."""
    if not (venv / 'bin').exists():
        return
    command = [str(venv / 'bin/python'), '-c', 'import sys; print("%d.%d" % sys.version_info[:2])']
    try:
        there = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        raise Unfit(f'{venv} is damaged, its Python does not run: rm -r {shlex.quote(str(venv))}') from None
    here = '.'.join(map(str, sys.version_info[:2]))
    if there != here:
        raise Unfit(
            f'{venv} is of Python {there} and {sys.executable} is {here}: rm -r {shlex.quote(str(venv))}, '
            f'or make PYTHON=python{there}'
        )


def check_compiler() -> None:
    """Refuse a machine without a C++17 compiler, or without the headers of this Python."""
    compiler = shlex.split(os.environ.get('CXX', 'c++'))
    if shutil.which(compiler[0]) is None:
        raise Unfit(f'mmcv is compiled here, and there is no C++ compiler {compiler[0]!r}: apt install g++')
    headers = sysconfig.get_paths()['include']
    if not Path(headers, 'Python.h').exists():
        version = '.'.join(map(str, sys.version_info[:2]))
        raise Unfit(f'mmcv is compiled here, and {headers}/Python.h is missing: apt install python{version}-dev')
    source = '#include <Python.h>\n#include <optional>\nstd::optional<int> number;\n'
    command = [*compiler, '-std=c++17', '-fsyntax-only', '-I', headers, '-x', 'c++', '-']
    done = subprocess.run(command, input=source, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        error = next((line for line in done.stdout.splitlines() if 'error' in line), f'status {done.returncode}')
        raise Unfit(f'{compiler[0]} does not compile C++17 with {headers}/Python.h ({error}): apt install g++')


def check_space(needed: dict[Path, float]) -> None:
    """Refuse where folders, existing or to be made, have less room than they need.

    Args:
        needed: gigabytes by folder; what lies on one file system is added up.
    """
    total: dict[int, float] = {}
    places: dict[int, Path] = {}
    for folder, gigabytes in needed.items():
        there = next(path for path in (folder, *folder.resolve().parents) if path.exists())
        device = os.stat(there).st_dev
        total[device] = total.get(device, 0) + gigabytes
        places.setdefault(device, there)
    for device, gigabytes in total.items():
        free = shutil.disk_usage(places[device]).free / 1e9
        if free < gigabytes:
            raise Unfit(f'{free:.1f} GB free on the disk of {places[device]}, {gigabytes:.1f} needed: make room there')


def scratch_folder() -> Path:
    """Return where pip unpacks what it downloads; ``TMPDIR`` moves it."""
    return Path(tempfile.gettempdir())


def has_gpu() -> bool:
    """Whether the driver shows an NVIDIA GPU."""
    return any(Path('/dev').glob('nvidia[0-9]*')) or (
        shutil.which('nvidia-smi') is not None
        and (subprocess.run(['nvidia-smi', '-L'], capture_output=True, text=True).stdout.startswith('GPU'))
    )


def nvcc_version() -> str | None:
    """Return the 'major.minor' of the CUDA compiler that torch's builds would take."""
    homes = [Path(os.environ[name]) for name in ('CUDA_HOME', 'CUDA_PATH') if os.environ.get(name)]
    candidates = [home / 'bin/nvcc' for home in homes] + [shutil.which('nvcc'), Path('/usr/local/cuda/bin/nvcc')]
    for nvcc in candidates:
        if nvcc is not None and Path(nvcc).exists():
            said = subprocess.run([nvcc, '--version'], capture_output=True, text=True).stdout
            found = re.search(r'release (\d+\.\d+)', said)
            return found.group(1) if found else None
    return None


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1


def compile_jobs() -> int:
    """Return how many files to compile at a time: ``MAX_JOBS``, or one per core and 3 GB of memory."""
    if os.environ.get('MAX_JOBS', '').isdecimal():
        return max(1, int(os.environ['MAX_JOBS']))
    gigabytes = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 1e9
    return max(1, min(cores(), int(gigabytes / 3)))

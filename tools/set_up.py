"""Set up an environment: what uv.lock has for some dependency groups, and a torch that is there or that pip would take.

    python tools/set_up.py .venv mm dev

A torch that is in the folder is kept. What was interrupted goes on where it stopped.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]
UV = 'uv==0.13.9'
OLDEST_PYTHON, NEWEST_TRIED = (3, 11), (3, 13)
OLDEST_TORCH = (2, 1)
# Room for the packages beside torch, and for a torch, in the environment and in uv's cache.
GIGABYTES = {'others': 4, 'torch for CPUs': 2, 'torch for CUDA': 7}
# The settings of pip that uv has too, but does not read.
SETTINGS = {
    'index-url': 'UV_DEFAULT_INDEX',
    'extra-index-url': 'UV_INDEX',
    'cert': 'SSL_CERT_FILE',
    'proxy': 'ALL_PROXY',
}
CONNECTION = 'HTTPS_PROXY names a proxy, PIP_INDEX_URL another index. The same command goes on where it stopped'
BESIDE_TORCH = ['--prune', 'torch']  # what uv.lock has, but for torch and what only torch requires
MMCV_BUILD = ROOT / 'tools/mmcv_build'
MMCV_CPU_MINUTES = 8  # of gcc 12 with torch 2.13
ASK_TORCH = """
import json, torch
from torch.utils.cpp_extension import CUDA_HOME
print(json.dumps([torch.__version__, torch.version.cuda, torch.cuda.is_available(), CUDA_HOME]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('folder', type=Path, help='of the environment')
    parser.add_argument('groups', nargs='+', help='of dependencies, as in pyproject.toml')
    args = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        set_up(args.folder, args.groups)
    except subprocess.CalledProcessError:
        fail(f'uv failed, see above. {CONNECTION}')
    except KeyboardInterrupt:
        fail('interrupted; the same command goes on where it stopped')


def set_up(folder: Path, groups: list[str]) -> None:
    check_python(folder)
    if 'mm' in groups:
        check_compiler()
    torch = installed_torch(folder)
    check_space(folder, GIGABYTES['others'] + (0 if torch else GIGABYTES['torch for CPUs']))
    make_environment(folder)
    uv = Uv(folder / 'bin/python', groups)
    torch, release = install_torch(uv, folder, torch)
    say(f'2/3 What goes with torch {torch}')
    locked = BESIDE_TORCH
    if torch.split('+')[0] != release:
        locked = [*locked, '--no-emit-package', 'triton']
        print(f'   Triton is left as it is, since uv.lock has the one for torch {release}')
    uv.install(uv.export(*locked, '--no-emit-package', 'mmcv'), '--no-deps', '--editable', ROOT)
    if 'mm' in groups:
        install_mmcv(uv, uv.export(*locked))
    # yapf, which mmengine imports, writes its cache in place when it is first imported: of the processes of a first
    # training, one would read what another has half written.
    subprocess.run([uv.python, '-c', 'import yapf.yapflib.yapf_api'], stderr=subprocess.DEVNULL)


def say(line: str) -> None:
    print(f'\n== {line}', flush=True)


def fail(line: str) -> NoReturn:
    sys.exit(f'set-up: {line}')


def run(*command: str | Path, give: str = '', **options: Any) -> subprocess.CompletedProcess:
    """Run a command whose children, compilers among them, end with this process.

    Args:
        command: and its arguments
        give: to its standard input
        options: of Popen
    """
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, text=True, **options) as process:
        try:
            out, err = process.communicate(give)
        except BaseException:
            os.killpg(process.pid, signal.SIGTERM)
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


# What a machine must have, looked at before anything is downloaded.


def check_python(folder: Path) -> None:
    """Refuse a Python that is too old, and an environment of another Python, or of one that does not run."""
    here = sys.version_info[:2]
    name = 'python{}.{}'.format(*here)
    if here < OLDEST_PYTHON:
        fail(f'{sys.executable} is {name}, 3.{OLDEST_PYTHON[1]} or newer needed: make PYTHON=python3.{NEWEST_TRIED[1]}')
    if here > NEWEST_TRIED:
        print(f'{name} has not been tried, 3.{NEWEST_TRIED[1]} is the newest that was')
    if not (folder / 'bin').exists():
        return
    command = [str(folder / 'bin/python'), '-c', 'import sys; print("python%d.%d" % sys.version_info[:2])']
    remove = f'rm -r {shlex.quote(str(folder))}'
    try:
        there = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        fail(f'{folder} is damaged, its Python does not run: {remove}')
    if there != name:
        fail(f'{folder} is of {there} and {sys.executable} is {name}: {remove}, or make PYTHON={there}')


def check_compiler() -> None:
    """Refuse a machine without a C++17 compiler, or without the headers of this Python."""
    compiler = shlex.split(os.environ.get('CXX', 'c++'))
    needed = f'mmcv is compiled here: apt install g++ python3.{sys.version_info[1]}-dev'
    if shutil.which(compiler[0]) is None:
        fail(f'there is no C++ compiler {compiler[0]!r}, and {needed}')
    source = '#include <Python.h>\n#include <optional>\nstd::optional<int> number;\n'
    include = sysconfig.get_paths()['include']
    command = [*compiler, '-std=c++17', '-fsyntax-only', '-I', include, '-x', 'c++', '-']
    done = subprocess.run(command, input=source, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        error = next((line for line in done.stdout.splitlines() if 'error' in line), f'status {done.returncode}')
        fail(f'{compiler[0]} does not compile C++17 with {include}/Python.h ({error}), and {needed}')


def check_space(folder: Path, gigabytes: int) -> None:
    """Refuse a disk with too little room, for an environment or for uv's cache."""
    cache = Path(os.environ.get('UV_CACHE_DIR') or os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache')
    for place in (folder, cache):
        there = next(path for path in (place, *place.resolve().parents) if path.exists())
        free = shutil.disk_usage(there).free / 1e9
        if free < gigabytes:
            fail(f'{free:.1f} GB free on the disk of {there}, {gigabytes} needed: make room there')


def make_environment(folder: Path) -> None:
    """Make the environment, or complete it, and put uv into it."""
    python = folder / 'bin/python'
    has_pip = python.exists() and not subprocess.run([python, '-c', 'import pip'], stderr=subprocess.DEVNULL).returncode
    if not has_pip and run(sys.executable, '-m', 'venv', folder).returncode:
        name = 'python{}.{}'.format(*sys.version_info[:2])
        fail(f'{sys.executable} could not make the environment {folder}, see above; on Debian: apt install {name}-venv')
    if run(python, '-m', 'pip', 'install', '-q', '--disable-pip-version-check', UV).returncode:
        fail(f'pip could not install {UV}, see above. {CONNECTION}')


class Uv:
    """The uv of one environment, for some groups of dependencies.

    Attributes:
        python: of the environment
        env: its variables, pip's settings among them, which uv does not read
    """

    def __init__(self, python: Path, groups: list[str]) -> None:
        self.python = python
        self.groups = [word for group in groups for word in ('--group', group)]
        listed = run(python, '-m', 'pip', 'config', 'list', stdout=subprocess.PIPE)
        self.env = {**settings(listed.stdout), **os.environ, 'UV_PYTHON_DOWNLOADS': 'never'}

    def run(self, *arguments: str | Path, env: Mapping[str, str] = {}, **options: Any) -> subprocess.CompletedProcess:
        return run(self.python.parent / 'uv', *arguments, '--python', self.python, env={**self.env, **env}, **options)

    def export(self, *options: str) -> str:
        """Return what uv.lock has for the groups, as requirements."""
        options = ('--frozen', '--quiet', '--no-header', '--no-annotate', '--no-emit-project', *options)
        done = self.run('export', '--project', ROOT, *self.groups, *options, stdout=subprocess.PIPE)
        if done.returncode:
            fail('uv.lock lacks a group, see above: tools/lock.py')
        return done.stdout

    def install(self, requirements: str, *options: str | Path, env: Mapping[str, str] = {}) -> None:
        """Install requirements, from uv's cache alone where it has all of them.

        Raises:
            CalledProcessError: uv, or a compiler that it ran, failed, and has said why.
        """
        command = ('pip', 'install', *options, '--requirements', '-')
        done = self.run(*command, '--offline', env=env, give=requirements, stderr=subprocess.PIPE)
        if done.returncode and 'The build backend returned an error' not in done.stderr:
            done = self.run(*command, env=env, give=requirements)
        elif done.stderr:
            print(done.stderr, file=sys.stderr)
        done.check_returncode()


def settings(listed: str) -> dict[str, str]:
    """Return variables for uv that are to it what its settings are to pip.

    Args:
        listed: what ``pip config list`` says
    """
    found = {}
    for section in ('global', 'install', ':env:'):  # the last counts
        for name, value in re.findall(rf'^{section}\.(\S+)=(.*)$', listed, re.M):
            words = ast.literal_eval(value).split()
            if name == 'find-links':  # uv fails where a folder is missing, which pip passes over
                found['UV_FIND_LINKS'] = ','.join(word for word in words if '://' in word or Path(word).exists())
            elif name in SETTINGS:
                found[SETTINGS[name]] = ' '.join(words)
    if 'UV_INDEX' in found:  # pip takes the best of all its indexes
        found['UV_INDEX_STRATEGY'] = 'unsafe-best-match'
    return found


def installed_torch(folder: Path) -> str | None:
    """Return the version of the torch that is there, installed to the end."""
    found = next(folder.glob('lib/python*/site-packages/torch-*.dist-info/INSTALLER'), None)
    if found is None:
        return None
    version = found.parent.name.removeprefix('torch-').removesuffix('.dist-info')
    if tuple(map(int, version.split('.')[:2])) < OLDEST_TORCH:
        oldest = '.'.join(map(str, OLDEST_TORCH))
        fail(f'torch {version} in {folder} is older than {oldest}: {folder}/bin/pip uninstall torch, for another')
    return version


def install_torch(uv: Uv, folder: Path, there: str | None) -> tuple[str, str]:
    """Keep the torch that is there, or install the build that pip would take, and what it requires.

    Returns:
        its version, and the release that uv.lock has
    """
    locked = uv.export('--no-hashes')  # the build may be another than the published one
    release = re.findall(r'^torch==(\S+)', locked, re.M)[0]
    torch = there or release
    say(f'1/3 torch {torch} in {folder}')
    command: list[str | Path] = []
    if torch.split('+')[0] == release:
        constraints = folder / 'locked.txt'
        constraints.write_text(locked)
        command = ['--constraints', constraints]
    if there is None:
        plan = uv.run('pip', 'install', '--dry-run', *command, f'torch=={torch}', stderr=subprocess.PIPE).stderr
        build = 'torch for CUDA' if 'nvidia-' in plan else 'torch for CPUs'
        print(f'   {build}', flush=True)
        check_space(folder, GIGABYTES['others'] + GIGABYTES[build])
    uv.install(f'torch=={torch}', *command)
    return installed_torch(folder) or fail(f'there is no torch in {folder} now'), release


# mmcv, which has no wheel for this torch, and is compiled against the one that is there.


def install_mmcv(uv: Uv, requirements: str) -> None:
    """Install it from uv's cache, or compile it; for GPUs too where that is possible."""
    if run(uv.python, '-c', 'import mmcv.ops', stderr=subprocess.DEVNULL).returncode:
        uv.run('pip', 'uninstall', '--quiet', 'mmcv', stderr=subprocess.DEVNULL)  # one for another torch, perhaps
    done = run(uv.python, '-c', ASK_TORCH, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    torch, cuda, sees_gpu, cuda_home = json.loads(done.stdout)
    nvcc, reason = nvcc_for(cuda, sees_gpu, cuda_home)
    minutes = MMCV_CPU_MINUTES / min(compile_jobs(), os.cpu_count() or 1)
    say(f'3/3 mmcv for torch {torch}: compiled once, {minutes:.0f} minutes if the machine has nothing else to do')
    for compiler in (nvcc, None) if nvcc else (None,):
        print(f'   {"with" if compiler else "without"} operators for GPUs: {reason}', flush=True)
        key, env = mmcv_build(torch, compiler)
        try:
            uv.install(requirements, '--no-deps', *key, env=env)
            return
        except subprocess.CalledProcessError:
            reason = 'they do not compile, see above'
    fail('mmcv could not be installed, see above')


def nvcc_for(cuda: str | None, sees_gpu: bool, cuda_home: str | None) -> tuple[str | None, str]:
    """Return the version of the nvcc to compile operators for GPUs with, or None, and why.

    Args:
        cuda: the version that torch was built with, None for a build for CPUs
        sees_gpu: whether torch does
        cuda_home: where torch finds nvcc
    """
    if cuda is None or not (sees_gpu or os.environ.get('FORCE_CUDA') == '1'):
        return None, 'torch sees no GPU'
    if cuda_home is None:
        return None, f'there is no nvcc: install CUDA {cuda}, then rm -r .venv and set up again'
    said = run(f'{cuda_home}/bin/nvcc', '--version', stdout=subprocess.PIPE).stdout
    nvcc = re.findall(r'release (\d+\.\d+)', said)[0]
    if nvcc.split('.')[0] != cuda.split('.')[0]:
        return None, f'nvcc is {nvcc}, and torch is for CUDA {cuda}: install that, then rm -r .venv and set up again'
    return nvcc, f'nvcc {nvcc}, torch for CUDA {cuda}'


def mmcv_build(torch: str, nvcc: str | None) -> tuple[list[str], dict[str, str]]:
    """Return options for uv, and variables, to compile mmcv with.

    The options make uv keep one for each torch, and the variables let the compiler tell what it made for which.
    """
    made_for = f'{torch}-{nvcc or "cpu"}'
    variables = {
        'CXX': 'mmcv_cxx.py',
        'MMCV_CXX': os.environ.get('CXX', 'c++'),
        'PATH': f'{MMCV_BUILD}{os.pathsep}{os.environ["PATH"]}',
        'PYTHONPATH': str(MMCV_BUILD),
        'MMCV_WITH_OPS': '1',
        'CPPFLAGS': f'-g0 -DMMCV_MADE_FOR={made_for}',
        'MAX_JOBS': str(compile_jobs()),
        'FORCE_CUDA': '1' if nvcc else '0',
    }
    # mmcv looks for nvcc wherever torch sees a GPU.
    return ['--config-settings-package', f'mmcv:made-for={made_for}'], variables | (
        {} if nvcc else {'CUDA_VISIBLE_DEVICES': ''}
    )


def compile_jobs() -> int:
    """Return how many files to compile at a time: ``MAX_JOBS``, or one per core and 3 GB of memory."""
    gigabytes = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 1e9
    return int(os.environ.get('MAX_JOBS') or max(1, min(os.cpu_count() or 1, gigabytes // 3)))


if __name__ == '__main__':
    main()

"""Create a virtual environment with torch and with the packages of some dependency groups in the versions of uv.lock.

    python tools/set_up.py .venv mm dev

A torch that is already installed in the environment is kept. Run the command again to continue after an interruption.
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
# Disk space for torch and for all other packages, in the environment and in uv's cache.
GIGABYTES = {'others': 4, 'torch for CPUs': 2, 'torch for CUDA': 7}
# Maps settings of pip to the variables of uv, because uv does not read pip's configuration.
SETTINGS = {
    'index-url': 'UV_DEFAULT_INDEX',
    'extra-index-url': 'UV_INDEX',
    'cert': 'SSL_CERT_FILE',
    'proxy': 'ALL_PROXY',
}
CONTINUE = 'run the same command again to continue'
CONNECTION = f'If needed, set HTTPS_PROXY to a proxy or PIP_INDEX_URL to another package index, then {CONTINUE}'
BESIDE_TORCH = ['--prune', 'torch']  # all locked packages except torch and those that only torch requires
MMCV_BUILD = ROOT / 'tools/mmcv_build'
MMCV_CPU_MINUTES = 8  # CPU time of gcc 12 with torch 2.13
ASK_TORCH = """
import json, torch
from torch.utils.cpp_extension import CUDA_HOME
print(json.dumps([torch.__version__, torch.version.cuda, torch.cuda.is_available(), CUDA_HOME]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('folder', type=Path, help='folder of the environment')
    parser.add_argument('groups', nargs='+', help='dependency groups in pyproject.toml')
    args = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        set_up(args.folder, args.groups)
    except subprocess.CalledProcessError:
        fail(f'uv failed, see above. {CONNECTION}')
    except KeyboardInterrupt:
        fail(f'interrupted; {CONTINUE}')


def set_up(folder: Path, groups: list[str]) -> None:
    check_python(folder)
    if 'mm' in groups:
        check_compiler()
    torch = installed_torch(folder)
    check_space(folder, GIGABYTES['others'] + (0 if torch else GIGABYTES['torch for CPUs']))
    make_environment(folder)
    uv = Uv(folder / 'bin/python', groups)
    torch, release = install_torch(uv, folder, torch)
    say(f'2/3 packages for torch {torch}')
    locked = BESIDE_TORCH
    if torch.split('+')[0] != release:
        locked = [*locked, '--no-emit-package', 'triton']
        print(f'   Triton is not changed, because uv.lock has the version for torch {release}')
    uv.install(uv.export(*locked, '--no-emit-package', 'mmcv'), '--no-deps', '--editable', ROOT)
    if 'mm' in groups:
        install_mmcv(uv, uv.export(*locked))
    # mmengine imports yapf, whose first import writes its cache non-atomically. Import it now, so that the processes of
    # a distributed training do not read a partly written cache.
    subprocess.run([uv.python, '-c', 'import yapf.yapflib.yapf_api'], stderr=subprocess.DEVNULL)


def say(line: str) -> None:
    print(f'\n== {line}', flush=True)


def fail(line: str) -> NoReturn:
    sys.exit(f'set-up: {line}')


def run(*command: str | Path, give: str = '', **options: Any) -> subprocess.CompletedProcess:
    """Run a command. If this process is interrupted, also terminate the command's children, such as compilers.

    Args:
        command: the command and its arguments.
        give: text for standard input.
        options: options of Popen.
    """
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, text=True, **options) as process:
        try:
            out, err = process.communicate(give)
        except BaseException:
            os.killpg(process.pid, signal.SIGTERM)
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


# Requirements of the machine, checked before downloading anything.


def check_python(folder: Path) -> None:
    """Fail if this Python is too old, or if the environment has another Python or one that does not run."""
    here = sys.version_info[:2]
    name = 'python{}.{}'.format(*here)
    if here < OLDEST_PYTHON:
        fail(
            f'{sys.executable} is {name}, but 3.{OLDEST_PYTHON[1]} or newer is needed: '
            f'make PYTHON=python3.{NEWEST_TRIED[1]}'
        )
    if here > NEWEST_TRIED:
        print(f'{name} is not tested; the newest tested version is 3.{NEWEST_TRIED[1]}')
    if not (folder / 'bin').exists():
        return
    command = [str(folder / 'bin/python'), '-c', 'import sys; print("python%d.%d" % sys.version_info[:2])']
    remove = f'rm -r {shlex.quote(str(folder))}'
    try:
        there = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        fail(f'{folder} is damaged, its Python does not run: {remove}')
    if there != name:
        fail(f'{folder} was created with {there}, but {sys.executable} is {name}: {remove}, or make PYTHON={there}')


def check_compiler() -> None:
    """Fail if there is no C++17 compiler, or if the headers of this Python are missing."""
    compiler = shlex.split(os.environ.get('CXX', 'c++'))
    needed = f'mmcv needs it to compile: apt install g++ python3.{sys.version_info[1]}-dev'
    if shutil.which(compiler[0]) is None:
        fail(f'the C++ compiler {compiler[0]!r} was not found, and {needed}')
    source = '#include <Python.h>\n#include <optional>\nstd::optional<int> number;\n'
    include = sysconfig.get_paths()['include']
    command = [*compiler, '-std=c++17', '-fsyntax-only', '-I', include, '-x', 'c++', '-']
    done = subprocess.run(command, input=source, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        error = next((line for line in done.stdout.splitlines() if 'error' in line), f'status {done.returncode}')
        fail(f'{compiler[0]} does not compile C++17 with {include}/Python.h ({error}), and {needed}')


def check_space(folder: Path, gigabytes: int) -> None:
    """Fail if the disk of the environment or of uv's cache has too little free space."""
    cache = Path(os.environ.get('UV_CACHE_DIR') or os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache')
    for place in (folder, cache):
        there = next(path for path in (place, *place.resolve().parents) if path.exists())
        free = shutil.disk_usage(there).free / 1e9
        if free < gigabytes:
            fail(f'{free:.1f} GB free on the disk of {there}, but {gigabytes} GB are needed: free some space')


def make_environment(folder: Path) -> None:
    """Create the environment, or complete a partial one, and install uv in it."""
    python = folder / 'bin/python'
    has_pip = python.exists() and not subprocess.run([python, '-c', 'import pip'], stderr=subprocess.DEVNULL).returncode
    if not has_pip and run(sys.executable, '-m', 'venv', folder).returncode:
        name = 'python{}.{}'.format(*sys.version_info[:2])
        fail(
            f'{sys.executable} could not create the environment {folder}, see above; on Debian: apt install {name}-venv'
        )
    if run(python, '-m', 'pip', 'install', '-q', '--disable-pip-version-check', UV).returncode:
        fail(f'pip could not install {UV}, see above. {CONNECTION}')


class Uv:
    """Runs uv in one environment, for some dependency groups.

    Attributes:
        python: the Python of the environment.
        env: environment variables for uv, including the settings of pip.
    """

    def __init__(self, python: Path, groups: list[str]) -> None:
        self.python = python
        self.groups = [word for group in groups for word in ('--group', group)]
        listed = run(python, '-m', 'pip', 'config', 'list', stdout=subprocess.PIPE)
        self.env = {**settings(listed.stdout), **os.environ, 'UV_PYTHON_DOWNLOADS': 'never'}

    def run(self, *arguments: str | Path, env: Mapping[str, str] = {}, **options: Any) -> subprocess.CompletedProcess:
        return run(self.python.parent / 'uv', *arguments, '--python', self.python, env={**self.env, **env}, **options)

    def export(self, *options: str) -> str:
        """Return the locked packages of the groups in the format of a requirements file."""
        options = ('--frozen', '--quiet', '--no-header', '--no-annotate', '--no-emit-project', *options)
        done = self.run('export', '--project', ROOT, *self.groups, *options, stdout=subprocess.PIPE)
        if done.returncode:
            fail('uv.lock lacks a group, see above: update it with tools/lock.py')
        return done.stdout

    def install(self, requirements: str, *options: str | Path, env: Mapping[str, str] = {}) -> None:
        """Install requirements, without network access if uv's cache contains all of them.

        Raises:
            CalledProcessError: uv or a compiler failed. The cause was printed.
        """
        # Many container images set PYTHONDONTWRITEBYTECODE; without bytecode, mmdet is imported in 7 s, not in 5.
        command = ('pip', 'install', '--compile-bytecode', *options, '--requirements', '-')
        done = self.run(*command, '--offline', env=env, give=requirements, stderr=subprocess.PIPE)
        if done.returncode and 'The build backend returned an error' not in done.stderr:
            done = self.run(*command, env=env, give=requirements)
        elif done.stderr:
            print(done.stderr, file=sys.stderr)
        done.check_returncode()


def settings(listed: str) -> dict[str, str]:
    """Return environment variables for uv that are equivalent to pip's settings.

    Args:
        listed: output of ``pip config list``.
    """
    found = {}
    for section in ('global', 'install', ':env:'):  # later sections take precedence
        for name, value in re.findall(rf'^{section}\.(\S+)=(.*)$', listed, re.M):
            words = ast.literal_eval(value).split()
            if name == 'find-links':  # unlike pip, uv fails if a folder is missing
                found['UV_FIND_LINKS'] = ','.join(word for word in words if '://' in word or Path(word).exists())
            elif name in SETTINGS:
                found[SETTINGS[name]] = ' '.join(words)
    if 'UV_INDEX' in found:  # pip selects the best match from all indexes
        found['UV_INDEX_STRATEGY'] = 'unsafe-best-match'
    return found


def installed_torch(folder: Path) -> str | None:
    """Return the version of torch in the environment, or None if it is missing or its installation is incomplete."""
    found = next(folder.glob('lib/python*/site-packages/torch-*.dist-info/INSTALLER'), None)
    if found is None:
        return None
    version = found.parent.name.removeprefix('torch-').removesuffix('.dist-info')
    if tuple(map(int, version.split('.')[:2])) < OLDEST_TORCH:
        oldest = '.'.join(map(str, OLDEST_TORCH))
        fail(
            f'torch {version} in {folder} is older than {oldest}: to replace it, run {folder}/bin/pip uninstall torch '
            'and set up again'
        )
    return version


def install_torch(uv: Uv, folder: Path, there: str | None) -> tuple[str, str]:
    """Keep an installed torch, or install the build that pip would select, and install its dependencies.

    Returns:
        The version of torch, and the release in uv.lock.
    """
    locked = uv.export('--no-hashes')  # the index may have another build with another hash
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
    return installed_torch(folder) or fail(f'torch was not installed in {folder}'), release


# mmcv has no wheels for recent versions of torch, so it is compiled for the installed one.


def install_mmcv(uv: Uv, requirements: str) -> None:
    """Install mmcv from uv's cache, or compile it, with GPU operators if possible."""
    if run(uv.python, '-c', 'import mmcv.ops', stderr=subprocess.DEVNULL).returncode:
        uv.run('pip', 'uninstall', '--quiet', 'mmcv', stderr=subprocess.DEVNULL)  # it may be built for another torch
    done = run(uv.python, '-c', ASK_TORCH, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    torch, cuda, sees_gpu, cuda_home = json.loads(done.stdout)
    nvcc, reason = nvcc_for(cuda, sees_gpu, cuda_home)
    minutes = MMCV_CPU_MINUTES / min(compile_jobs(), os.cpu_count() or 1)
    say(f'3/3 mmcv for torch {torch}: compiled once, about {minutes:.0f} minutes on an idle machine')
    for compiler in (nvcc, None) if nvcc else (None,):
        print(f'   {"with" if compiler else "without"} GPU operators: {reason}', flush=True)
        key, env = mmcv_build(torch, compiler)
        try:
            uv.install(requirements, '--no-deps', *key, env=env)
            return
        except subprocess.CalledProcessError:
            reason = 'they could not be compiled, see above'
    fail('mmcv could not be installed, see above')


def nvcc_for(cuda: str | None, sees_gpu: bool, cuda_home: str | None) -> tuple[str | None, str]:
    """Return the version of nvcc for compiling GPU operators, or None, and the reason.

    Args:
        cuda: CUDA version of the torch build; None for a CPU build.
        sees_gpu: whether torch detects a GPU.
        cuda_home: CUDA folder that torch found; None without one.
    """
    if cuda is None or not (sees_gpu or os.environ.get('FORCE_CUDA') == '1'):
        return None, 'torch detects no GPU'
    if cuda_home is None:
        return None, f'nvcc was not found: install CUDA {cuda}, then rm -r .venv and set up again'
    output = run(f'{cuda_home}/bin/nvcc', '--version', stdout=subprocess.PIPE).stdout
    nvcc = re.findall(r'release (\d+\.\d+)', output)[0]
    if nvcc.split('.')[0] != cuda.split('.')[0]:
        return None, f'nvcc is {nvcc}, but torch is for CUDA {cuda}: install that, then rm -r .venv and set up again'
    return nvcc, f'nvcc {nvcc}, torch for CUDA {cuda}'


def mmcv_build(torch: str, nvcc: str | None) -> tuple[list[str], dict[str, str]]:
    """Return options and environment variables for uv to compile mmcv.

    The options give each combination of torch and nvcc its own cache entry in uv. The variables give it its own
    compiler flags, so that compiler caches do not mix builds.
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
    # mmcv would use nvcc whenever torch detects a GPU, so hide the GPUs for a CPU build.
    return ['--config-settings-package', f'mmcv:made-for={made_for}'], variables | (
        {} if nvcc else {'CUDA_VISIBLE_DEVICES': ''}
    )


def compile_jobs() -> int:
    """Return the number of parallel compiler jobs: ``MAX_JOBS``, or one per core and 3 GB of memory."""
    gigabytes = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 1e9
    return int(os.environ.get('MAX_JOBS') or max(1, min(os.cpu_count() or 1, gigabytes // 3)))


if __name__ == '__main__':
    main()

"""Create a virtual environment with torch and the packages of a requirements file, and the operators of mmcv.

    python tools/set_up.py .venv requirements/dev.txt --mmcv lite

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
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[1]
TORCH = ROOT / 'requirements/torch.txt'
COMPILED_MMCV = ROOT / 'requirements/mmcv.txt'
LITE_OPS = ROOT / 'mmcv_lite_ops'
UV = 'uv==0.13.9'
OLDEST_PYTHON, NEWEST_TRIED = (3, 11), (3, 13)
HERE = 'python{}.{}'.format(*sys.version_info[:2])
AGAIN = 'run the same command again to continue'
# Maps settings of pip to the variables of uv, because uv does not read pip's configuration.
SETTINGS = {'find-links': 'UV_FIND_LINKS', 'index-url': 'UV_DEFAULT_INDEX', 'extra-index-url': 'UV_INDEX'}
SETTINGS |= {'cert': 'SSL_CERT_FILE', 'proxy': 'ALL_PROXY'}
# Their requirements, with the hashes on the lines that follow
MMCV, MMCV_LITE = (re.compile(rf'^{name}==(?:.*\\\n)*.*\n', re.M) for name in ('mmcv', 'mmcv-lite'))
MMCV_BUILD = ROOT / 'tools/mmcv_build'
# Prints the version of torch and, if mmcv's GPU operators can be compiled for it, its CUDA.
ASK_TORCH = """
import json, os, torch
from torch.utils.cpp_extension import CUDA_HOME
has_gpu = torch.cuda.is_available() or os.environ.get('FORCE_CUDA') == '1'
print(json.dumps([torch.__version__, torch.version.cuda if has_gpu and CUDA_HOME else None]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('folder', type=Path, help='folder of the environment')
    parser.add_argument('requirements', type=Path, help='a file of requirements/')
    parser.add_argument(
        '--mmcv',
        choices=['lite', 'compiled', 'kept'],
        help='install mmcv with the operators of mmcv_lite_ops, with compiled ones, or with those that the environment '
        'has, and lite if it has none',
    )
    args = parser.parse_args()
    try:
        set_up(args.folder, args.requirements.read_text(), args.mmcv)
    except subprocess.CalledProcessError as error:
        program = Path(error.cmd[0]).name
        fail(f'{program} failed, see above. If needed, set HTTPS_PROXY or PIP_INDEX_URL (a package index), and {AGAIN}')
    except KeyboardInterrupt:
        fail(f'interrupted; {AGAIN}')


def set_up(folder: Path, requirements: str, mmcv: str | None = None) -> None:
    check_python(folder)  # before anything is downloaded
    if mmcv == 'kept':
        mmcv = 'compiled' if has(folder, 'mmcv') else 'lite'
    if mmcv == 'compiled':
        check_compiler()
        requirements = MMCV_LITE.sub('', requirements)
    python = make_environment(folder)
    other = {'lite': 'mmcv', 'compiled': 'mmcv_lite'}.get(mmcv or '')
    if other and has(folder, other):  # it installs the same files
        uninstall(python, 'mmcv', 'mmcv-lite', 'mmcv-lite-ops')
    say(f'1/3 packages in {folder}')
    # Its version stays when its file changes, so it is installed again.
    lite_ops: list[str | Path] = []
    if mmcv == 'lite':
        lite_ops = ['--reinstall-package', 'mmcv-lite-ops', LITE_OPS]
    install(python, '--no-deps', '--editable', ROOT, *lite_ops, '--requirements', '-', give=requirements)
    # uv and pip write this file last. uv takes a torch without it for a whole one, unless it is told to reinstall it.
    kept = next(folder.glob('lib/python*/site-packages/torch-*.dist-info/INSTALLER'), None)
    say(f'2/3 {kept.parent.stem} is kept' if kept else '2/3 torch')
    # Its dependencies were installed above, except those that nothing else needs and those of a build for CUDA.
    install(python, *(['torch'] if kept else ['--reinstall-package', 'torch', '--requirements', TORCH]))
    if mmcv == 'compiled':
        install_mmcv(python)
    # mmengine imports yapf, whose first import writes its cache non-atomically. Import it now, so that the processes of
    # a distributed training do not read a partly written cache.
    subprocess.run([python, '-c', 'import yapf.yapflib.yapf_api'], stderr=subprocess.DEVNULL)


def has(folder: Path, package: str) -> bool:
    """Return whether a package, with underscores in its name, is installed in the environment."""
    return any(folder.glob(f'lib/python*/site-packages/{package}-[0-9]*.dist-info'))


def say(line: str) -> None:
    print(f'\n== {line}', flush=True)


def fail(line: str) -> NoReturn:
    sys.exit(f'set-up: {line}')


def check_python(folder: Path) -> None:
    """Fail if this Python is too old, or if the environment has another Python or one that does not run."""
    newest = f'python3.{NEWEST_TRIED[1]}'
    if sys.version_info[:2] < OLDEST_PYTHON:
        fail(f'{sys.executable} is {HERE}, but 3.{OLDEST_PYTHON[1]} or newer is needed: make PYTHON={newest}')
    if sys.version_info[:2] > NEWEST_TRIED:
        print(f'{HERE} is not tested; the newest tested is {newest}')
    if not (folder / 'bin').exists():
        return
    command = [str(folder / 'bin/python'), '-c', 'import sys; print("python%d.%d" % sys.version_info[:2])']
    remove = f'rm -r {shlex.quote(str(folder))}'
    try:
        there = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        fail(f'{folder} is damaged, its Python does not run: {remove}')
    if there != HERE:
        fail(f'{folder} was created with {there}, but {sys.executable} is {HERE}: {remove}, or make PYTHON={there}')


def check_compiler() -> None:
    """Fail if there is no C++17 compiler, or if the headers of this Python are missing."""
    compiler = shlex.split(os.environ.get('CXX', 'c++'))
    needed = (
        f'mmcv needs it to compile: apt install g++ {HERE}-dev, or make setup MMCV=lite, without compiled operators'
    )
    if shutil.which(compiler[0]) is None:
        fail(f'the C++ compiler {compiler[0]!r} was not found, and {needed}')
    source = '#include <Python.h>\n#include <optional>\nstd::optional<int> number;\n'
    include = sysconfig.get_paths()['include']
    command = [*compiler, '-std=c++17', '-fsyntax-only', '-I', include, '-x', 'c++', '-']
    done = subprocess.run(command, input=source, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        error = next((line for line in done.stdout.splitlines() if 'error' in line), f'status {done.returncode}')
        fail(f'{compiler[0]} does not compile C++17 with {include}/Python.h ({error}), and {needed}')


def make_environment(folder: Path) -> Path:
    """Create the environment, or complete a partial one, and install uv in it; return its Python."""
    python = folder / 'bin/python'
    has_pip = python.exists() and not subprocess.run([python, '-c', 'import pip'], stderr=subprocess.DEVNULL).returncode
    if not has_pip and subprocess.run([sys.executable, '-m', 'venv', folder]).returncode:
        fail(f'{sys.executable} could not create {folder}, see above; on Debian: apt install {HERE}-venv')
    subprocess.run([python, '-m', 'pip', 'install', '-q', '--disable-pip-version-check', UV], check=True)
    listed = subprocess.run([python, '-m', 'pip', 'config', 'list'], stdout=subprocess.PIPE, text=True).stdout
    os.environ.update({**settings(listed), **os.environ, 'UV_PYTHON_DOWNLOADS': 'never'})
    return python


def settings(listed: str) -> dict[str, str]:
    """Return the settings that ``pip config list`` printed as environment variables for uv."""
    found = {}
    for section in ('global', 'install', ':env:'):  # later sections take precedence
        for name, value in re.findall(rf'^{section}\.(\S+)=(.*)$', listed, re.M):
            words = ast.literal_eval(value).split()
            if name == 'find-links':  # unlike pip, uv fails if a folder is missing
                words = [','.join(word for word in words if '://' in word or Path(word).exists())]
            if name in SETTINGS:
                found[SETTINGS[name]] = ' '.join(words)
    if 'UV_INDEX' in found:  # pip selects the best match from all indexes
        found['UV_INDEX_STRATEGY'] = 'unsafe-best-match'
    return found


def install(python: Path, *arguments: str | Path, give: str | None = None, env: Mapping[str, str] = {}) -> None:
    """Run ``uv pip install`` with ``give`` as standard input; if it fails, it has printed the cause."""
    # Many container images set PYTHONDONTWRITEBYTECODE; without bytecode, mmdet is imported in 7 s, not in 5.
    command = [python.parent / 'uv', 'pip', 'install', '--python', python, '--compile-bytecode', *arguments]
    subprocess.run(command, input=give, text=True, env={**os.environ, **env}, check=True)


def uninstall(python: Path, *packages: str) -> None:
    subprocess.run([python.parent / 'uv', 'pip', 'uninstall', '--quiet', '--python', python, *packages], check=True)


def install_mmcv(python: Path) -> None:
    """Install mmcv, which has no wheels for recent torch, from uv's cache or by compiling it, with GPU operators."""
    if subprocess.run([python, '-c', 'import mmcv.ops'], stderr=subprocess.DEVNULL).returncode:
        uninstall(python, 'mmcv')  # it may be built for another torch
    requirements = COMPILED_MMCV.read_text()
    install(python, '--no-deps', '--requirements', '-', give=MMCV.sub('', requirements))
    done = subprocess.run([python, '-c', ASK_TORCH], stdout=subprocess.PIPE, check=True)
    torch, cuda = json.loads(done.stdout)
    say(f"3/3 mmcv for torch {torch}, compiled if uv's cache lacks it: gcc 12 takes 8 minutes of CPU time")
    without = 'without GPU operators, which need a GPU, a torch for CUDA and the nvcc of that CUDA'
    for target in (cuda, None) if cuda else (None,):
        print(f'   {"with GPU operators" if target else without}', flush=True)
        options, env = mmcv_build(torch, target)
        try:
            mmcv = MMCV.findall(requirements)[0]
            return install(python, '--no-deps', *options, '--requirements', '-', give=mmcv, env=env)
        except subprocess.CalledProcessError:
            if target is None:
                raise


def mmcv_build(torch: str, cuda: str | None) -> tuple[list[str], dict[str, str]]:
    """Return options and environment variables for uv to compile mmcv.

    The options give each combination of torch and CUDA its own cache entry in uv. The variables give it its own
    compiler flags, so that compiler caches do not mix builds.
    """
    made_for = f'{torch}-{cuda or "cpu"}'
    gigabytes = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 1e9  # a compiler takes up to 3
    variables = {
        'CXX': 'mmcv_cxx.py',
        'MMCV_CXX': os.environ.get('CXX', 'c++'),
        'PATH': f'{MMCV_BUILD}{os.pathsep}{os.environ["PATH"]}',
        'PYTHONPATH': str(MMCV_BUILD),
        'MMCV_WITH_OPS': '1',
        'CPPFLAGS': f'-g0 -DMMCV_MADE_FOR={made_for}',
        'MAX_JOBS': os.environ.get('MAX_JOBS') or str(max(1, min(os.cpu_count() or 1, int(gigabytes // 3)))),
        'FORCE_CUDA': '1' if cuda else '0',
    }
    if cuda is None:  # mmcv would use nvcc whenever torch detects a GPU
        variables['CUDA_VISIBLE_DEVICES'] = ''
    return ['--no-build-isolation', '--config-setting', f'made-for={made_for}'], variables


if __name__ == '__main__':
    main()

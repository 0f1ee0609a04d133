"""The build of mmcv: for the GPU if possible, with a header precompiled once, in Python 3.13 too."""

import os
import re
import shutil
import subprocess
import sys

import mmcv_cxx
import pytest
import set_up

from tests.conftest import ROOT

BUILD = ROOT / 'tools/mmcv_build'


@pytest.fixture
def source(tmp_path):
    """Return a source folder with a header; its name contains a space."""
    common = tmp_path / 'the source' / mmcv_cxx.COMMON
    common.mkdir(parents=True)
    (common / 'pytorch_cpp_helper.hpp').write_text(
        '#pragma once\n#include <vector>\ninline int size() { return std::vector<int>(3).size(); }\n'
    )
    text = '#include <queue>\n#include "pytorch_cpp_helper.hpp"\nint three() { return size(); }\n'
    (tmp_path / 'the source/file.cpp').write_text(text)
    return tmp_path / 'the source'


def compile_with(source, *flags, compiler='g++ -H'):
    """Compile the file as mmcv's build does; return whether the compiler used the precompiled header."""
    arguments = ['-MMD', '-MF', 'file.o.d', '-O1', f'-I{source / mmcv_cxx.COMMON}', '-c', '-c', source / 'file.cpp']
    environment = {**os.environ, 'PATH': f'{BUILD}:{os.environ["PATH"]}', 'MMCV_CXX': compiler}
    command = ['mmcv_cxx.py', *arguments, '-o', 'file.o', *flags]
    done = subprocess.run(
        command,
        cwd=source,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return '! ' in done.stderr


def precompiled(source):
    return sorted((source / mmcv_cxx.COMMON / mmcv_cxx.PRECOMPILED).glob('*'))


@pytest.mark.skipif(not shutil.which('g++'), reason='needs g++')
def test_the_header_is_compiled_once_per_set_of_flags_and_removed_after_linking(source):
    assert compile_with(source, '-DMADE_FOR=one')
    (first,) = precompiled(source)
    made = first.stat().st_mtime_ns
    assert compile_with(source, '-DMADE_FOR=one')
    assert first.stat().st_mtime_ns == made
    assert compile_with(source, '-DMADE_FOR=another')
    assert len(precompiled(source)) == 2
    environment = {**os.environ, 'MMCV_CXX': 'g++'}
    subprocess.run(
        [BUILD / 'mmcv_cxx.py', '-shared', 'file.o', '-o', 'all.so'], cwd=source, env=environment, check=True
    )
    assert (source / 'all.so').exists()
    assert not precompiled(source)


@pytest.mark.skipif(not shutil.which('g++'), reason='needs g++')
def test_a_compiler_that_cannot_compile_headers_compiles_files(source):
    compiler = source / 'compiler'
    compiler.write_text('#!/bin/sh\ncase "$*" in *c++-header*) exit 1 ;; esac\nexec g++ -H "$@"\n')
    compiler.chmod(0o755)
    for _ in range(2):
        assert not compile_with(source, compiler=f"'{compiler}'")


def test_names_defined_by_exec_are_in_locals_in_every_python(tmp_path):
    script = tmp_path / 'setup.py'
    script.write_text('def version():\n    exec("number = 7")\n    return locals()["number"]\n\nprint(version())\n')
    environment = {**os.environ, 'PYTHONPATH': str(BUILD)}
    assert subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True).stdout == '7\n'


@pytest.mark.parametrize(
    ('cuda', 'sees_gpu', 'cuda_home', 'forced', 'fails', 'tried'),
    [
        (None, False, '/cuda', 1, False, ['cpu 0']),
        ('13.0', False, '/cuda', 0, False, ['cpu 0']),
        ('13.0', True, None, 0, False, ['cpu 0']),
        ('13.0', True, '/cuda', 0, False, ['13.0 1']),
        ('13.0', False, '/cuda', 1, False, ['13.0 1']),
        ('13.0', True, '/cuda', 0, True, ['13.0 1', 'cpu 0']),
    ],
)
def test_gpu_operators_are_compiled_if_possible(cuda, sees_gpu, cuda_home, forced, fails, tried, tmp_path, monkeypatch):
    files = {
        'torch/__init__.py': "from . import cuda, version\n__version__ = '2.13.0'\n",
        'torch/cuda.py': f'def is_available(): return {sees_gpu}\n',
        'torch/version.py': f'cuda = {cuda!r}\n',
        'torch/utils/cpp_extension.py': f'CUDA_HOME = {cuda_home!r}\n',
        'mmcv/__init__.py': "raise ImportError('undefined symbol')\n",
        'bin/python': f'#!/bin/sh\nexec "{sys.executable}" "$@"\n',
        'bin/uv': f'#!/bin/sh\necho "$@ $FORCE_CUDA" >> "{tmp_path}/log"\nexit $((FAILS * FORCE_CUDA))\n',
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv('PYTHONPATH', str(tmp_path))
    monkeypatch.setenv('FORCE_CUDA', str(forced))
    monkeypatch.setenv('FAILS', str(int(fails)))
    set_up.install_mmcv(tmp_path / 'bin/python')
    removal, tools, *builds = (tmp_path / 'log').read_text().splitlines()
    assert removal.startswith('pip uninstall')  # the mmcv that is there was built for another torch
    assert '--no-build-isolation' not in tools
    assert [re.sub(r'.* made-for=2\.13\.0-(\S+) .* ', r'\1 ', line) for line in builds] == tried

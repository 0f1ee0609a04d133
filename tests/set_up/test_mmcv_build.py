"""The build of mmcv: its header is precompiled once, and its setup.py runs in Python 3.13 and later."""

import os
import shutil
import subprocess
import sys

import mmcv_cxx
import pytest

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
    done = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True)
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

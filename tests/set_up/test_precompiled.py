"""The header of mmcv compiled once, by the compiler of this machine, beside a compile that takes it."""

import contextlib
import shutil
import subprocess
import time

import pytest
from precompiled import HEADER, header_compiled_once

pytestmark = pytest.mark.skipif(not shutil.which('g++'), reason='needs g++')

STEPS = """cxx = g++
cflags = -O1 -fPIC '-I{common}' -c
post_cflags = -std=c++17 -DNAME=_ext

build /some/file.o: compile /some/file.cpp
"""
FLAGS = ['-O1', '-fPIC', '-c', '-std=c++17']


@pytest.fixture
def source(tmp_path):
    """Return a source with a header, in a folder with a space in its name."""
    header = tmp_path / 'the source' / HEADER
    header.parent.mkdir(parents=True)
    header.write_text('#include <vector>\ninline int size() { return std::vector<int>(3).size(); }\n')
    return tmp_path / 'the source'


def write_steps(source):
    steps = source / 'build/temp.linux/build.ninja'
    steps.parent.mkdir(parents=True)
    steps.write_text(STEPS.format(common=(source / HEADER).parent))


def compiled(source):
    return (source / HEADER).with_name('pytorch_cpp_helper.hpp.gch')


def wait_for_header(source):
    limit = time.monotonic() + 60
    while not compiled(source).exists():
        assert time.monotonic() < limit, 'it was not compiled'
        time.sleep(0.05)


def takes_it(source, name):
    """Compile a file that begins with the header, and return whether the compiler took the compiled one."""
    file = source / 'file.cpp'
    file.write_text('#include "pytorch_cpp_helper.hpp"\nint three() { return size(); }\n')
    command = ['g++', '-H', *FLAGS, f'-DNAME={name}', f'-I{(source / HEADER).parent}', file, '-o', source / 'file.o']
    return '! ' in subprocess.run(command, capture_output=True, text=True, check=True).stderr


def test_files_with_the_same_flags_take_it_and_others_do_not(source):
    with header_compiled_once(source, 'one torch'):
        write_steps(source)
        wait_for_header(source)
        assert takes_it(source, '_ext')
        assert not takes_it(source, 'another')
    assert not compiled(source).exists()


def test_it_stays_for_a_compile_that_goes_on_but_not_for_another(source):
    with contextlib.suppress(KeyboardInterrupt), header_compiled_once(source, 'one torch'):
        write_steps(source)
        wait_for_header(source)
        raise KeyboardInterrupt
    before = compiled(source).stat().st_mtime_ns
    with contextlib.suppress(KeyboardInterrupt), header_compiled_once(source, 'one torch'):
        assert compiled(source).stat().st_mtime_ns == before
        raise KeyboardInterrupt
    with header_compiled_once(source, 'another torch'):
        assert not compiled(source).exists()
        assert not (source / 'build').exists()


def test_a_header_that_cannot_be_compiled_stops_nothing(source):
    (source / HEADER).write_text('#error\n')
    with header_compiled_once(source, 'one torch'):
        write_steps(source)
        time.sleep(1)
    assert list((source / HEADER).parent.iterdir()) == [source / HEADER]

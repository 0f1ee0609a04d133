"""Defects of a machine and interruptions are reported in one line that says what to do."""

import os
import signal
import subprocess
import sys
import time

import pytest
import set_up

from tests.conftest import ROOT

ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ('PYTHONPATH', 'CXX')}


def run(folder, mmcv='lite', **environment):
    """Run the set-up without a connection, expect it to fail, and return the lines of its stderr."""
    # No server listens at this address, and pip does not retry.
    offline = {'PIP_INDEX_URL': 'http://127.0.0.1:9/simple', 'PIP_RETRIES': '0', 'PIP_NO_INDEX': '1'}
    command = [sys.executable, ROOT / 'tools/set_up.py', folder, ROOT / 'requirements/dev.txt', '--mmcv', mmcv]
    done = subprocess.run(
        command,
        env={**ENVIRONMENT, **offline, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stderr.splitlines()


def make_python(folder, script):
    """Create an environment whose Python is a shell script."""
    (folder / 'bin').mkdir(parents=True)
    python = folder / 'bin/python'
    python.write_text(f'#!/bin/sh\n{script}\n')
    python.chmod(0o755)


def test_a_compiled_mmcv_without_a_compiler(tmp_path):
    (line,) = run(tmp_path / 'an environment', mmcv='compiled', CXX='no-such-compiler')
    needed = f'mmcv needs it to compile: apt install g++ python3.{sys.version_info[1]}-dev, or make setup MMCV=lite'
    assert line.startswith(f"set-up: the C++ compiler 'no-such-compiler' was not found, and {needed}")
    assert not (tmp_path / 'an environment').exists()


def test_with_a_compiler_that_does_not_work(tmp_path):
    compiler = tmp_path / 'c++'
    compiler.write_text('#!/bin/sh\necho "fatal error: Python.h: No such file"; exit 1\n')
    compiler.chmod(0o755)
    (line,) = run(
        tmp_path / 'environment',
        mmcv='compiled',
        CXX=str(compiler),
    )
    assert '(fatal error: Python.h: No such file), and mmcv needs it to compile: apt install g++' in line


def test_with_an_environment_of_another_python(tmp_path):
    make_python(tmp_path / 'its environment', 'echo python3.8')
    (line,) = run(tmp_path / 'its environment')
    assert 'was created with python3.8' in line
    assert f"rm -r '{tmp_path}/its environment', or make PYTHON=python3.8" in line


def test_with_an_environment_whose_python_is_gone(tmp_path):
    (tmp_path / 'environment/bin').mkdir(parents=True)
    (tmp_path / 'environment/bin/python').symlink_to(tmp_path / 'gone')
    (line,) = run(tmp_path / 'environment')
    assert line.endswith(f'is damaged, its Python does not run: rm -r {tmp_path}/environment')


def test_without_a_connection(tmp_path):
    assert 'HTTPS_PROXY' in run(tmp_path / 'environment', CXX='no-such-compiler')[-1]


def test_a_python_that_is_too_old(tmp_path, monkeypatch):
    monkeypatch.setattr(set_up, 'OLDEST_PYTHON', (3, 99))
    with pytest.raises(SystemExit, match=r'3\.99 or newer .*make PYTHON=python3'):
        set_up.check_python(tmp_path)


def test_settings_of_pip_become_settings_of_uv(tmp_path):
    listed = f""":env:.find-links='{tmp_path}'
global.extra-index-url='file:///one https://two'
global.timeout='3'
install.find-links='https://wheels\\n{tmp_path}\\n/nonexistent'
"""
    indexes = {'UV_INDEX': 'file:///one https://two', 'UV_INDEX_STRATEGY': 'unsafe-best-match'}
    assert set_up.settings(listed) == {'UV_FIND_LINKS': str(tmp_path), **indexes}
    assert set_up.settings(listed.partition('\n')[2]) == {'UV_FIND_LINKS': f'https://wheels,{tmp_path}', **indexes}
    assert set_up.settings("global.cert='/c.pem'\n") == {'SSL_CERT_FILE': '/c.pem'}


def test_an_interruption(tmp_path):
    """Ctrl-C during a download: the terminal signals the set-up and pip."""
    make_python(
        tmp_path / 'environment',
        f'case "$*" in *"-m pip"*) touch "{tmp_path}/pip"; exec sleep 60 ;; esac\nexec "{sys.executable}" "$@"',
    )
    command = [sys.executable, ROOT / 'tools/set_up.py', tmp_path / 'environment', ROOT / 'requirements/core.txt']
    # Background jobs of a shell ignore SIGINT, and so do their children.
    options = {'start_new_session': True, 'preexec_fn': lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    with subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    ) as process:
        while not (tmp_path / 'pip').exists() and process.poll() is None:
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        assert process.communicate()[1] == 'set-up: interrupted; run the same command again to continue\n'
    assert process.returncode == 1

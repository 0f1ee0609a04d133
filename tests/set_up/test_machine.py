"""Defects of a machine and interruptions are reported in one line that says what to do."""

import os
import sys

import set_up

from tests.conftest import ROOT
from tests.processes import completed

ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ('PYTHONPATH', 'CXX')}


def run(folder, mmcv='lite', **environment):
    """Run the set-up without a connection, expect it to fail, and return the lines of its stderr."""
    # No server listens at this address, and pip does not retry.
    offline = {'PIP_INDEX_URL': 'http://127.0.0.1:9/simple', 'PIP_RETRIES': '0', 'PIP_NO_INDEX': '1'}
    command = [sys.executable, ROOT / 'tools/set_up.py', folder, ROOT / 'requirements/dev.txt', '--mmcv', mmcv]
    return completed(command, 1, env={**ENVIRONMENT, **offline, **environment}).stderr.splitlines()


def make_python(folder, script):
    (folder / 'bin').mkdir(parents=True)
    python = folder / 'bin/python'
    python.write_text(f'#!/bin/sh\n{script}\n')
    python.chmod(0o755)


def test_defects_of_a_machine_are_one_line_that_says_what_to_do(tmp_path):
    (line,) = run(tmp_path / 'environment', mmcv='compiled', CXX='no-such-compiler')
    needed = f'mmcv needs it to compile: apt install g++ python3.{sys.version_info[1]}-dev, or make setup MMCV=lite'
    assert line.startswith(f"set-up: the C++ compiler 'no-such-compiler' was not found, and {needed}")
    assert not (tmp_path / 'environment').exists()
    make_python(tmp_path / 'its environment', 'echo python3.8')
    (line,) = run(tmp_path / 'its environment')
    assert 'was created with python3.8' in line
    assert f"rm -r '{tmp_path}/its environment', or make PYTHON=python3.8" in line
    (tmp_path / 'damaged/bin').mkdir(parents=True)
    (tmp_path / 'damaged/bin/python').symlink_to(tmp_path / 'gone')
    (line,) = run(tmp_path / 'damaged')
    assert line.endswith(f'is damaged, its Python does not run: rm -r {tmp_path}/damaged')
    assert 'HTTPS_PROXY' in run(tmp_path / 'environment', CXX='no-such-compiler')[-1]


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

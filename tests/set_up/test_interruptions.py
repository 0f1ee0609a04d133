"""A set-up in a process that is interrupted, with a pip that hangs."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT

PATIENCE = 60  # seconds, on a machine that has a lot else to do


@pytest.fixture
def environment(tmp_path):
    """Return an environment whose pip notes its process and then waits, as for a slow download."""
    folder = tmp_path / 'an environment'
    (folder / 'bin').mkdir(parents=True)
    python = folder / 'bin/python'
    python.write_text(f"""#!/bin/sh
case "$*" in
    *"-m pip"*) echo $$ >> '{tmp_path}/pips'; exec sleep 600 ;;
    *) exec '{sys.executable}' "$@" ;;
esac
""")
    python.chmod(0o755)
    yield folder
    for pid in pips(tmp_path):
        if alive(pid):
            os.kill(pid, signal.SIGKILL)


def start(folder):
    command = [sys.executable, str(ROOT / 'tools/set_up.py'), str(folder), 'core']
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heed_interrupts
    )


def heed_interrupts():
    """In the background of a shell, where tests may run, SIGINT is ignored, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def pips(folder):
    file = folder / 'pips'
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def alive(pid):
    try:
        return Path(f'/proc/{pid}/stat').read_text().split()[2] != 'Z'
    except OSError:
        return False


def wait_for(condition):
    limit = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < limit, 'it did not happen'
        time.sleep(0.05)


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_pip_too_and_says_how_to_go_on(number, environment, tmp_path):
    process = start(environment)
    wait_for(lambda: pips(tmp_path))
    process.send_signal(number)
    _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert said.splitlines()[-1] == 'set-up: interrupted; run the same command again to continue'
    assert not alive(pips(tmp_path)[0])

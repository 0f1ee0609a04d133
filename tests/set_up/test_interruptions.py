"""A set-up that a signal interrupts while pip hangs."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT

PATIENCE = 60  # seconds, for a busy machine


@pytest.fixture
def environment(tmp_path):
    """Return an environment whose pip records its process ID and then waits, as for a slow download."""
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
    """Restore the default action of SIGINT: background jobs of a shell ignore it, and their children inherit that."""
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
        assert time.monotonic() < limit, 'the condition did not become true in time'
        time.sleep(0.05)


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_pip_too_and_the_error_says_how_to_continue(number, environment, tmp_path):
    process = start(environment)
    wait_for(lambda: pips(tmp_path))
    process.send_signal(number)
    _, printed_errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert printed_errors.splitlines()[-1] == 'set-up: interrupted; run the same command again to continue'
    assert not alive(pips(tmp_path)[0])

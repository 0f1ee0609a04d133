"""Real set-ups in real processes that are killed, or run two at once, with a pip that hangs or makes files."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kinds import KINDS, pinned
from mmcv_build import Build, compile_wheel, finished_wheel, wheel_folder
from packages import Pip

ROOT = Path(__file__).parents[2]
MMCV = pinned(KINDS['main'].requirements(), 'mmcv')
BUILD = Build('cp3-torch-none-cpu', cuda=False, reason='no GPU here')
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
    command = [sys.executable, str(ROOT / 'tools/set_up'), 'core', str(folder)]
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
    assert said.splitlines()[-1] == 'set-up: interrupted; the same command goes on where it stopped'
    assert not alive(pips(tmp_path)[0])


def test_of_two_set_ups_one_waits_even_if_the_other_is_killed_and_its_pip_is_not(environment, tmp_path):
    first = start(environment)
    wait_for(lambda: pips(tmp_path))
    second = start(environment)
    said = second.stdout.readline()
    assert said == f'Waiting for another set-up, which holds {environment}/set-up.lock\n'
    first.kill()
    first.wait()  # not communicate(): its pip lives, and holds the pipes
    time.sleep(0.5)
    assert len(pips(tmp_path)) == 1, 'two pips write into one environment'
    os.kill(pips(tmp_path)[0], signal.SIGKILL)
    wait_for(lambda: len(pips(tmp_path)) == 2)
    second.terminate()
    second.communicate(timeout=PATIENCE)


def test_a_compile_that_was_killed_leaves_no_wheel_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'a cache'))
    compiler = tmp_path / 'python'
    # The first time, pip hangs with half a wheel written; the second time it finds what it compiled, and ends.
    compiler.write_text(f"""#!/bin/sh
while [ "$1" != --wheel-dir ]; do shift; done
if [ -e "$3/compiled.o" ]; then printf whole > "$2/mmcv.whl"; exit; fi
printf half > "$2/mmcv.whl"; touch "$3/compiled.o"; echo $$ > '{tmp_path}/pips'; exec sleep 600
""")
    compiler.chmod(0o755)
    source = tmp_path / 'the source'
    source.mkdir()
    child = os.fork()
    if not child:
        compile_wheel(Pip(compiler), MMCV, BUILD, source)
        os._exit(0)
    wait_for(lambda: pips(tmp_path))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.kill(pips(tmp_path)[0], signal.SIGKILL)
    assert finished_wheel(MMCV, BUILD) is None
    wheel = compile_wheel(Pip(compiler), MMCV, BUILD, source)
    assert wheel == finished_wheel(MMCV, BUILD)
    assert wheel.read_text() == 'whole'
    assert wheel.parent == wheel_folder(MMCV, BUILD)

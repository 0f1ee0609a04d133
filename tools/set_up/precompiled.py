"""The header that the files of mmcv begin with, compiled once for all of them: it is most of the work of each."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HEADER = 'mmcv/ops/csrc/common/pytorch_cpp_helper.hpp'
SECONDS = 0.2  # between two looks whether the flags are there


@contextmanager
def header_compiled_once(source: Path, key: str) -> Iterator[None]:
    """While mmcv is compiled, compile its header too, as soon as the flags are known.

    gcc takes ``HEADER.gch`` for the header where both were compiled with the very same flags. Else, and until it is
    there, the files are compiled as without. What was compiled with it depends on it, so it stays for a compile that
    goes on.

    Args:
        source: of mmcv
        key: what it is compiled with; what was compiled with something else is removed
    """
    header = source / HEADER
    compiled, made_for = header.with_name(f'{header.name}.gch'), source / 'compiled-with.txt'
    if not made_for.exists() or made_for.read_text() != key:
        compiled.unlink(missing_ok=True)
        shutil.rmtree(source / 'build', ignore_errors=True)
        made_for.write_text(key)
    finished = threading.Event()

    def watch() -> None:
        command = None
        while not (command or finished.wait(SECONDS)):
            command = next(filter(None, map(command_of, source.glob('build/temp*/build.ninja'))), None)
        if command:
            compile_header(command, header, compiled, finished)

    watcher = threading.Thread(target=watch)
    if not compiled.exists():
        watcher.start()
    try:
        yield
    finally:
        finished.set()
        if watcher.ident:
            watcher.join()
    compiled.unlink(missing_ok=True)
    made_for.unlink()  # what is left in build/ lacks the header now


def command_of(steps: Path) -> list[str] | None:
    """Return the compiler and its flags of a build.ninja, None while it is being written."""
    text = steps.read_text()
    found = {name: re.search(rf'^{name} = (.*)$', text, re.M) for name in ('cxx', 'cflags', 'post_cflags')}
    if '\nbuild ' not in text or None in found.values():
        return None
    flags = [flag for value in found.values() if value for flag in shlex.split(value[1])]
    return [flag for flag in flags if flag != '-c']


def compile_header(command: list[str], header: Path, compiled: Path, finished: threading.Event) -> None:
    """Compile it, unless the rest is finished before, or it cannot be."""
    partial = compiled.with_suffix('.partial')
    arguments = ['-x', 'c++-header', str(header), '-o', str(partial)]
    with subprocess.Popen([*command, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None:
            if finished.wait(SECONDS):
                process.kill()
    if process.returncode or finished.is_set():
        partial.unlink(missing_ok=True)
    else:
        partial.rename(compiled)

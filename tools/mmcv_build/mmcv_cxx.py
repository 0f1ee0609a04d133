#!/usr/bin/env python3
"""The C++ compiler for mmcv, with the header that all its files begin with compiled once: it is most of their work.

It stands for the compiler while mmcv is built: ``CXX`` names it, and ``MMCV_CXX`` the compiler itself. gcc takes
``HEADER.gch`` in place of the header where both are compiled with the very same flags; other compilers ignore it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

COMMON = 'mmcv/ops/csrc/common'
HEADER = 'pytorch_cpp_helper.hpp'
PRECOMPILED = f'{HEADER}.gch'


def main() -> None:
    compiler, arguments = shlex.split(os.environ['MMCV_CXX']), sys.argv[1:]
    common = next((flag[2:] for flag in arguments if flag.startswith('-I') and flag.endswith(COMMON)), None)
    if common:
        precompile([*compiler, *flags(arguments)], Path(common))
        compiler += ['-include', HEADER]  # some files include others before it
    elif '-o' in arguments:  # linking, in the folder of the source: all files are compiled
        shutil.rmtree(Path(COMMON, PRECOMPILED), ignore_errors=True)
    os.execvp(compiler[0], [*compiler, *arguments])


def flags(arguments: list[str]) -> list[str]:
    """Return the arguments that do not name the file to compile, nor what to write."""
    without = [a for before, a in zip(['', *arguments], arguments, strict=False) if before not in ('-o', '-MF')]
    return [a for a in without if a not in ('-c', '-o', '-MF', '-MMD') and not a.endswith('.cpp')]


def precompile(command: list[str], common: Path) -> None:
    """Compile the header unless that was done, or tried, with these flags, or is being done."""
    folder = common / PRECOMPILED
    folder.mkdir(exist_ok=True)
    compiled = folder / hashlib.sha256(shlex.join(command).encode()).hexdigest()
    with open(f'{folder}.lock', 'w') as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        if compiled.exists():
            return
        partial = Path(f'{folder}.partial')
        arguments = ['-x', 'c++-header', str(common / HEADER), '-o', str(partial)]
        done = subprocess.run([*command, *arguments], stderr=subprocess.DEVNULL)
        if done.returncode:
            partial.write_text('')  # compilers pass over an empty one
        partial.replace(compiled)


if __name__ == '__main__':
    main()

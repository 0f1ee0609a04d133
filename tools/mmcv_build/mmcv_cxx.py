#!/usr/bin/env python3
"""A wrapper of the C++ compiler for mmcv, which precompiles the header that all source files include.

The header takes most of the compile time. During the build of mmcv, ``CXX`` is this script and ``MMCV_CXX`` the actual
compiler. gcc uses ``HEADER.gch`` instead of the header if both are compiled with the same flags; other compilers ignore
it.
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
        compiler += ['-include', HEADER]  # it must come first to be used, but some files include others before it
    elif '-o' in arguments:  # linking, after all files were compiled; the working directory is that of the source
        shutil.rmtree(Path(COMMON, PRECOMPILED), ignore_errors=True)
    os.execvp(compiler[0], [*compiler, *arguments])


def flags(arguments: list[str]) -> list[str]:
    """Return the arguments without those for input and output files."""
    without = [a for before, a in zip(['', *arguments], arguments, strict=False) if before not in ('-o', '-MF')]
    return [a for a in without if a not in ('-c', '-o', '-MF', '-MMD') and not a.endswith('.cpp')]


def precompile(command: list[str], common: Path) -> None:
    """Precompile the header, unless this was already done or failed with the same flags, or is in progress."""
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
            partial.write_text('')  # compilers ignore an empty file
        partial.replace(compiled)


if __name__ == '__main__':
    main()

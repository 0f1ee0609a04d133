"""Write requirements/lock.txt and lock-mmcv.txt: what the tests ran with, each package with the hashes of its files."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

# The set-up runs by itself, before anything is installed, so it is no package.
sys.path.insert(0, str(Path(__file__).with_name('set_up')))

from kinds import KINDS, ROOT

HEADER = """\
# The stack that the tests ran with, and what it requires, with the hashes of all files: Python 3.11, Linux, x86_64.
# Written by tools/lock.py from the environment that it ran in. How to install it: docs/install.md.
"""


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        installed = Path(folder, 'installed.txt')
        installed.write_text(as_published(run(sys.executable, '-m', 'pip', 'freeze', '--all', '--exclude-editable')))
        hashed = run(
            *('uv', 'pip', 'compile', '--quiet', '--no-header', '--no-annotate', '--generate-hashes'),
            *('--python', sys.executable, '--no-build-isolation', '--constraints', installed),
            *(ROOT / 'requirements' / name for name in KINDS['main'].files),
        )
    write(ROOT / 'requirements', hashed)


def write(folder: Path, hashed: str) -> None:
    """Write the lock, with mmcv apart: it is compiled against a torch that must be there before."""
    others, mmcv = split(hashed)
    (folder / 'lock.txt').write_text(HEADER + others)
    (folder / 'lock-mmcv.txt').write_text(HEADER + mmcv)


def split(hashed: str) -> tuple[str, str]:
    """Return the entries of a lock without that of mmcv, and that one."""
    entries = re.split(r'^(?=\S)', hashed, flags=re.MULTILINE)
    parts: tuple[list[str], list[str]] = ([], [])
    for entry in entries:
        parts[entry.startswith('mmcv==')].append(entry)
    return ''.join(parts[0]), ''.join(parts[1])


def as_published(frozen: str) -> str:
    """Return what pip freeze says with releases in place of builds of one's own: no '+cpu', no '@ file:'."""
    lines = (re.sub(r'\+\S+', '', line) for line in frozen.splitlines() if ' @ ' not in line)
    return '\n'.join(lines) + '\n'


def run(*command: str | Path) -> str:
    return subprocess.run([*map(str, command)], check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == '__main__':
    main()

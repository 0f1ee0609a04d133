"""Do what a new user does with the README in an empty environment, and write how long each command took.

    python -m tests.set_up.first_ten_minutes --json benchmarks/first_ten_minutes.json

The commands and snippets are the README's, in a clone of the present commit, with small files in place of its
photographs, data set and weights. `--torch` replaces what the README installs first, to take it from another index.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.bench_host import processor
from tests.conftest import ROOT
from tests.tools.test_docs import prepare, replace_large
from tests.tools.test_readme import python_blocks

TEN_LINES = """\
import torch
from swin_dense import create_backbone, extract_pyramid, load_checkpoint

backbone = create_backbone('swin_t')
report = load_checkpoint(backbone, 'swin_t.in1k')
maps = backbone(torch.rand(1, 3, 64, 96))
print([level.shape for level in maps], backbone.out_channels)
one = extract_pyramid(backbone, 'photo.jpg')
several = extract_pyramid(backbone, ['photo.jpg', 'photo.jpg'], levels=[8, 16])
print({stride: level.shape for stride, level in one.items()}, several[0][8].mean().item())
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--torch', help='the command in place of the first of the README, which installs torch')
    parser.add_argument('--json', type=Path, required=True)
    args = parser.parse_args()
    load = round(os.getloadavg()[0], 1)  # of other programs
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for title, command in commands(place, args.torch):
            rows.append(timed(title, command, place))
            print('{seconds:6.1f} s  {command}: {output}'.format(**rows[-1]), file=sys.stderr)
    report = {'date': datetime.date.today().isoformat(), 'processor': processor(), 'load': load, 'rows': rows}
    args.json.write_text(json.dumps(report, indent=1) + '\n')


def commands(place: Path, install_torch: str | None) -> list[tuple[str, str]]:
    """Return each command as the page of results shows it, and as it runs in the folder of the files."""
    prepare(place)
    subprocess.run(['git', 'clone', '-q', str(ROOT), str(place / 'clone')], check=True)
    (place / 'ten_lines.py').write_text(TEN_LINES)
    (install,) = re.findall(r'^```shell\n(.*?)^```', (ROOT / 'README.md').read_text(), re.S | re.M)
    torch, package, doctor = (line.partition('  #')[0].rstrip() for line in install.splitlines())
    found = [('python -m venv env', f'"{sys.executable}" -m venv env'), (torch, install_torch or torch)]
    found += [(package, f'cd clone && {package}'), (doctor, doctor)]
    for number, block in enumerate(python_blocks(), start=1):
        (place / f'block_{number}.py').write_text(block)
        found.append((f'Python block {number} of the README', f'python block_{number}.py'))
    show_names = 'python -c "import swin_dense; print(*dir(swin_dense))"'
    found.append((show_names, show_names))
    (shown,) = re.findall(r'^```sh\n(.*?)^```', (ROOT / 'README.md').read_text(), re.S | re.M)
    for line in shown.replace('\\\n', ' ').splitlines():
        command = re.sub(r'  +#.*', '', line)
        found.append((command, replace_large(command + '\n').strip()))
    found += [('pip install mypy', 'pip install mypy'), ('mypy ten_lines.py', 'mypy ten_lines.py')]
    return found


def timed(title: str, command: str, place: Path) -> dict[str, object]:
    """Run a command and return its time and the last line that it printed.

    Raises:
        SystemExit: it failed.
    """
    path = os.pathsep.join([str(place / 'env' / 'bin'), os.environ['PATH']])
    environment = {**os.environ, 'PATH': path, 'PYTHONWARNINGS': 'ignore'}
    for name in ('PYTHONPATH', 'OMP_NUM_THREADS', 'TRITON_INTERPRET'):  # the tests set the last two
        environment.pop(name, None)
    start = time.monotonic()
    done = subprocess.run(['bash', '-c', command], cwd=place, env=environment, capture_output=True, text=True)
    seconds = time.monotonic() - start
    if done.returncode:
        raise SystemExit(f'{command} failed: {done.stdout[-3000:]}{done.stderr[-3000:]}')
    last = (done.stdout.strip() or done.stderr.strip()).rpartition('\n')[2].replace(str(place), '.')
    return {'command': title, 'seconds': round(seconds, 1), 'output': last[:100]}


if __name__ == '__main__':
    main()

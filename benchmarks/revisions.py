"""Time two revisions of this package, in fresh processes that take turns.

    git worktree add ../before e3b2d55
    python benchmarks/revisions.py ../before . --rounds 4 --json benchmarks/revisions.json

Each process imports the package of one revision and times Swin-T in float32: the median of some passes without
gradients, or of training steps (forward and backward). The memory is the peak of the process over all cases.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from bench_host import processor

# Name, batch, height, width, passes; names with 'train' are training steps.
CASES = [
    ('224', 1, 224, 224, 25),
    ('8x224', 8, 224, 224, 6),
    ('512', 1, 512, 512, 8),
    ('800x1344', 1, 800, 1344, 4),
    ('train 2x512', 2, 512, 512, 5),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('revisions', nargs='*', type=Path, help='folders with a revision each')
    parser.add_argument('--rounds', type=int, default=4, help='processes per revision (default: %(default)s)')
    parser.add_argument('--json', type=Path, help='write the report to this file')
    parser.add_argument('--one', action='store_true', help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure()))
        return
    runs: dict[str, list[dict[str, Any]]] = {revision_of(folder): [] for folder in args.revisions}
    for _ in range(args.rounds):
        for folder in args.revisions:
            environment = {**os.environ, 'PYTHONPATH': str(folder.resolve())}
            command = [sys.executable, '-W', 'ignore', __file__, '--one']
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
            runs[revision_of(folder)].append(json.loads(done.stdout))
    for name in next(iter(runs.values()))[0]:
        print(name, *(f'{revision} {statistics.median(run[name] for run in runs[revision]):.1f}' for revision in runs))
    if args.json:
        report = {'machine': processor(), 'torch': torch.__version__, 'unit': 'ms, MiB', 'runs': runs}
        args.json.write_text(json.dumps(report, indent=1) + '\n')


def revision_of(folder: Path) -> str:
    """Return the commit that is checked out in a folder, shortened."""
    command = ['git', '-C', str(folder), 'rev-parse', '--short', 'HEAD']
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def measure() -> dict[str, float]:
    """Return the median milliseconds of each case with the package on PYTHONPATH, and the peak memory in MiB."""
    from swin_dense import SwinBackbone

    found = {}
    for name, batch, height, width, passes in CASES:
        torch.manual_seed(0)
        model = SwinBackbone('t').train('train' in name)
        img = torch.rand(batch, 3, height, width)
        seconds = []
        for _ in range(passes + 2):  # two passes to warm up
            model.zero_grad(set_to_none=True)
            start = time.perf_counter()
            with torch.set_grad_enabled(model.training):
                outs = model(img)
            if model.training:
                sum(out.mean() for out in outs).backward()
            seconds.append(time.perf_counter() - start)
        found[name] = round(1e3 * statistics.median(seconds[2:]), 1)
    found['peak'] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return found


if __name__ == '__main__':
    main()

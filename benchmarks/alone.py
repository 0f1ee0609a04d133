"""Time Swin-T in a process of its own, as a user runs it: our backbone and those of other libraries, in turns.

    python benchmarks/alone.py --packages .venv-peers/lib/python3.11/site-packages --json benchmarks/amd_alone.json
    python benchmarks/alone.py --form compiled --packages ... --json benchmarks/amd_alone_compiled.json

In ``benchmark.py``, where all models take turns in one process, each finds the memory that the others have freed. Here
each process has one model; all of them run once, in a random order, before the next turn. Forms other than eager take
turns with our backbone in eager mode.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import shlex
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import benchmark
from bench_models import PEERS

OURS = 'auto'
OURS_EAGER = 'auto, eager'
# Options of benchmark.py for all models alike.
FORMS = {'eager': [], 'compiled': ['--compile'], 'bfloat16': ['--dtype', 'bfloat16']}
# Options of benchmark.py, and the number of steps, of which the first third is not timed.
CASES = {
    'inference, 1 x 224 x 224': (['--size', '224', '224'], 30),
    'inference, 8 x 224 x 224': (['--size', '224', '224', '--batch', '8'], 9),
    'inference, 1 x 512 x 512': (['--size', '512', '512'], 12),
    'inference, 1 x 800 x 1344': (['--size', '800', '1344'], 6),
    'training step, 2 x 512 x 512': (['--size', '512', '512', '--batch', '2', '--mode', 'train'], 6),
}


def main() -> None:
    if sys.argv[1:2] == ['--of']:
        print(json.dumps(seconds_of(sys.argv[2], int(sys.argv[3]), sys.argv[4:])))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--turns', type=int, default=3, help='processes of each model (default: %(default)s)')
    parser.add_argument('--cases', nargs='+', choices=CASES, default=list(CASES), help='replace only these in the file')
    parser.add_argument('--form', choices=FORMS, default='eager', help='compiled by torch.compile, or with autocast')
    parser.add_argument('--peers', nargs='*', choices=PEERS, default=list(PEERS))
    parser.add_argument('--packages', type=Path, help='as of benchmark.py')
    parser.add_argument('--json', type=Path, required=True)
    args = parser.parse_args()
    packages = ['--packages', str(args.packages)] if args.packages else []
    # The model and its options in each row.
    runs = {name: (name, FORMS[args.form]) for name in [OURS, *args.peers]}
    if args.form != 'eager':
        runs[OURS_EAGER] = (OURS, FORMS['eager'])
    before = json.loads(args.json.read_text()) if args.json.exists() else {'seconds': {}, 'first_calls': {}}
    seconds: dict[str, dict[str, list[float]]] = before['seconds'] | {case: {} for case in args.cases}
    first_calls: dict[str, dict[str, list[float]]] = before['first_calls'] | {case: {} for case in args.cases}
    for turn in range(args.turns):
        for case in args.cases:
            options, steps = CASES[case]
            for name in random.sample(list(runs), len(runs)):
                model, form_options = runs[name]
                own = [*options, *form_options, *packages]
                command = [sys.executable, '-W', 'ignore', __file__, '--of', model, str(steps), *own]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                first, *times = json.loads(done.stdout.splitlines()[-1])
                first_calls[case].setdefault(name, []).append(first)
                seconds[case].setdefault(name, []).append(statistics.median(times[steps // 3 - 1 :]))
        print(f'turn {turn + 1} of {args.turns} is done', file=sys.stderr)
    report: dict[str, Any] = {
        'command': shlex.join(['python', 'benchmarks/alone.py', *sys.argv[1:]]),
        'date': datetime.date.today().isoformat(),
        'machine': benchmark.machine(argparse.Namespace(device='cpu')),
        'form': args.form,
        'seconds': seconds,
        'first_calls': first_calls,
        'ratios': {case: ratios(own) for case, own in seconds.items()},
    }
    args.json.write_text(json.dumps(report, indent=1) + '\n')
    for case, own in report['ratios'].items():
        print(case, *(f'{name} {statistics.median(values):.2f}' for name, values in own.items()), sep=', ')


def seconds_of(name: str, steps: int, options: list[str]) -> list[float]:
    """Return the times of the steps of a model in this process; the first one compiles it."""
    sys.argv[1:] = options
    args = benchmark.parse_args()
    model, img = benchmark.build(name, args), benchmark.make_image(args)
    return [benchmark.elapsed(lambda: benchmark.step(model, img, args), 'cpu') for _ in range(steps)]


def ratios(seconds: dict[str, list[float]]) -> dict[str, list[float]]:
    """Return the time of each model relative to ours, turn by turn."""
    return {
        name: [time / ours for time, ours in zip(times, seconds[OURS], strict=True)]
        for name, times in seconds.items()
        if name != OURS
    }


if __name__ == '__main__':
    main()

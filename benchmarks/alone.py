"""Time Swin-T in a process of its own, as a user runs it: our backbone and those of other libraries, in turns.

    python benchmarks/alone.py --packages .venv-peers/lib/python3.11/site-packages \\
        --json benchmarks/results/zen5_alone.json
    python benchmarks/alone.py --form compiled --packages ... --json benchmarks/results/zen5_alone_compiled.json

In ``benchmark.py``, where all models take turns in one process, each finds the memory that the others have freed. Here
each model has a process, and the processes take turns in a random order, so that a machine that gets slower gets slower
for all. Forms other than eager take turns with our backbone in eager mode.
"""

from __future__ import annotations

import argparse
import contextlib
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
# Options of benchmark.py, and the number of steps of each turn.
CASES = {
    'inference, 1 x 224 x 224': (['--size', '224', '224'], 5),
    'inference, 8 x 224 x 224': (['--size', '224', '224', '--batch', '8'], 2),
    'inference, 1 x 512 x 512': (['--size', '512', '512'], 3),
    'inference, 1 x 800 x 1344': (['--size', '800', '1344'], 1),
    'training step, 2 x 512 x 512': (['--size', '512', '512', '--batch', '2', '--mode', 'train'], 1),
}
WARM_UP = 3  # steps


def main() -> None:
    if sys.argv[1:2] == ['--of']:
        serve(sys.argv[2], sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--processes', type=int, default=2, help='of each model, in sequence (default: %(default)s)')
    parser.add_argument('--turns', type=int, default=10, help='of each process (default: %(default)s)')
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
    empty: dict[str, Any] = {'seconds': {}, 'first_calls': {}, 'ratios': {}}
    measured = json.loads(args.json.read_text()) if args.json.exists() else empty
    for case in args.cases:
        for of_cases in (measured['seconds'], measured['first_calls'], measured['ratios']):
            of_cases[case] = {}
        for _ in range(args.processes):
            first, seconds = in_turns(case, runs, packages, args.turns)
            for name, times in seconds.items():
                measured['first_calls'][case].setdefault(name, []).append(first[name])
                measured['seconds'][case].setdefault(name, []).append(statistics.median(times))
                if name != OURS:
                    relative = [time / ours for time, ours in zip(times, seconds[OURS], strict=True)]
                    measured['ratios'][case].setdefault(name, []).append(statistics.median(relative))
        listed = [f'{name} {statistics.median(values):.2f}' for name, values in measured['ratios'][case].items()]
        print(case, *listed, sep=', ', flush=True)
        report: dict[str, Any] = {
            'command': shlex.join(['python', 'benchmarks/alone.py', *sys.argv[1:]]),
            'date': datetime.date.today().isoformat(),
            'machine': benchmark.machine(argparse.Namespace(device='cpu')),
            'form': args.form,
            **{key: measured[key] for key in empty},
        }
        args.json.write_text(json.dumps(report, indent=1) + '\n')


def in_turns(
    case: str,
    runs: dict[str, tuple[str, list[str]]],
    packages: list[str],
    turns: int,
) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Start a process of each model, and return the time of its first call and those of its turns."""
    options, steps = CASES[case]
    first, seconds = {}, {name: [] for name in runs}
    with contextlib.ExitStack() as stack:
        processes = {}
        for name, (model, form_options) in runs.items():
            command = [sys.executable, '-W', 'ignore', __file__, '--of', model, *options, *form_options, *packages]
            pipes = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            processes[name] = stack.enter_context(pipes)
            first[name], *_ = time_steps(processes[name], WARM_UP)
        for _ in range(turns):
            for name in random.sample(list(runs), len(runs)):
                times = time_steps(processes[name], steps)
                seconds[name].append(statistics.median(times))
    return first, seconds


def time_steps(process: subprocess.Popen[str], steps: int) -> list[float]:
    """Have a process that runs :func:`serve` run some steps, and return their times in seconds."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f'{steps}\n')
    process.stdin.flush()
    answer = process.stdout.readline()
    if not answer:
        raise RuntimeError(f'a benchmark has failed with exit code {process.wait()}')
    return json.loads(answer)


def serve(name: str, options: list[str]) -> None:
    """For each number on stdin, run so many steps of a model, and write their times; the very first one compiles it."""
    answers = sys.stdout
    sys.argv[1:] = options
    with contextlib.redirect_stdout(sys.stderr):  # other libraries print
        args = benchmark.parse_args()
        model, img = benchmark.build(name, args), benchmark.make_image(args)
        for line in sys.stdin:
            times = [benchmark.elapsed(lambda: benchmark.step(model, img, args), 'cpu') for _ in range(int(line))]
            print(json.dumps(times), file=answers, flush=True)


if __name__ == '__main__':
    main()

"""Kill `swin-dense train` at random times, resume it until completion, and compare with uninterrupted trainings.

    PYTHONPATH=. python benchmarks/killed_trainings.py --json benchmarks/killed_trainings.json

A third of the kills happen while a checkpoint is written. The trainings use stochastic depth and random augmentations.
Their final states must be bitwise identical: weights, optimizer, schedulers and random generators.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

from tests.processes import cli, environment
from tests.workbench.tiny_training import CASES, differences, write_config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--trainings', type=int, default=4, help='trainings per case (default: %(default)s)')
    parser.add_argument('--kills', type=int, default=5, help='maximum kills per training (default: %(default)s)')
    parser.add_argument('--seed', type=int, default=0, help='seed of the random times (default: %(default)s)')
    parser.add_argument('--json', type=Path)
    args = parser.parse_args()
    moments = random.Random(args.seed)
    cases = {}
    for name, lines in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            cases[name] = run_case(Path(folder), lines, args.trainings, args.kills, moments)
        print(name, cases[name], flush=True)
    report = {'seed': args.seed, 'torch': torch.__version__, 'cases': cases}
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=2) + '\n')
    sys.exit(any(case['differ'] for case in cases.values()))


def run_case(folder: Path, lines: str, trainings: int, kills: int, moments: random.Random) -> dict[str, int]:
    """Return the counts of all trainings of one config, including the number with another final state."""
    config = write_config(folder, lines)
    cli('train', config, '--work-dir', folder / 'undisturbed')
    counts: Counter[str] = Counter(trainings=trainings, differ=0)
    for index in range(trainings):
        run = folder / str(index) / 'run'
        run.parent.mkdir()
        counts.update(train_until_done(config, run, kills, span_of(folder / 'undisturbed'), moments))
        counts['differ'] += bool(differences(folder / 'undisturbed', run))
    return dict(counts)


def train_until_done(config: Path, run: Path, kills: int, span: float, moments: random.Random) -> dict[str, int]:
    """Run a training, repeatedly kill it by SIGKILL and resume it, and finally let it complete.

    Args:
        config: config of the training.
        run: its work directory.
        kills: maximum number of kills. A training that completes earlier is not restarted.
        span: duration of an uninterrupted training in seconds, for the range of random times.
        moments: the random generator of these times.

    Returns:
        The number of kills, of kills during a save, and of resumed runs.
    """
    counts = {'kills': 0, 'in a save': 0, 'resumed': 0}
    while True:
        log = run.parent / f'{counts["kills"]}.log'
        with log.open('w') as file:
            command = [sys.executable, '-m', 'swin_dense', 'train', str(config), '--work-dir', str(run), '--resume']
            process = subprocess.Popen(command, stdout=file, stderr=file, env=environment())
        if counts['kills'] < kills:
            in_a_save = moments.random() < 1 / 3  # random times would rarely hit a save
            while process.poll() is None and 'Checkpoints will be saved' not in log.read_text():
                time.sleep(0.01)
            time.sleep(moments.uniform(0, 2 * span / (kills + 1)))
            while in_a_save and process.poll() is None and not any(run.glob('.unfinished-*')):
                time.sleep(0.0002)
            process.send_signal(signal.SIGKILL)
        process.wait()
        counts['resumed'] += 'going on from' in log.read_text()
        if process.returncode != -signal.SIGKILL:
            assert process.returncode == 0, log.read_text()
            return counts
        counts['kills'] += 1
        counts['in a save'] += any(run.glob('.unfinished-*'))


def span_of(run: Path) -> float:
    """Return the time in seconds between the first and the last line in the log of a completed training."""
    (log,) = run.glob('*/*.log')
    first, *_, last = re.findall(r'\d+/\d+ (\d+):(\d+):(\d+) - ', log.read_text())
    first, last = ((int(hours) * 60 + int(minutes)) * 60 + int(seconds) for hours, minutes, seconds in (first, last))
    return (last - first) % (24 * 60 * 60)


if __name__ == '__main__':
    main()

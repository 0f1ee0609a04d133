"""Kill trainings by tools/train.py at random moments, resume them to their end, and compare with undisturbed ones.

    PYTHONPATH=. python benchmarks/killed_trainings.py --json benchmarks/killed_trainings.json

A third of the kills wait for the next save and hit it in its midst. Every training draws drop path and augmentations,
and its end is compared bit for bit: weights, optimiser, schedulers, and the state of the random generators.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch

from tests.tools.killed_training import CASES, differences, span_of, train_until_done
from tests.tools.test_runners import train
from tests.tools.tiny_training import write_config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--trainings', type=int, default=4, help='of each case (default: %(default)s)')
    parser.add_argument('--kills', type=int, default=5, help='of each training, at most (default: %(default)s)')
    parser.add_argument('--seed', type=int, default=0, help='of the moments (default: %(default)s)')
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
    """Return what happened to the trainings of one config, and how many of them ended in another way."""
    config = write_config(folder, lines)
    train(config, '--work-dir', folder / 'undisturbed')
    counts: Counter[str] = Counter(trainings=trainings, differ=0)
    for index in range(trainings):
        run = folder / str(index) / 'run'
        run.parent.mkdir()
        counts.update(train_until_done(config, run, kills, span_of(folder / 'undisturbed'), moments))
        counts['differ'] += bool(differences(folder / 'undisturbed', run))
    return dict(counts)


if __name__ == '__main__':
    main()

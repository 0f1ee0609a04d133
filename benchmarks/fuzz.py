"""Fuzz all kinds of inputs of the fuzz tests, and count the outcomes.

    python benchmarks/fuzz.py --count 100000 --out benchmarks/fuzz.json

Each example must be accepted, or refused with a documented error. Any other outcome is a defect, and is printed with
its example.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import resource
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.fuzzing import KINDS

ROUNDS = 50


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--count', type=int, default=100000, help='total number of examples (default: %(default)s)')
    parser.add_argument('--kinds', nargs='+', default=list(KINDS), help='only kinds whose name contains one of these')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--memory', type=int, default=12, help='memory limit in GiB (default: %(default)s)')
    parser.add_argument('--out', type=Path)
    parser.add_argument(
        '--add', nargs='+', type=Path, default=[], metavar='JSON', help='reports of other seeds, whose counts are added'
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable()
    # An excessive allocation must raise an error instead of exhausting the machine.
    resource.setrlimit(resource.RLIMIT_AS, (args.memory << 30, resource.RLIM_INFINITY))
    kinds = [kind for kind in KINDS if any(word in kind for word in args.kinds)]
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in kinds}
    defects: dict[str, str] = {}
    start = time.perf_counter()
    # Alternate between kinds, so that an interrupted run has counts of all kinds.
    with contextlib.suppress(KeyboardInterrupt):
        for number in range(ROUNDS):
            for kind in kinds:
                share = args.count * KINDS[kind].share // 100
                wanted = share * (number + 1) // ROUNDS - share * number // ROUNDS
                try_examples(kind, wanted, args.seed + number, counts[kind], defects)
            print(f'{number + 1} of {ROUNDS}, {time.perf_counter() - start:.0f} s', file=sys.stderr, flush=True)
    seeds = [args.seed]
    for path in args.add:
        other = json.loads(path.read_text())
        seeds += other['seeds']
        for kind, count in other['by_kind'].items():
            counts[kind].update(count)
    text = json.dumps(figures(counts, seeds), indent=2) + '\n'
    if args.out is not None:
        args.out.write_text(text)
    print(text, *defects.values(), sep='\n')
    return 1 if defects else 0


def figures(counts: dict[str, Counter[str]], seeds: list[int]) -> dict[str, Any]:
    outcomes = {what: sum(count[what] for count in counts.values()) for what in ('taken', 'refused', 'defect')}
    by_kind = {kind: dict(count) for kind, count in counts.items()}
    return {'examples': sum(outcomes.values()), 'seeds': seeds, **outcomes, 'by_kind': by_kind}


def try_examples(kind: str, count: int, number: int, counts: Counter[str], defects: dict[str, str]) -> None:

    @seed(number)
    @settings(
        max_examples=count,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(KINDS[kind].strategy)
    def run(example):
        count_one(kind, example, counts, defects)

    run()


def count_one(kind: str, example: Any, counts: Counter[str], defects: dict[str, str]) -> None:
    """Try one example, and store the first defect of each source line."""
    try:
        counts[KINDS[kind].attempt(example)] += 1
    except Exception as error:
        counts['defect'] += 1
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f'{kind}: {type(error).__name__} in {last.filename}:{last.lineno}'
        if where not in defects:
            defects[where] = f'{where}\n{example!r}\n{traceback.format_exc()}'
            print(defects[where], file=sys.stderr, flush=True)


if __name__ == '__main__':
    sys.exit(main())

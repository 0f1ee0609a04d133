"""Let atheris steer the examples of ``tests/fuzzing.py`` into code that no example has reached yet, and count.

    pip install atheris==3.0.0        # Linux, Python 3.11 to 3.13; needed for this script alone
    PYTHONPATH=. python benchmarks/fuzz_guided.py --seconds 600 --json benchmarks/fuzz_guided.json

Every kind gets the same time, in a process of its own. An edge is a step from one place of the package's code to
another; those of the first input count what any input runs through.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import pkgutil
import re
import resource
import subprocess
import sys
import tempfile
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

WORDS = ('options of both', 'checkpoint files', 'state dicts', 'config files', 'command lines')


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--seconds', type=int, default=600, help='in all (default: %(default)s)')
    parser.add_argument('--kinds', nargs='+', default=WORDS, help='those whose name holds a word')
    parser.add_argument('--memory', type=int, default=12, help='limit of a process in GiB (default: %(default)s)')
    parser.add_argument('--seed', type=int, default=1)
    parser.add_argument('--json', type=Path)
    parser.add_argument('--worker', type=Path, help=argparse.SUPPRESS)  # where the figures of one kind go
    args = parser.parse_args()
    if args.worker is not None:
        fuzz(args.kinds[0], args)
        return 0
    by_kind = {}
    for word in args.kinds:
        kind, figures = in_a_process(word, args)
        by_kind[kind] = figures
        print(kind, figures, file=sys.stderr, flush=True)
    figures = {
        'atheris': version('atheris'),
        'seconds': args.seconds,
        'seed': args.seed,
        **{what: sum(count.get(what, 0) for count in by_kind.values()) for what in ('taken', 'refused', 'defect')},
        'by_kind': by_kind,
    }
    text = json.dumps(figures, indent=2) + '\n'
    if args.json is not None:
        args.json.write_text(text)
    print(text)
    return 1 if figures['defect'] else 0


def in_a_process(word: str, args: argparse.Namespace) -> tuple[str, dict[str, int]]:
    """Fuzz one kind for its part of the time; libFuzzer ends the process that it runs in."""
    with tempfile.TemporaryDirectory() as folder:
        counted = Path(folder, 'counted.json')
        own = ['--kinds', word, '--seconds', str(args.seconds // len(args.kinds)), '--worker', str(counted)]
        same = ['--memory', str(args.memory), '--seed', str(args.seed)]
        done = subprocess.run(
            [sys.executable, __file__, *own, *same], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
        )
        said = done.stderr.decode(errors='replace')
        edges = [int(number) for number in re.findall(r'^#\d+\s.* cov: (\d+)', said, re.MULTILINE)]
        if done.returncode != 0 or not edges:
            raise RuntimeError(f'{word}: the fuzzer ended with {done.returncode}\n{said[-3000:]}')
        kind, counts, defects = json.loads(counted.read_text())
    print(*defects, sep='\n', file=sys.stderr)
    return kind, {**counts, 'edges_of_the_first': edges[0], 'edges': edges[-1]}


def fuzz(word: str, args: argparse.Namespace) -> None:
    """Fuzz the kind whose name holds a word, and keep what was counted up to date in a file."""
    import atheris

    with atheris.instrument_imports(include=['swin_dense']):
        import swin_dense

        for module in pkgutil.walk_packages(swin_dense.__path__, 'swin_dense.'):  # some are imported late
            importlib.import_module(module.name)
    import torch
    from hypothesis import HealthCheck, given, settings

    from benchmarks.fuzz import count_one
    from tests.fuzzing import KINDS

    torch.set_num_threads(1)
    logging.disable()
    resource.setrlimit(resource.RLIMIT_AS, (args.memory << 30, resource.RLIM_INFINITY))
    kind = next(kind for kind in KINDS if word in kind)
    counts: Counter[str] = Counter()
    defects: dict[str, str] = {}

    @settings(database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(KINDS[kind].strategy)
    def run(example: Any) -> None:
        count_one(kind, example, counts, defects)
        args.worker.write_text(json.dumps([kind, counts, list(defects.values())]))

    # What the fuzzer writes about an input that ends the process goes where the figures go.
    options = [f'-max_total_time={args.seconds}', f'-seed={args.seed}', '-max_len=2048', '-len_control=0']
    atheris.Setup(
        [__file__, *options, f'-rss_limit_mb={args.memory << 10}', f'-artifact_prefix={args.worker}.'],
        run.hypothesis.fuzz_one_input,
    )
    atheris.Fuzz()


if __name__ == '__main__':
    sys.exit(main())

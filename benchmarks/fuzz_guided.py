"""Coverage-guided fuzzing with atheris, with the examples of ``tests/fuzzing.py``.

    pip install atheris==3.0.0        # Linux, Python 3.11 to 3.13; only this script needs it
    PYTHONPATH=. python benchmarks/fuzz_guided.py --seconds 600 --json benchmarks/fuzz_guided.json

Each kind runs for the same time in a separate process. An edge is a transition between two code locations of the
package. The edges of the first input are those that every input covers.
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
    parser.add_argument('--seconds', type=int, default=600, help='total time (default: %(default)s)')
    parser.add_argument('--kinds', nargs='+', default=WORDS, help='only kinds whose name contains one of these')
    parser.add_argument('--memory', type=int, default=12, help='memory limit in GiB (default: %(default)s)')
    parser.add_argument('--seed', type=int, default=1)
    parser.add_argument('--json', type=Path)
    parser.add_argument('--worker', type=Path, help=argparse.SUPPRESS)  # output file for the counts of one kind
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
    """Fuzz one kind for its share of the time, in a separate process, because libFuzzer ends its process."""
    with tempfile.TemporaryDirectory() as folder:
        counted = Path(folder, 'counted.json')
        own = ['--kinds', word, '--seconds', str(args.seconds // len(args.kinds)), '--worker', str(counted)]
        same = ['--memory', str(args.memory), '--seed', str(args.seed)]
        done = subprocess.run(
            [sys.executable, __file__, *own, *same], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
        )
        log = done.stderr.decode(errors='replace')
        edges = [int(number) for number in re.findall(r'^#\d+\s.* cov: (\d+)', log, re.MULTILINE)]
        if done.returncode != 0 or not edges:
            raise RuntimeError(f'{word}: the fuzzer ended with {done.returncode}\n{log[-3000:]}')
        kind, counts, defects = json.loads(counted.read_text())
    print(*defects, sep='\n', file=sys.stderr)
    return kind, {**counts, 'edges_of_the_first': edges[0], 'edges': edges[-1]}


def fuzz(word: str, args: argparse.Namespace) -> None:
    """Fuzz the kind whose name contains ``word``, and write the counts to a file after each example."""
    import atheris

    with atheris.instrument_imports(include=['swin_dense']):
        import swin_dense

        for module in pkgutil.walk_packages(swin_dense.__path__, 'swin_dense.'):  # also lazy imports
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

    # libFuzzer writes inputs that end the process next to the output file.
    options = [f'-max_total_time={args.seconds}', f'-seed={args.seed}', '-max_len=2048', '-len_control=0']
    atheris.Setup(
        [__file__, *options, f'-rss_limit_mb={args.memory << 10}', f'-artifact_prefix={args.worker}.'],
        run.hypothesis.fuzz_one_input,
    )
    atheris.Fuzz()


if __name__ == '__main__':
    sys.exit(main())

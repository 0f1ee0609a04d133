"""Change one token of the package at a time, and count the changes that the quick tests of its folder notice.

    python benchmarks/mutants.py run models --count 40     # writes benchmarks/mutants/models.json; goes on if killed
    python benchmarks/mutants.py again models              # the survivors once more, after tests were added
    python benchmarks/mutants.py again models --tests tests/mm/test_parity.py -m slow  # the same, by other tests
    python benchmarks/mutants.py table                     # the table of all folders

The places are drawn uniformly from all places of a folder, so that lines that no test executes are among them. The
tests first run once on the unchanged package, each with the lines that it executes. Then a change is tried by the tests
that execute its line, fastest first, in a process forked from one with the libraries already imported, until one fails.
A run that takes far longer than on the unchanged package is stopped, and counts as caught. All of it happens in a copy
of the repository, on Linux only.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from mutants_places import ROOT, Mutant, mutants_of
from mutants_plugins import Chooser, Recorder, trace_programs

RESULTS = ROOT / 'benchmarks' / 'mutants'
ALIVE = ('survived', 'not executed')
TIMEOUTS = (-signal.SIGPROF, -signal.SIGKILL)  # of one test, and of the whole run
LIBRARIES = (
    'torch torch.onnx torch.export torch.distributed hypothesis scipy.ndimage scipy.optimize PIL.Image cv2 yaml '
    'mmengine.runner mmdet.apis mmseg.apis onnx onnxruntime onnxscript safetensors.torch tifffile imagecodecs zarr '
    'pyarrow.parquet huggingface_hub triton.language skimage pandas tqdm openvino'
)


class Forks:
    """Runs pytest in a copy of the repository, in processes forked from this one, which has imported the libraries."""

    def __init__(self, folder: Path) -> None:
        self.copy = folder
        listed = subprocess.check_output(['git', 'ls-files', '-co', '--exclude-standard'], cwd=ROOT, text=True)
        for name in listed.splitlines():
            if not (ROOT / name).is_file():  # deleted, and not yet staged
                continue
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
        trace_programs(folder)
        os.environ.update(PYTHONPATH=str(folder), OMP_NUM_THREADS='1', TRITON_INTERPRET='1')
        for library in LIBRARIES.split():
            with suppress(ImportError):
                importlib.import_module(library)

    def pytest(self, make: Callable[[Path], Any], options: Iterable[str], seconds: float) -> tuple[int, Any]:
        """Return the exit status, negative for a signal, and what the plugin wrote."""
        result = self.copy / 'result.json'
        result.unlink(missing_ok=True)
        child = os.fork()
        if child == 0:
            os.setsid()
            os.dup2(os.open(self.copy / 'log', os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
            os.dup2(1, 2)
            os.chdir(self.copy)
            sys.path.insert(0, str(self.copy))
            resource.setrlimit(resource.RLIMIT_DATA, (12 << 30, 12 << 30))
            common = ['-q', '-p', 'no:cacheprovider', '--basetemp', str(self.copy / 'tmp')]
            code = 3
            with suppress(SystemExit):
                code = int(pytest.main([*common, *options], plugins=[make(self.copy)]))
            os._exit(code)
        status = -signal.SIGKILL.value
        for _ in range(int(10 * seconds)):  # not by the clock, which goes on while processes are stopped
            if (ended := os.waitpid(child, os.WNOHANG))[0]:
                status = os.waitstatus_to_exitcode(ended[1])
                break
            time.sleep(0.1)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(child, 0)
        return status, json.loads(result.read_text()) if result.exists() else None


class Trials:
    """Tries mutants with the tests that execute them."""

    def __init__(self, forks: Forks, options: list[str], variants: int, budget: float) -> None:
        self.forks, self.budget = forks, budget
        start = time.monotonic()
        status, found = forks.pytest(lambda copy: Recorder(copy, variants), options, 7200)
        if found is None or status not in (0, 1):
            raise RuntimeError(f'pytest ended with {status}\n{(forks.copy / "log").read_text()[-3000:]}')
        self.seconds: dict[str, float] = found['tests']
        self.lines = {name: frozenset(lines) for name, lines in found['lines'].items()}
        self.kills: Counter[str] = Counter()
        print(f'{len(self.seconds)} tests in {time.monotonic() - start:.0f} s; without', *found['others'], flush=True)

    def tests_of(self, mutant: Mutant) -> list[str]:
        """Return the tests that execute a mutant: those that failed most often first, then the fastest that fit."""
        first, last = mutant.lines
        lines = {f'{mutant.file}:{line}' for line in range(first, last + 1)}
        executing = {name for name, executed in self.lines.items() if lines & executed}
        tests = [name for name in self.seconds if not executing.isdisjoint((name, _file_of(name)))]
        if not tests and '' in executing:  # data, read when the module is imported
            tests = list(self.seconds)
        tests.sort(key=lambda name: (-self.kills[name], self.seconds[name]))
        ends = itertools.accumulate(self.seconds[name] for name in tests)
        return [
            name for index, (name, end) in enumerate(zip(tests, ends, strict=True)) if end < self.budget or not index
        ]

    def attempt(self, mutant: Mutant) -> None:
        """Set the status of a mutant."""
        tests = self.tests_of(mutant)
        start = time.monotonic()
        if not tests:
            mutant.status = mutant.status or 'not executed'
        else:
            path = self.forks.copy / mutant.file
            source, times = path.read_bytes(), path.stat()
            path.write_bytes(mutant.applied(source))
            mutant.status, mutant.test = 'survived', ''
            # Most mutants fail the first tests, for which one file is collected.
            few = [name for name in tests if _file_of(name) == _file_of(tests[0])][:10]
            for part in few, [name for name in tests if name not in few]:
                if part and mutant.status == 'survived':
                    mutant.status, mutant.test = self.run(part)
            path.write_bytes(source)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
            mutant.tests = len(tests)
            self.kills[mutant.test] += 1
        mutant.first = mutant.first or mutant.status
        mutant.seconds = round(time.monotonic() - start, 1)

    def run(self, tests: list[str]) -> tuple[str, str]:
        """Run tests until one fails; return the status, and the name of that test."""
        seconds = {name: self.seconds[name] for name in tests}
        files = dict.fromkeys(map(_file_of, tests))
        limit = 600 + 20 * sum(seconds.values())
        status, failed = self.forks.pytest(lambda copy: Chooser(copy, seconds), ['-x', *files], limit)
        return 'survived' if status in (0, 5) else 'timeout' if status in TIMEOUTS else 'caught', failed or ''


def _file_of(test: str) -> str:
    return test.split('::')[0]


def draw(folder: str, count: int, seed: int) -> dict[str, Any]:
    """Return a report with mutants that have not been tried."""
    files = sorted((ROOT / 'swin_dense' / folder).rglob('*.py'))
    places = [mutant for path in files for mutant in mutants_of(path)]
    drawn = random.Random(seed).sample(places, min(count, len(places)))
    revision = subprocess.check_output(['git', 'rev-parse', 'HEAD'], cwd=ROOT, text=True).strip()
    command = ' '.join(['python', 'benchmarks/mutants.py', *sys.argv[1:]])
    return {'command': command, 'revision': revision, 'places': len(places), 'mutants': list(map(asdict, drawn))}


def run(args: argparse.Namespace) -> None:
    path = RESULTS / f'{args.folder}.json'
    report = json.loads(path.read_text()) if path.exists() else draw(args.folder, args.count, args.seed)
    mutants = [Mutant(**values) for values in report['mutants']]
    again = args.command == 'again'
    left = [one for one in mutants if (one.status in ALIVE and not one.equivalent if again else not one.status)]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        trials = Trials(
            Forks(Path(folder)),
            [*(args.tests or [f'tests/{args.folder}']), '-m', args.marks],
            args.variants,
            args.budget,
        )
        for mutant in left:
            trials.attempt(mutant)
            print(mutant.status, f'{mutant.file}:{mutant.line}', f'{mutant.before!r} -> {mutant.after!r}', end=' ')
            print(f'{mutant.tests} tests, {mutant.seconds} s, {mutant.test}', flush=True)
            report['mutants'] = list(map(asdict, mutants))
            unfinished = path.with_suffix('.part')
            unfinished.write_text(json.dumps(report, indent=1) + '\n')
            unfinished.replace(path)


def table() -> None:
    """Print the table of all folders, and the mutants that no test can notice."""
    heads = ('places', 'mutants', 'caught at first', 'survived', 'not executed', 'caught now', 'not noticeable', 'left')
    rows, unnoticeable = {}, []
    for path in sorted(RESULTS.glob('*.json')):
        report = json.loads(path.read_text())
        mutants = [Mutant(**values) for values in report['mutants'] if values['status']]
        first, now = Counter(one.first for one in mutants), Counter(one.status for one in mutants)
        equivalent = [one for one in mutants if one.equivalent]
        unnoticeable += equivalent
        caught = now['caught'] + now['timeout']
        at_first = first['caught'] + first['timeout'], first['survived'], first['not executed']
        left = len(mutants) - caught - len(equivalent)
        rows[path.stem] = report['places'], len(mutants), *at_first, caught, len(equivalent), left
    rows['all'] = tuple(map(sum, zip(*rows.values(), strict=True)))
    print('| folder |', ' | '.join(heads), '|')
    print('| --- ' * (len(heads) + 1) + '|')
    for name, counts in rows.items():
        print(f'| {name} |', ' | '.join(map(str, counts)), '|')
    print()
    for one in unnoticeable:
        print(
            f'- `{one.file.removeprefix("swin_dense/")}:{one.line}`, `{one.before}` to `{one.after}`: {one.equivalent}'
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest='command', required=True)
    for name in ('run', 'again'):
        command = commands.add_parser(name)
        command.add_argument('folder', help='a folder of swin_dense')
        command.add_argument('--count', type=int, default=40, help='number of mutants (default: %(default)s)')
        command.add_argument('--seed', type=int, default=0)
        command.add_argument('--tests', nargs='+', help='arguments of pytest (default: those of the folder)')
        command.add_argument(
            '--budget', type=float, default=15, help='processor seconds of tests per mutant (default: %(default)s)'
        )
        command.add_argument('--variants', type=int, default=1000, help='most parametrisations of a test that are run')
        command.add_argument('-m', dest='marks', default='not slow and not long', help='default: %(default)s')
    commands.add_parser('table')
    args = parser.parse_args()
    if args.command == 'table':
        table()
    else:
        RESULTS.mkdir(exist_ok=True)
        run(args)


if __name__ == '__main__':
    main()

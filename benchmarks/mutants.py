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
import ast
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
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
from mutants_plugins import Chooser, Recorder, trace_programs

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / 'benchmarks' / 'mutants'
ALIVE = ('survived', 'not executed')
TIMEOUTS = (-signal.SIGPROF, -signal.SIGKILL)  # of one test, and of the whole run
LIBRARIES = (
    'torch torch.onnx torch.export torch.distributed hypothesis scipy.ndimage scipy.optimize PIL.Image cv2 yaml '
    'mmengine.runner mmdet.apis mmseg.apis onnx onnxruntime onnxscript safetensors.torch tifffile imagecodecs zarr '
    'pyarrow.parquet huggingface_hub triton.language skimage pandas tqdm openvino'
)
OPERATORS = {
    ast.Lt: ('<', '<='),
    ast.LtE: ('<=', '<'),
    ast.Gt: ('>', '>='),
    ast.GtE: ('>=', '>'),
    ast.Eq: ('==', '!='),
    ast.NotEq: ('!=', '=='),
    ast.Is: ('is', 'is not'),
    ast.IsNot: ('is not', 'is'),
    ast.In: ('in', 'not in'),
    ast.NotIn: ('not in', 'in'),
    ast.Add: ('+', '-'),
    ast.Sub: ('-', '+'),
    ast.Mult: ('*', '//'),
    ast.FloorDiv: ('//', '*'),
    ast.Div: ('/', '*'),
    ast.Mod: ('%', '*'),
    ast.Pow: ('**', '*'),
    ast.And: ('and', 'or'),
    ast.Or: ('or', 'and'),
}


@dataclass
class Mutant:
    """A change of one token, and what the tests said.

    Attributes:
        line, column: where the text ``before`` begins, from 1 and, in bytes, from 0.
        lines: first and last line of what a test must execute: the statement, or the head of a compound statement; the
            whole function for its defaults; the whole file for what is executed when it is imported.
        first: the status of the first run: 'caught', 'timeout', 'survived', or 'not executed' by any quick test.
        status: the status of the last run.
        test: the test that failed.
        equivalent: why no test can notice it; written by hand.
    """

    file: str
    line: int
    column: int
    lines: tuple[int, int]
    before: str
    after: str
    first: str = ''
    status: str = ''
    test: str = ''
    tests: int = 0
    seconds: float = 0
    equivalent: str = ''

    def applied(self, source: bytes) -> bytes:
        start = sum(map(len, source.splitlines(keepends=True)[: self.line - 1])) + self.column
        end = start + len(self.before.encode())
        if source[start:end] != self.before.encode():
            raise ValueError(f'{self.file}:{self.line} is no longer {self.before!r}; remove the entry, and run again')
        return source[:start] + self.after.encode() + source[end:]


class Places:
    """All mutants of a file. Annotations, f-strings and ``if TYPE_CHECKING`` are left out."""

    def __init__(self, path: Path) -> None:
        self.file = str(path.relative_to(ROOT))
        self.source = path.read_bytes()
        self.starts = [0]
        for line in self.source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    def mutants(self) -> Iterator[Mutant]:
        for mutant in self._walk(ast.parse(self.source), (1, len(self.starts)), True):
            with suppress(SyntaxError):
                ast.parse(mutant.applied(self.source))
                yield mutant

    def _walk(self, node: Any, lines: tuple[int, int], on_import: bool) -> Iterator[Mutant]:
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.If) and ast.unparse(node.test) == 'TYPE_CHECKING'):
            return
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines, on_import = (node.lineno, node.end_lineno or node.lineno), False
        elif isinstance(node, ast.stmt) and not on_import:
            body = getattr(node, 'body', None)
            lines = node.lineno, max(node.lineno, body[0].lineno - 1) if body else node.end_lineno or node.lineno
        for start, end, after in self._changes(node):
            line = next(number for number, begin in enumerate(self.starts) if begin > start)
            before = self.source[start:end].decode()
            yield Mutant(self.file, line, start - self.starts[line - 1], lines, before, after)
        for name, value in ast.iter_fields(node):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and name not in ('annotation', 'returns'):
                    yield from self._walk(child, lines, on_import)

    def _span(self, node: Any) -> tuple[int, int]:
        return self.starts[node.lineno - 1] + node.col_offset, self.starts[node.end_lineno - 1] + node.end_col_offset

    def _operator(self, left: ast.AST, operator: ast.AST, right: ast.AST) -> tuple[int, int, str]:
        before, after = OPERATORS[type(operator)]
        start = self.source.index(before.encode(), self._span(left)[1], self._span(right)[0])
        return start, start + len(before), after

    def _changes(self, node: Any) -> Iterator[tuple[int, int, str]]:
        match node:
            case ast.Compare():
                yield from map(self._operator, [node.left, *node.comparators], node.ops, node.comparators)
            case ast.BinOp() if type(node.op) in OPERATORS:
                yield self._operator(node.left, node.op, node.right)
            case ast.BoolOp():
                for left, right in zip(node.values, node.values[1:]):  # noqa: B905
                    yield self._operator(left, node.op, right)
            case ast.UnaryOp(op=ast.Not()):
                yield self._span(node)[0], self._span(node.operand)[0], ''
            case ast.Constant(value=bool()):
                yield *self._span(node), str(not node.value)
            case ast.Constant(value=int() | float()):
                yield *self._span(node), repr(node.value * 2 if node.value % 1 else node.value + 1)
            case ast.Expr(value=ast.Call()):
                yield *self._span(node), 'pass'
            case ast.Return(value=ast.AST()) if not isinstance(node.value, ast.Constant):
                yield *self._span(node.value), 'None'
        conditions = [node.test] if isinstance(node, (ast.If, ast.While, ast.IfExp)) else getattr(node, 'ifs', [])
        for condition in conditions:
            if not isinstance(condition, ast.Constant):
                yield *self._span(condition), 'True'
                yield *self._span(condition), 'False'


class Forks:
    """Runs pytest in a copy of the repository, in processes forked from this one, which has imported the libraries."""

    def __init__(self, folder: Path) -> None:
        self.copy = folder
        listed = subprocess.check_output(['git', 'ls-files', '-co', '--exclude-standard'], cwd=ROOT, text=True)
        for name in listed.splitlines():
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

    def __init__(self, forks: Forks, options: list[str], budget: float) -> None:
        self.forks, self.budget = forks, budget
        start = time.monotonic()
        status, found = forks.pytest(Recorder, options, 7200)
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
    places = [mutant for path in files for mutant in Places(path).mutants()]
    drawn = random.Random(seed).sample(places, min(count, len(places)))
    revision = subprocess.check_output(['git', 'rev-parse', 'HEAD'], cwd=ROOT, text=True).strip()
    command = f'python benchmarks/mutants.py run {folder} --count {count} --seed {seed}'
    return {'command': command, 'revision': revision, 'places': len(places), 'mutants': list(map(asdict, drawn))}


def run(args: argparse.Namespace) -> None:
    path = RESULTS / f'{args.folder}.json'
    report = json.loads(path.read_text()) if path.exists() else draw(args.folder, args.count, args.seed)
    mutants = [Mutant(**values) for values in report['mutants']]
    again = args.command == 'again'
    left = [one for one in mutants if (one.status in ALIVE and not one.equivalent if again else not one.status)]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        trials = Trials(Forks(Path(folder)), [*(args.tests or [f'tests/{args.folder}']), '-m', args.marks], args.budget)
        for mutant in left:
            trials.attempt(mutant)
            print(mutant.status, f'{mutant.file}:{mutant.line}', f'{mutant.before!r} -> {mutant.after!r}', end=' ')
            print(f'{mutant.tests} tests, {mutant.seconds} s, {mutant.test}', flush=True)
            report['mutants'] = list(map(asdict, mutants))
            unfinished = path.with_suffix('.part')
            unfinished.write_text(json.dumps(report, indent=1) + '\n')
            unfinished.replace(path)


def table() -> None:
    heads = ('places', 'mutants', 'caught at first', 'not executed', 'survived', 'caught now', 'equivalent', 'left')
    rows = {}
    for path in sorted(RESULTS.glob('*.json')):
        report = json.loads(path.read_text())
        mutants = [Mutant(**values) for values in report['mutants'] if values['status']]
        first, now = Counter(one.first for one in mutants), Counter(one.status for one in mutants)
        equivalent = sum(bool(one.equivalent) for one in mutants)
        caught = now['caught'] + now['timeout']
        at_first = first['caught'] + first['timeout'], first['not executed'], first['survived']
        counts = (report['places'], len(mutants), *at_first, caught, equivalent, len(mutants) - caught - equivalent)
        rows[path.stem] = counts
    rows['all'] = tuple(map(sum, zip(*rows.values(), strict=True)))
    print('| folder |', ' | '.join(heads), '| caught of those that can be |')
    print('| --- ' * (len(heads) + 2) + '|')
    for name, counts in rows.items():
        share = counts[5] / (counts[1] - counts[6])
        print(f'| {name} |', ' | '.join(map(str, counts)), f'| {share:.0%} |')


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

"""The plugins of pytest with which ``mutants.py`` learns what tests execute, and runs chosen ones."""

from __future__ import annotations

import inspect
import json
import multiprocessing
import os
import signal
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

TRACE = 'MUTANTS_TRACE'  # the environment variable with the path of the file of executed lines


def trace(package: str, path: str) -> set[tuple[str, int]]:
    """Append each line of the package to a file when a process first executes it; return the set of those seen."""
    out = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    seen: set[tuple[str, int]] = set()

    def local(frame: Any, event: str, _: Any) -> Any:
        place = frame.f_code.co_filename, frame.f_lineno
        if event == 'line' and place not in seen:
            seen.add(place)
            os.write(out, f'{place[0]}:{place[1]}\n'.encode())
        return local

    def calls(frame: Any, event: str, _: Any) -> Any:
        return local if frame.f_code.co_filename.startswith(package) else None

    threading.settrace(calls)
    sys.settrace(calls)
    os.register_at_fork(after_in_child=seen.clear)
    return seen


def trace_programs(copy: Path) -> None:
    """Let Python programs that are started with this folder on their path trace themselves, if the variable is set."""
    head = 'from __future__ import annotations\nimport os, sys, threading\nfrom typing import Any\n\n'
    call = f'if {TRACE!r} in os.environ:\n    trace({str(copy / "swin_dense")!r}, os.environ[{TRACE!r}])\n'
    (copy / 'sitecustomize.py').write_text(head + inspect.getsource(trace) + '\n\n' + call)


class Plugin:
    """A plugin of pytest: examples that do not depend on chance, and forks in place of a server that forks."""

    def pytest_configure(self) -> None:
        from hypothesis import settings

        settings.register_profile('mutants', settings.get_profile('default'), derandomize=True, database=None)
        settings.load_profile('mutants')

    def pytest_collection_finish(self) -> None:
        if 'tests.processes' in sys.modules:
            sys.modules['tests.processes']._CONTEXT = multiprocessing.get_context('fork')  # type: ignore[attr-defined]


class Recorder(Plugin):
    """Records the processor time, in seconds, and the lines of each passing test.

    The lines of fixtures of a wider scope count for all tests of their file. Those of imports have the name ''.
    """

    def __init__(self, copy: Path, variants: int) -> None:
        self.copy, self.variants = copy, variants
        self.path = copy / 'executed'
        os.environ[TRACE] = str(self.path)  # for programs that tests start
        self.seen = trace(str(copy / 'swin_dense'), str(self.path))
        self.read = 0
        self.lines: dict[str, set[str]] = defaultdict(set)
        self.seconds: dict[str, float] = {}
        self.others: set[str] = set()
        self.current = ''
        self.start = 0.0

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        count: Counter[str] = Counter()
        for item in list(items):
            count[item.nodeid.split('[')[0]] += 1
            if count[item.nodeid.split('[')[0]] > self.variants:
                items.remove(item)

    def take(self, name: str) -> None:
        with self.path.open() as file:
            file.seek(self.read)
            self.lines[name].update(line.removeprefix(f'{self.copy}/') for line in file.read().split())
            self.read = file.tell()
        self.seen.clear()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.take(self.current)
        self.current = nodeid
        self.start = sum(os.times()[:4])

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, Any, Any]:
        self.take(self.current)
        result = yield
        self.take(self.current if fixturedef.scope == 'function' else self.current.split('::')[0])
        return result

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] = sum(os.times()[:4]) - self.start
        if report.outcome != 'passed':
            self.others.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self.take(self.current)
        tests = {name: seconds for name, seconds in self.seconds.items() if name not in self.others}
        lines = {name: sorted(lines) for name, lines in self.lines.items() if name not in self.others}
        (self.copy / 'result.json').write_text(
            json.dumps({'tests': tests, 'lines': lines, 'others': sorted(self.others)})
        )


class Chooser(Plugin):
    """Runs the chosen tests in their order, and writes the name of the one that fails."""

    def __init__(self, copy: Path, seconds: dict[str, float]) -> None:
        self.copy, self.seconds = copy, seconds
        sys.dont_write_bytecode = True

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        by_name = {item.nodeid: item for item in items}
        items[:] = [by_name[name] for name in self.seconds if name in by_name]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        signal.setitimer(signal.ITIMER_PROF, 20 + 10 * self.seconds[nodeid])  # processor time; its signal kills

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            (self.copy / 'result.json').write_text(json.dumps(report.nodeid))

"""The places of ``mutants.py``: which tokens of a file can be changed, and to what."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
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
        return self._walk(ast.parse(self.source), (1, len(self.starts)), True)

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


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Yield all mutants of a file that can be compiled."""
    places = Places(path)
    for mutant in places.mutants():
        with suppress(SyntaxError):
            ast.parse(mutant.applied(places.source))
            yield mutant

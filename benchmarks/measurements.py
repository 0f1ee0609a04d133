"""The stored results of all scripts in one form: a row for each measurement, of which any table is a pivot."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench_host import PROCESSORS, kind_of

RESULTS = Path(__file__).resolve().parent / 'results'


class Measurement(NamedTuple):
    """A number that was measured."""

    what: str  # 'inference' or 'training step'
    way: str  # the form of the model, or the step of a session on a GPU
    model: str  # 'auto' is ours
    size: str  # of the images, such as '2 x 800 x 1344', or of a map
    machine: str
    release: str  # '' in results of scripts that did not record it
    date: str
    quantity: str  # with its unit, such as 'wall ms'
    value: float  # the median, if it was measured several times
    spread: tuple[float, float]  # the least and the largest
    source: str  # the file, below benchmarks/results


def read(*sources: str) -> list[Measurement]:
    """Return the measurements in files below benchmarks/results, in their order."""
    found = []
    for source in sources:
        report = json.loads((RESULTS / source).read_text())
        machine = report.get('machine') or {}
        base = Measurement(
            what='',
            way='',
            model='',
            size='',
            machine=PROCESSORS.get(source.partition('_')[0]) or str(machine.get('device') or machine.get('processor')),
            release=machine.get('release', ''),
            date=machine.get('date') or report.get('date', ''),
            quantity='',
            value=0.0,
            spread=(0.0, 0.0),
            source=source,
        )
        found += _reader_of(report)(report, base)
    return found


def pivot(
    rows: Iterable[Measurement],
    line: Callable[[Measurement], tuple[Hashable, ...]],
    column: Callable[[Measurement], Hashable],
    columns: Sequence[Hashable],
    cell: Callable[[Sequence[float], Any], str],
) -> list[list[Any]]:
    """Return the lines of a table: their keys by ``line``, then the ``cell`` of the values in each column.

    Lines are in the order of the measurements. The text of a cell without values is ''.
    """
    found: dict[tuple[Hashable, ...], dict[Hashable, list[float]]] = {}
    for row in rows:
        if (name := column(row)) in columns:
            found.setdefault(line(row), {}).setdefault(name, []).append(row.value)
    return [
        [*key, *(cell(cells[name], name) if name in cells else '' for name in columns)] for key, cells in found.items()
    ]


def _reader_of(report: dict[str, Any]) -> Callable[[dict[str, Any], Measurement], Iterable[Measurement]]:
    if 'steps' in report:
        return _of_session
    if 'form' in report:
        return _of_alone
    if 'exports' in report:
        return _of_whole_models
    if 'options' in report:
        return _of_benchmark
    return _of_attention if isinstance(report['rows'], list) else _of_models


def _measured(base: Measurement, quantity: str, values: Sequence[float]) -> Measurement:
    return base._replace(quantity=quantity, value=statistics.median(values), spread=(min(values), max(values)))


def _of_alone(report: dict[str, Any], base: Measurement) -> Iterable[Measurement]:
    """Yield our time, and the times of the others relative to ours, of benchmarks/alone.py."""
    for case, seconds in report['seconds'].items():
        what, _, size = case.partition(', ')
        of_case = base._replace(what=what, way=report['form'], size=size)
        yield _measured(of_case._replace(model='auto'), 'ms', [1e3 * second for second in seconds['auto']])
        for model, ratios in report['ratios'][case].items():
            yield _measured(of_case._replace(model=model), 'times ours', ratios)


def _of_session(report: dict[str, Any], base: Measurement) -> Iterable[Measurement]:
    """Yield the numbers of benchmarks/gpu_session.py on whole models; the way is the step, and the precision."""
    for step, content in report['steps'].items():
        for row in content['rows']:
            if 'model' not in row:
                continue
            of_row = base._replace(
                what='training step' if row.get('training', False) else 'inference',
                way=f'{step}, bfloat16' if row.get('pure_bfloat16', False) else step,
                model=row['model'],
                size=' x '.join(map(str, (row.get('batch', ''), *row.get('size', ())))),
            )
            for key in ('wall_ms', 'device_ms', 'launches', 'peak_mib'):
                if row.get(key):
                    yield _measured(of_row, key, [row[key]])


def _of_whole_models(report: dict[str, Any], base: Measurement) -> Iterable[Measurement]:
    """Yield time and memory of whole models in each way to run them, of benchmarks/exports_whole.py."""
    for row in report['rows']:
        kind = kind_of(row['processor'])
        machine = row['processor'].partition(' (family')[0].partition(',')[0] if kind is None else PROCESSORS[kind]
        of_row = base._replace(
            what=row['model'], size=' x '.join(map(str, row['size'])), machine=f'{machine}, {row["threads"]}'
        )
        for way, figures in row.items():
            for key in ('ms', 'mib') if isinstance(figures, dict) else ():
                if key in figures:
                    yield _measured(of_row._replace(way=way), key, [figures[key]])


def _of_benchmark(report: dict[str, Any], base: Measurement) -> Iterable[Measurement]:
    """Yield times and memory of benchmarks/benchmark.py."""
    options = report['options']
    of_report = base._replace(
        what={'infer': 'inference', 'train': 'training step'}[options['mode']],
        way='compiled' if options['compile'] else 'eager',
        size=' x '.join(map(str, (options['batch'], *options['size']))),
    )
    for model, row in report['rows'].items():
        of_row = of_report._replace(model=model)
        yield of_row._replace(quantity='ms', value=row['median_ms'], spread=(row['p10_ms'], row['p90_ms']))
        if row.get('peak_mib'):
            yield _measured(of_row, 'peak_mib', [row['peak_mib']])


def _of_attention(report: dict[str, Any], base: Measurement) -> Iterable[Measurement]:
    """Yield the times of the operators on maps; the model is the backend."""
    for row in report['rows']:
        size = f'{row["height"]} x {row["width"]}, {row["channels"]} channels, {row["window"]}'
        for key in ('inference_ms', 'training_ms'):
            yield _measured(base._replace(way=row['dtype'], model=row['backend'], size=size), key, [row[key]])


def _of_models(report: dict[str, Any], base: Measurement) -> Iterable[Measurement]:
    """Yield the costs of the published models, of benchmarks/models.py."""
    size = ' x '.join(map(str, (1, *report['size'])))
    for model, row in report['rows'].items():
        for key in ('parameters', 'flops', 'ms'):
            yield _measured(base._replace(what='inference', way='eager', model=model, size=size), key, [row[key]])

"""Results in one form: runs on a machine, each with a row for every measurement. Any table or chart is made from rows.

A file below benchmarks/results is a list of runs. A run has what holds for all of its rows, ``RUN_FIELDS``, remarks
such as ``note``, ``load_average`` or ``absent``, the models that could not be imported, and rows, lists of ``COLUMNS``.
Releases and dates that a script did not record are ''. Three files have other forms: ``originals.json`` has words,
``real_data.json`` losses and scores, ``stacks.json`` outcomes of tests and checksums.
"""

from __future__ import annotations

import json
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench_host import describe

RESULTS = Path(__file__).resolve().parent / 'results'
RUN_FIELDS = ('command', 'device', 'machine', 'release', 'date', 'versions', 'settings', 'columns', 'rows')
NAMES = ('what', 'way', 'model', 'size', 'quantity')  # by which a row is told from the others of its run
COLUMNS = (*NAMES, 'unit', 'value', 'spread', 'samples')


class Measurement(NamedTuple):
    """A number that was measured, with what tells it from others."""

    what: str  # such as 'inference' or 'training step'
    way: str  # the form of the model, its runtime, or the step of a session on a GPU
    model: str  # 'auto' is ours
    size: str  # of the images, such as '2 x 800 x 1344', or of a map
    quantity: str
    unit: str
    value: float  # the median of the samples
    spread: Sequence[float] | None  # the least and the largest sample, or p10 and p90; None for one sample
    samples: Sequence[Any] | None  # in the order of processes, of each the rounds; None for one, or if not recorded
    machine: str
    release: str
    date: str
    source: str  # the file, below benchmarks/results
    run: Mapping[str, Any]


def read(*sources: str) -> list[Measurement]:
    """Return the measurements in files below benchmarks/results, in their order."""
    found = []
    for source in sources:
        for run in runs_in(RESULTS / source):
            of_run = {name: run[name] for name in ('machine', 'release', 'date')}
            found += [Measurement(*row, **of_run, source=source, run=run) for row in run['rows']]
    return found


def runs_in(path: Path) -> list[dict[str, Any]]:
    """Return the runs in a file, none if there is no file."""
    return json.loads(path.read_text()) if path.exists() else []


class Run:
    """A run of a script on this machine, which is written to its file with every row.

    It replaces the rows of earlier runs in the file with the same machine, settings and names; all others stay.

    Args:
        path: the file, or None to write nothing.
        device: 'cpu' or 'cuda'.
        packages: whose versions are recorded.
        settings: what holds for all rows, such as the number of threads.
    """

    def __init__(
        self, path: Path | None, device: str = 'cpu', packages: Sequence[str] = ('torch', 'triton'), **settings: Any
    ) -> None:
        self.path = path
        self.others = [] if path is None else runs_in(path)
        command = shlex.join(['python', f'benchmarks/{Path(sys.argv[0]).name}', *sys.argv[1:]])
        self.content: dict[str, Any] = {'command': command, 'device': device, **describe(device, packages)}
        self.content |= {'settings': settings, 'columns': COLUMNS, 'rows': []}

    def add(
        self,
        samples: float | Sequence[float],
        quantity: str,
        unit: str,
        *,
        what: str,
        model: str,
        size: str = '',
        way: str = 'eager',
        spread: Sequence[float] | None = None,
    ) -> None:
        """Add the median of samples, or a number that was measured once."""
        values = [samples] if isinstance(samples, (int, float)) else list(samples)
        is_one = len(values) == 1
        row = [what, way, model, size, quantity, unit, statistics.median(values)]
        row += [None, None] if is_one else [spread or (min(values), max(values)), values]
        self.content['rows'].append(row)
        self.save()

    def note(self, **remarks: Any) -> None:
        """Add remarks to the run."""
        self.content.update(remarks)
        self.save()

    def save(self) -> None:
        if self.path is not None:
            own = {_identity(self.content, row) for row in self.content['rows']}
            kept = []
            for run in self.others:
                rows = [row for row in run['rows'] if _identity(run, row) not in own]
                if rows or not run['rows']:  # some runs have remarks alone
                    kept.append({**run, 'rows': rows})
            self.others = kept
            write([*kept, self.content], self.path)


def write(runs: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write runs to a file as a whole, with a line for each fact and each row."""
    from swin_dense.utils.atomic import write_text

    texts = []
    for run in runs:
        facts = [f'{json.dumps(name)}: {json.dumps(value)}' for name, value in run.items() if name != 'rows']
        rows = ',\n  '.join(json.dumps(row) for row in run['rows'])
        texts.append('{\n ' + ',\n '.join([*facts, f'"rows": [\n  {rows}\n ]']) + '\n}')
    write_text(path, '[' + ',\n'.join(texts) + ']\n')


def _identity(run: Mapping[str, Any], row: Sequence[Any]) -> str:
    return json.dumps([run['machine'], run['settings'], *row[: len(NAMES)]], sort_keys=True)

"""Run notebooks and store their outputs in them; tests compare stored outputs with new ones.

    python tools/notebooks.py examples/notebooks/first_pyramid.ipynb

The cells of a notebook run in this process, in a temporary folder. Outputs are what a cell prints, its last value and
its figures. Cells that install (`%pip`) are left out: run this in an environment that has what they install. nbclient
would do the same with a Jupyter kernel, which the environment of the tests does without.
"""

from __future__ import annotations

import argparse
import ast
import base64
import contextlib
import io
import json
import os
import pprint
import sys
import tempfile
from pathlib import Path
from typing import Any


def run(notebook: dict[str, Any]) -> None:
    """Run the cells of a notebook in order, in the current folder, and set their outputs."""
    names: dict[str, Any] = {'__name__': '__main__'}
    cells = [cell for cell in notebook['cells'] if cell['cell_type'] == 'code']
    for number, cell in enumerate(cells):
        source = ''.join(cell['source'])
        if not source.startswith('%'):
            cell['execution_count'] = number
            cell['outputs'] = outputs(source, names, number)


def outputs(source: str, names: dict[str, Any], number: int) -> list[dict[str, Any]]:
    """Run the code of one cell and return its outputs in the format of notebooks."""
    tree = ast.parse(source)
    last = None
    if isinstance(tree.body[-1], ast.Expr):
        last = ast.Expression(tree.body[-1].value)
        del tree.body[-1]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(tree, f'cell {number}', 'exec'), names)
        value = eval(compile(last, f'cell {number}', 'eval'), names) if last else None
    found: list[dict[str, Any]] = []
    if printed.getvalue():
        text = printed.getvalue().splitlines(keepends=True)
        found.append({'name': 'stdout', 'output_type': 'stream', 'text': text})
    if value is not None:
        text = pprint.pformat(value).splitlines(keepends=True)
        found.append({'data': {'text/plain': text}, 'execution_count': number, 'metadata': {}})
        found[-1]['output_type'] = 'execute_result'
    return found + figures()


def figures() -> list[dict[str, Any]]:
    """Return the open figures of matplotlib as outputs, and close them."""
    if 'matplotlib.pyplot' not in sys.modules:
        return []
    pyplot = sys.modules['matplotlib.pyplot']
    found = []
    for number in pyplot.get_fignums():
        picture = io.BytesIO()
        pyplot.figure(number).savefig(picture, dpi=72, bbox_inches='tight')
        data = {'image/png': base64.b64encode(picture.getvalue()).decode() + '\n'}
        found.append({'data': data, 'metadata': {}, 'output_type': 'display_data'})
    pyplot.close('all')
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('notebooks', nargs='+', type=Path)
    os.environ['MPLBACKEND'] = 'agg'
    for path in [path.resolve() for path in parser.parse_args().notebooks]:
        notebook = json.loads(path.read_text())
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            run(notebook)
            os.chdir(path.parent)
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + '\n')


if __name__ == '__main__':
    main()

"""The notebooks give the outputs that are stored in them; the one on other libraries does so in tests/peers."""

import json
import os
import re
import runpy

import pytest

from tests.conftest import ROOT, some
from tests.processes import python, write_command

NOTEBOOKS = ROOT / 'examples' / 'notebooks'


def code_cells(path):
    return [cell for cell in json.loads(path.read_text())['cells'] if cell['cell_type'] == 'code']


def source(cell):
    return ''.join(cell['source'])


def stored(path):
    """Return the outputs of a notebook; of a picture, only that there is one."""
    outputs = [output for cell in code_cells(path) for output in cell['outputs']]
    return [output.get('text') or output['data'].get('text/plain', 'a picture') for output in outputs]


def compare_outputs(name, tmp_path, *options, **environment):
    """Run a copy of a notebook with tools/notebooks.py, and compare its outputs with the stored ones."""
    copy = tmp_path / f'{name}.ipynb'
    notebook = json.loads((NOTEBOOKS / copy.name).read_text())
    for cell in notebook['cells']:
        if 'outputs' in cell:
            cell['outputs'] = []
    copy.write_text(json.dumps(notebook))
    environment['PATH'] = f'{write_command(tmp_path / "bin")}:{os.environ["PATH"]}'
    python(*options, ROOT / 'tools' / 'notebooks.py', copy, cwd=tmp_path, **environment)
    assert stored(copy) == stored(NOTEBOOKS / copy.name)


@pytest.mark.slow
@pytest.mark.parametrize('name', some(['first_pyramid', 'own_data', 'export_without_torch'], every=3))
def test_a_notebook_gives_the_stored_outputs(name, tmp_path):
    compare_outputs(name, tmp_path)


BUILDER = runpy.run_path(str(ROOT / 'tools' / 'site.py'))  # its name is that of a module of Python


@pytest.mark.parametrize('path', sorted(NOTEBOOKS.glob('*.ipynb')), ids=lambda path: path.stem)
def test_a_notebook_installs_first_holds_small_outputs_and_is_a_page_of_the_site(path):
    first, *_ = cells = code_cells(path)
    assert source(first).startswith('%pip install')
    installs = [cell['outputs'] for cell in cells if source(cell).startswith('%')]
    assert len(installs) <= 2
    assert not any(installs)
    assert path.stat().st_size < 20_000
    notebook = json.loads(path.read_text())
    page = BUILDER['as_markdown'](notebook, path.name)
    assert page.startswith(source(notebook['cells'][0]).partition('\n')[0] + '\n')
    assert f'[Download the notebook]({path.name})' in page
    blocks = re.findall(r'^```python\n(.*?)\n```$', page, re.S | re.M)
    assert blocks == [source(cell).strip() for cell in cells]
    shown = page.count('\n```text\n') + page.count('](data:image/png;base64,')
    assert shown == len(stored(path)) > 0

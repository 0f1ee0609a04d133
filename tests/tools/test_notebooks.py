"""The notebooks run from top to bottom; the one on other libraries does so in tests/peers."""

import json
import os
import re
import runpy
import subprocess
import sys

import pytest

from tests.conftest import ROOT, some

NOTEBOOKS = ROOT / 'examples' / 'notebooks'


def code_of(name):
    """Return the code of a notebook as a script, without the cells that install."""
    cells = json.loads((NOTEBOOKS / f'{name}.ipynb').read_text())['cells']
    sources = [''.join(cell['source']) for cell in cells if cell['cell_type'] == 'code']
    return '\n'.join(source for source in sources if not source.startswith('%'))


@pytest.mark.slow
@pytest.mark.parametrize('name', some(['first_pyramid', 'own_data', 'export_without_torch'], every=3))
def test_a_notebook_runs(name, tmp_path):
    command = tmp_path / 'bin' / 'swin-dense'
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -W ignore -m swin_dense "$@"\n')
    command.chmod(0o755)
    environment = {
        **os.environ,
        'PATH': f'{command.parent}:{os.environ["PATH"]}',
        'PYTHONPATH': str(ROOT),
        'OMP_NUM_THREADS': '1',
        'MPLBACKEND': 'agg',
    }
    done = subprocess.run(
        [sys.executable, '-c', code_of(name)], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]


BUILDER = runpy.run_path(str(ROOT / 'tools' / 'site.py'))  # its name is that of a module of Python


def test_the_site_has_what_git_tracks_alone(tmp_path):
    clone, pages = tmp_path / 'clone', tmp_path / 'pages'
    (clone / 'docs').mkdir(parents=True)
    for name in ('README.md', 'docs/a.md', 'docs/untracked.bin', 'NOTES.md', 'setup.py'):
        (clone / name).write_text('#')
    for command in (['init', '-q'], ['add', 'README.md', 'docs/a.md', 'setup.py']):
        subprocess.run(['git', *command], cwd=clone, check=True)
    pages.mkdir()
    (pages / 'old.md').write_text('from an earlier build')
    BUILDER['copy_pages'](clone, pages)
    assert {str(path.relative_to(pages)) for path in pages.rglob('*.*')} == {'README.md', 'docs/a.md'}


def test_pages_of_the_site():
    for path in NOTEBOOKS.glob('*.ipynb'):
        notebook = json.loads(path.read_text())
        page = BUILDER['as_markdown'](notebook, path.name)
        assert page.startswith(''.join(notebook['cells'][0]['source']).partition('\n')[0] + '\n')
        assert f'[Download the notebook]({path.name})' in page
        blocks = re.findall(r'^```python\n(.*?)\n```$', page, re.S | re.M)
        code = [cell for cell in notebook['cells'] if cell['cell_type'] == 'code']
        assert blocks == [''.join(cell['source']).strip() for cell in code]


def test_every_notebook_installs_first_and_holds_no_outputs():
    for path in NOTEBOOKS.glob('*.ipynb'):
        cells = [cell for cell in json.loads(path.read_text())['cells'] if cell['cell_type'] == 'code']
        assert ''.join(cells[0]['source']).startswith('%pip install')
        assert sum(''.join(cell['source']).startswith('%') for cell in cells) <= 2
        assert not any(cell['outputs'] or cell['execution_count'] for cell in cells)

"""The README says what the raw results say, and what it tells a user to type works."""

import json
import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT

sys.path.insert(0, str(ROOT / 'tools'))
from update_readme import PAGES, TABLES, replace_block, with_tables

README = (ROOT / 'README.md').read_text()


def test_tables_are_those_of_the_raw_results():
    pages = {name: (ROOT / name).read_text() for name in PAGES}
    assert {name: with_tables(text) for name, text in pages.items()} == pages
    for table in TABLES:
        assert sum(f'<!-- {table} -->' in text for text in pages.values()) == 1, table


def test_a_missing_marker_is_told():
    with pytest.raises(ValueError, match='<!-- demo -->'):
        replace_block('no table here', 'demo', '')


def test_links_and_pictures_lead_somewhere():
    for target in re.findall(r'\]\(([^)#]+)', README):
        if '://' not in target:
            assert (ROOT / target).exists(), target


def test_commands_name_files_that_are_there():
    for path in re.findall(r'(?:tools|configs|tests|benchmarks)/[\w./-]+\.(?:py|sh)', README):
        assert (ROOT / path).is_file(), path


def test_python_examples_run(tmp_path, monkeypatch):
    """With a random checkpoint and a grey photograph under the names that the examples use."""
    prepare = (
        'import torch; from PIL import Image; from swin_dense import SwinBackbone\n'
        "torch.save({'model': SwinBackbone('t').state_dict()}, 'swin_tiny_patch4_window7_224.pth')\n"
        "Image.new('RGB', (64, 64), 'grey').save('photograph.jpg')\n"
        'img = torch.zeros(1, 3, 64, 64)\n'
    )
    blocks = [block for block in re.findall(r'```python\n(.*?)```', README, re.S) if 'swin_dense import' in block]
    assert len(blocks) >= 2
    done = subprocess.run(
        [sys.executable, '-c', prepare + '\n'.join(blocks)], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert '4 (96, 16, 16)' in done.stdout


def test_stacks_compute_the_same_numbers():
    """Mean squares of outputs and gradients in float64; some gradients vanish, and are rounding alone."""
    rows = json.loads((ROOT / 'benchmarks' / 'stacks.json').read_text()).values()
    oldest, newest = (row['numbers'] for row in rows)
    assert len(oldest) == len(newest) > 100
    assert newest == pytest.approx(oldest, rel=1e-9, abs=1e-20)

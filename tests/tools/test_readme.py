"""The README agrees with the raw results, and its commands and examples work."""

import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import swin_dense
from tests.conftest import ROOT, needs
from tests.processes import python

sys.path.insert(0, str(ROOT / 'tools'))
from update_readme import PAGES, TABLES, with_tables

README = (ROOT / 'README.md').read_text()
CHINESE = (ROOT / 'README_zh-CN.md').read_text().replace('<!-- speed in a Chinese line -->', '<!-- speed in a line -->')
for table in ('originals', 'models', 'trained on photographs'):
    CHINESE = CHINESE.replace(f'<!-- {table} in Chinese -->', f'<!-- {table} -->')


def test_tables_equal_the_raw_results():
    pages = {name: (ROOT / name).read_text() for name in PAGES}
    assert {name: with_tables(text) for name, text in pages.items()} == pages
    for table in TABLES:
        assert any(f'<!-- {table} -->' in text for text in pages.values()), table


def facts(text):
    """Return the language-independent parts of a README: code, commands, links, names, numbers, tables."""
    code = re.findall(r'^```(\w+)\n(.*?)^```', text, re.S | re.M)
    prose = re.sub(r'^```.*?^```|(?<=-->\n)(?<!end -->\n).*?(?=<!-- end -->)', '', text, flags=re.S | re.M)
    links = [target for target in re.findall(r'\]\(([^)]+)\)', prose) if not target.startswith(('#', 'README'))]
    prose = re.sub(r'\]\([^)]+\)', ']', prose)
    return {
        'headings': re.findall(r'^#+ ', text, re.M),
        'code': [(language, re.sub(r' *#.*', '', block)) for language, block in code],
        'tables': re.findall(r'<!-- .* -->', text),
        'rows': len(re.findall(r'^\|', prose, re.M)),
        'points': len(re.findall(r'^- \*\*', prose, re.M)),
        'links': sorted(links),
        'names': sorted(re.findall(r'`[^`]+`', prose)),
        'numbers': sorted(re.findall(r'\d+(?:\.\d+)*', re.sub(r'`[^`]+`', '', prose))),
    }


def test_both_languages_state_the_same():
    assert facts(CHINESE) == facts(README)
    assert [word for word in re.findall(r'[A-Za-z]+', CHINESE) if word not in README] == []
    assert '[简体中文](README_zh-CN.md)' in README.splitlines()[2]
    assert '[English](README.md)' in CHINESE.splitlines()[2]


def test_what_users_cite_has_the_version_of_the_package():
    stated = re.findall(r'^ *version(?: = \{|: )([\d.]+)', README + CHINESE + (ROOT / 'CITATION.cff').read_text(), re.M)
    assert stated == [swin_dense.__version__] * 3


def test_badges_and_the_number_of_layouts_are_those_that_are_declared():
    project = pytest.importorskip('tomllib').loads((ROOT / 'pyproject.toml').read_text())['project']
    declared = [project['license'], project['requires-python'], *project['dependencies']]
    facts = {'license': 'Apache-2.0', 'python': '3.10 or later', 'torch': '2.1 or later'}
    assert {'Apache-2.0', '>=3.10', 'torch>=2.1'} <= set(declared)
    for label, value in facts.items():
        image = f'docs/images/badge_{label}.svg'
        assert re.findall(r'<text .*?>(.*)</text>', (ROOT / image).read_text()) == [label, value]
        for text in (README, CHINESE):
            assert f'![{label}: {value}]({image})' in text
    page = (ROOT / 'docs' / 'checkpoints.md').read_text()
    rows = re.search(r'^\| Weights of .*\n\| --- .*\n((?:\| .*\n)+)', page, re.M)[1].splitlines()
    load = [row for row in rows if '| refused' not in row]
    assert f'[{len(load)} published layouts](docs/checkpoints.md' in README


BUILD = """
import sys
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
config = Config.fromfile(sys.argv[1])
init_default_scope('mmdet')
with torch.device('meta'):
    print(type(MODELS.build(config.model).backbone).__module__)
"""
PREPARE = """
import torch
from PIL import Image
from swin_dense import SwinBackbone
torch.save({'model': SwinBackbone('t').state_dict()}, 'swin_t.in1k')
Image.new('RGB', (64, 64), 'grey').save('photo.jpg')
"""


def test_python_examples_run(tmp_path):
    """With a grey photograph, and a file in place of the published weights, which a file of their name replaces."""
    blocks = re.findall(r'```python\n(.*?)```', README, re.S)
    assert len(blocks) == 2
    done = python('-c', PREPARE + '\n'.join(blocks), cwd=tmp_path)
    assert '4 (96, 16, 16)' in done.stdout
    assert '32 (768, 2, 2)' in done.stdout


@needs('mmdet')
def test_the_changed_word_is_all_that_a_config_needs(tmp_path):
    (line,) = re.findall(r'^model = .*$', README, re.M)
    base = Path(find_spec('mmdet').origin).parent / '.mim/configs/swin/mask-rcnn_swin-t-p4-w7_fpn_1x_coco.py'
    (tmp_path / 'mine.py').write_text(f'_base_ = {str(base)!r}\n{line}\n')
    done = python('-c', BUILD, tmp_path / 'mine.py')
    assert done.stdout.split()[-1] == 'swin_dense.mm.backbone'


def test_stacks_compute_the_same_numbers():
    """Compare norms and projections of outputs and gradients in float64; some gradients are zero up to rounding."""
    rows = json.loads((ROOT / 'benchmarks' / 'results' / 'stacks.json').read_text())
    oldest = np.array(rows.pop('oldest')['numbers'])
    assert len(oldest) > 100
    assert 'newest' in rows
    norms = oldest[:, :1]
    for row in rows.values():
        numbers = np.array(row['numbers'])
        assert numbers.shape == oldest.shape
        assert (abs(numbers - oldest) <= 1e-9 * norms + 1e-15).all()

"""The shell and Python blocks of the README and the pages under docs/ run, in order, on tiny data."""

import os
import re
import shutil
import sys

import pytest
import tifffile
import torch
from PIL import Image

from swin_dense import SwinBackbone
from swin_dense.commands._main import command_names, parser_of
from tests.conftest import ROOT, photograph, some
from tests.processes import completed, environment, write_command
from tests.workbench.configs.data import make_camvid, make_coco

sys.path.insert(0, str(ROOT / 'tools'))
from page_list import navigation, sections

PAGES = [ROOT / 'README.md', *sorted((ROOT / 'docs').glob('*.md'))]
DECISIONS = sorted((ROOT / 'docs' / 'decisions').glob('*.md'))
LINKING = [
    page
    for pattern in ('*.md', 'docs/**/*.md', 'configs/**/*.md', 'benchmarks/**/*.md', 'mmcv_lite_ops/*.md')
    for page in ROOT.glob(pattern)
]
MEASURED = ('README.md', 'docs/on-a-gpu.md', 'docs/speed.md')  # pages with generated tables of measurements
# The pages whose Python other tests run, which need its files and packages.
ELSEWHERE = {
    'elsewhere': 'tests/peers/test_page.py',
    'from-photographs-to-a-file': 'tests/tools/test_path.py',
    'serving': 'tests/workbench/export/test_promises.py',
}
RUN = [page for page in PAGES if page.stem not in ELSEWHERE and '```' in page.read_text()]
# tests/workbench/export/test_whole.py runs what stands before, which needs a file of a whole model.
FILES_OF_BACKBONES = '\n## A backbone'
# Replacements in the blocks: models that a CPU trains in seconds for Swin-T models, and short schedules.
SMALL = {
    'mask-rcnn_swin-t-p4-w7_fpn_1x_coco --out': 'mask-rcnn_swin-demo_fpn --out',
    'swin-tiny-patch4-window7-in1k-pre_upernet_8xb2-160k_ade20k-512x512 --out': 'upernet_swin-demo --out',
    'epoch_12.pth': 'epoch_1.pth',
    'load_from=mask_rcnn_swin-t-p4-w7_fpn_1x_coco.pth': 'load_from=work_dirs/fruit/epoch_1.pth',
    '--classes apple,pear': '--classes "apple,ripe pear"',
    'tools/dist_train.sh mine.py 2': 'PORT=29531 tools/dist_train.sh mine.py 2',
}
SHORT = {
    'fruit.py': '--epochs 1 --set train_cfg.val_interval=1',
    'roads.py': '--iters 2 --set train_dataloader.batch_size=2 "train_dataloader.dataset.pipeline.2.crop_size=(64,64)"',
}
SHORT['tuned.py'] = SHORT['mine.py'] = SHORT['fruit.py']


@pytest.fixture(scope='module')
def prepared(tmp_path_factory):
    """A folder with the files that the pages assume, the tools and the command."""
    folder = tmp_path_factory.mktemp('pages')
    prepare(folder)
    shutil.copytree(ROOT / 'tools', folder / 'tools')
    write_command(folder / 'bin')
    return folder


def prepare(folder):
    """Write small data, weights and images under the names that the pages use."""
    fruit, unsplit = folder / 'data' / 'fruit', folder / 'data' / 'unsplit'
    make_coco(fruit)
    make_camvid(folder / 'data' / 'camvid')
    shutil.copytree(fruit / 'train2017', unsplit / 'images')
    shutil.copy(fruit / 'annotations' / 'instances_train2017.json', unsplit / 'annotations.json')
    # A file of this name replaces the published weights.
    torch.save({'model': SwinBackbone('t').state_dict()}, folder / 'swin_t.in1k')
    small = SwinBackbone(
        embed_dims=32,
        depths=(2, 2, 2, 2),
        num_heads=(1, 2, 4, 8),
    )
    detector = torch.nn.ModuleDict({'backbone': small})
    torch.save({'model': detector.state_dict()}, folder / 'mask_rcnn_swin_tiny.pth')
    (folder / 'photos').mkdir()
    for index in range(4):
        Image.fromarray(photograph(60, 70)).save(folder / 'photos' / f'{index}.png')
    Image.fromarray(photograph(60, 70)).save(folder / 'photo.jpg')
    tifffile.imwrite(folder / 'slide.tif', photograph(64, 96))


@pytest.fixture
def place(prepared, tmp_path):
    """A copy of the prepared folder, for one page."""
    return shutil.copytree(prepared, tmp_path / 'place')


def script(page):
    """Return the blocks of a page as one bash script; Python blocks of a page share their names."""
    lines, names = ['set -e'], ''
    languages = 'sh' if page.stem == 'README' else 'sh|python'  # test_readme.py runs its Python blocks
    text = page.read_text()
    if page.stem == 'files':
        text = text.partition(FILES_OF_BACKBONES)[2]
    for language, block in re.findall(rf'^```({languages})\n(.*?)^```', text, re.S | re.M):
        if language == 'python':
            names += block
            lines.append(f"python - <<'END'\n{names}END")
            continue
        lines.append(replace_large(block).replace('swin_tiny.onnx', 'swin_tiny.ts --size 64 96'))
    return '\n'.join(lines)


def replace_large(block):
    """Replace models and schedules of commands by small ones."""
    for old, new in SMALL.items():
        block = block.replace(old, new)
    for name, settings in SHORT.items():
        block = re.sub(rf'(--out {name}(?:.*\\\n)*.*?)( --set (.*))?\n', rf'\1 {settings} \3\n', block)
    return block


@pytest.mark.slow
@pytest.mark.parametrize(
    'page',
    some(RUN, every=len(RUN)),
    ids=lambda page: page.stem,
)  # the first is the README
def test_a_page_runs(place, page):
    path = f'{place / "bin"}:{sys.prefix}/bin:{os.environ["PATH"]}'
    variables = {**environment(), 'PATH': path, 'PYTHONWARNINGS': 'ignore'}
    if page.stem == 'frameworks':  # the page does not create its config
        options = f'--data-root data/fruit --classes "apple,ripe pear" {SHORT["mine.py"]}'
        command = f'swin-dense config mask-rcnn_swin-demo_fpn --out mine.py {options}'
        completed(['bash', '-c', command], cwd=place, env=variables)
    completed(['bash', '-c', script(page)], cwd=place, env=variables)


of_each_page = pytest.mark.parametrize('page', LINKING, ids=lambda page: str(page.relative_to(ROOT)))


def prose(page):
    return re.sub(r'^```.*?^```', '', page.read_text(), flags=re.S | re.M)


@of_each_page
def test_python_runs_in_a_test_or_names_what_it_needs(page):
    text = page.read_text()
    if '```python\n' in text:
        names_the_page = ELSEWHERE.get(page.stem, 'tests/tools/test_readme.py')
        assert page in RUN or page.name in (ROOT / names_the_page).read_text()
    first_lines = re.findall(r'^```py\n(.*)', text, re.M)
    assert all(line.startswith('# needs ') for line in first_lines)


@pytest.mark.parametrize(
    'page',
    PAGES[1:],
    ids=lambda page: page.stem,
)
def test_a_page_says_first_what_it_is_for_and_what_it_needs(page):
    text = page.read_text()
    if page.name == 'README.md':
        return
    needs = text.split('\n\n')[2]
    assert re.match(r'\*(?:.* )?[Nn]eeds? |\*To write', needs) or not re.search(r'^```(?:sh|shell|py)', text, re.M)
    code = '\n'.join(re.findall(r'^(?:```\w+\n.*?^```| {4}swin-dense .*?$)', text, re.S | re.M))
    if re.search(r'swin-dense (?:config|train|test|predict) |from mm(?:engine|det|seg)', code):
        assert './mmcv_lite_ops' in needs
    for weights in {'swin_tiny_patch4_window7_224.pth', 'swin_t.in1k'}:
        assert not re.search(rf'(?<!=){re.escape(weights)}', code) or f'`{weights}`' in needs


def anchors(page):
    """Return GitHub's anchors for the headings of a page."""
    headings = re.findall(r'^#+ (.*)', prose(page), re.M)
    return {re.sub(r'[^\w\- ]', '', heading.lower()).replace(' ', '-') for heading in headings}


@of_each_page
def test_links_names_of_files_and_tables_are_right(page):
    """But for files of an earlier version, which the line says, and those of other projects."""
    text = prose(page)
    for link in re.findall(r'\]\(([^) ]+)\)', text):
        target, _, anchor = link.partition('#')
        if '://' not in target:
            other = page.parent / target if target else page
            assert other.exists(), target
            assert not anchor or anchor in anchors(other), link
    for name in re.findall(r'(?<!/)tools/[\w.]+', text):
        assert (ROOT / name).is_file(), name
    lines = [] if page.name == 'CHANGELOG.md' else page.read_text().splitlines()
    for line in lines:
        for name in re.findall(r'`([a-z_]+/[\w./-]+\.(?:py|sh))`', line):
            there = [*(ROOT / 'swin_dense').rglob(name), *(ROOT / 'mmcv_lite_ops').rglob(name)]
            assert ' of 0.3.0' in line or there or (ROOT / name).is_file(), name
    # mkdocs takes a line directly below a table for a row, and a table in a list needs four spaces.
    assert re.findall(r'^ *\|.*\n(?! *\||<!-- end -->|\n|\Z).*', text, re.M) == []
    assert re.findall(r'^ {1,3}\|.*', text, re.M) == []


@of_each_page
def test_every_row_of_a_table_has_the_cells_of_its_title(page):
    text = re.sub(r'^```.*?^```', '', page.read_text(), flags=re.S | re.M)
    for table in re.findall(r'(?:^ *\|.*\n?)+', text, re.M):
        # A bar inside code or behind a backslash is part of a cell.
        rows = [re.sub(r'`[^`]*`|\\\|', '', row).strip() for row in table.strip().splitlines()]
        cells = {row.count('|') for row in rows}
        assert len(cells) == 1, [row for row in rows if row.count('|') != rows[0].count('|')]


def commands_of(page):
    """Yield each call of `swin-dense` on a page, as words: in blocks of code, indented lines and code in prose."""
    text = page.read_text().replace('\\\n', ' ')
    lines = re.findall(r'^(?: {4})?(?:\w+=\S* )*(?:swin-dense|python -m swin_dense) ([a-z].*)$', text, re.M)
    lines += re.findall(r'`swin-dense ([a-z][^`\n]*)`', text)
    for line in lines:
        yield re.sub(r'\s(?:#|&&|\||>|;).*', '', line).split()


@of_each_page
def test_every_option_on_a_page_is_one_of_its_command(page):
    if page.name == 'CHANGELOG.md':  # which names options of earlier versions
        return
    for name, *words in commands_of(page):
        assert name in command_names(), name
        known = {option for action in parser_of(name)._actions for option in action.option_strings}
        given = {word.partition('=')[0] for word in words if word.startswith('--')}
        assert given <= known, (name, given - known)


@of_each_page
def test_every_option_of_a_script_on_a_page_is_in_the_script(page):
    if page.name == 'CHANGELOG.md':
        return
    text = page.read_text().replace('\\\n', ' ')
    for script, rest in re.findall(r'python ((?:benchmarks|tools|examples)/\w+\.py)([^\n`#]*)', text):
        source = (ROOT / script).read_text()
        for option in re.findall(r'(?<=\s)--[\w-]+', rest):
            assert f"'{option}'" in source, (script, option)


def test_the_navigation_lists_every_page_once():
    """The index, llms.txt and the list of decisions are written from it: test_readme.py compares them."""
    listed = [path for paths in navigation().values() for path in paths]
    notebooks = {path.with_suffix('.md') for path in ROOT.glob('examples/notebooks/*.ipynb')}
    assert len(listed) == len({*listed})
    assert notebooks <= {*listed}
    assert [path for path in listed if not path.is_file() and path not in notebooks] == []
    of_users = {page.path for _, pages in sections() for page in pages}
    assert {*PAGES[1:]} - {ROOT / 'docs' / 'README.md'} <= of_users
    beside = {page for page in LINKING if page.parent in (ROOT, ROOT / 'benchmarks', ROOT / 'mmcv_lite_ops')}
    assert beside <= {*listed}


# What a table says, a new measurement changes: no prose beside it counts or compares what was measured.
COUNTS = r'\b(?:two|three|four|five|six|seven|all|both|\d+) (?:kinds of )?(?:processors|CPUs|GPUs|machines|libraries)\b'
COMPARES = r'\b(?:faster|slower|fastest|slowest|quicker|smaller|larger|times as fast|less memory|more memory)\b'


@pytest.mark.parametrize('name', MEASURED)
def test_prose_beside_a_generated_table_states_nothing_that_the_table_may_contradict(name):
    code_and_tables = r'^```.*?^```|(?<=-->\n).*?(?=<!-- end -->)|^\|.*?$'
    text = re.sub(
        code_and_tables,
        '',
        (ROOT / name).read_text(),
        flags=re.S | re.M,
    )
    assert re.findall(f'.*(?:{COUNTS}|{COMPARES}).*', text, re.I) == []

"""Who may import whom: the core knows no mm* package, and no room one above it or beside it."""

import ast
from pathlib import Path

import pytest

from tests.conftest import ROOT

PACKAGE = ROOT / 'swin_dense'
FILES = sorted(PACKAGE.rglob('*.py'))
MM_PACKAGES = {'mmengine', 'mmcv', 'mmdet', 'mmseg', 'mmpretrain'}

# The packages, lowest first; a single module may have a row of its own. Each may import itself and what stands in a row
# above it. ``swin_dense`` is the public names.
LAYERS = [
    {'utils'},
    {'runtime'},
    {'ops', 'models.archs', 'models.options', 'models.layer_ids'},
    {'checkpoint'},
    {'models'},
    {'features'},
    {'analysis'},
    {'mm', 'recipes', 'explore'},
    {'export'},
    {'swin_dense'},
    {'doctor', 'integrations'},
    {'commands'},
    {'__main__'},
]
LAYER = {package: level for level, packages in enumerate(LAYERS) for package in packages}


def package_of(dotted: str) -> str:
    """Return the entry of LAYERS that a module, dotted and without 'swin_dense.', belongs to."""
    first, _, rest = dotted.partition('.')
    module = f'{first}.{rest.partition(".")[0]}'
    return module if module in LAYER else first if first in LAYER else 'swin_dense'


def room_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix('').parts
    return package_of('.'.join(part for part in parts if part != '__init__') or 'swin_dense')


def imported(source: str, top_level_only: bool = False):
    """Yield the dotted names that a file imports; those inside functions only run where they are needed."""
    tree = ast.parse(source)
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, 'a relative import'
            yield from (f'{node.module}.{alias.name}' for alias in node.names)


def not_below(room: str, source: str) -> list[str]:
    """Return what a file of a room imports from the package that is neither of the same room nor of one below."""
    wrong = []
    for name in imported(source):
        package, _, rest = name.partition('.')
        if package == 'swin_dense':
            other = package_of(rest)
            if other != room and LAYER[other] >= LAYER[room]:
                wrong.append(name)
    return wrong


@pytest.mark.parametrize('path', FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
class TestFile:
    def test_imports_only_what_lies_below(self, path):
        assert room_of(path) in LAYER, 'a room without a place in LAYERS'
        assert not not_below(room_of(path), path.read_text())

    def test_imports_mm_packages_only_in_their_room(self, path):
        used = {name.split('.')[0] for name in imported(path.read_text(), top_level_only=True)} & MM_PACKAGES
        assert not used or room_of(path) == 'mm'


@pytest.mark.parametrize(
    'source',
    [
        'import swin_dense',
        'import swin_dense.models.swin as core',
        'from swin_dense import models',
        'from swin_dense.models import archs, swin',
        'from swin_dense import SwinBackbone',
        'from swin_dense.models.swin import SwinBackbone',
        'from swin_dense.checkpoint import load_checkpoint',
        'def late():\n    from swin_dense.mm import backbone',
    ],
)
def test_every_form_of_an_import_is_seen(source):
    assert not_below('ops', source)
    assert not not_below('commands', source)

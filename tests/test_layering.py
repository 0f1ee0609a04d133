"""Import rules: only `mm` imports mm* packages at module level, and packages import only lower layers."""

import ast
from pathlib import Path

import pytest

from tests.conftest import ROOT

PACKAGE = ROOT / 'swin_dense'
FILES = sorted(PACKAGE.rglob('*.py'))
MM_PACKAGES = {'mmengine', 'mmcv', 'mmdet', 'mmseg', 'mmpretrain'}

# The packages, lowest layer first; a single module may have an entry of its own. Each may import itself and the entries
# of the layers below it, which are the rows above it here. ``swin_dense`` stands for the public names.
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
    """Return the entry of LAYERS that contains a module, given as a dotted name without 'swin_dense.'."""
    first, _, rest = dotted.partition('.')
    module = f'{first}.{rest.partition(".")[0]}'
    return module if module in LAYER else first if first in LAYER else 'swin_dense'


def entry_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix('').parts
    return package_of('.'.join(part for part in parts if part != '__init__') or 'swin_dense')


def imported(source: str, top_level_only: bool = False):
    """Yield the dotted names that a file imports, optionally without the imports inside functions."""
    tree = ast.parse(source)
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, 'a relative import'
            yield from (f'{node.module}.{alias.name}' for alias in node.names)


def forbidden_imports(entry: str, source: str) -> list[str]:
    """Return the imports from this package that belong neither to the given entry of LAYERS nor to a lower layer."""
    wrong = []
    for name in imported(source):
        package, _, rest = name.partition('.')
        if package == 'swin_dense':
            other = package_of(rest)
            if other != entry and LAYER[other] >= LAYER[entry]:
                wrong.append(name)
    return wrong


@pytest.mark.parametrize('path', FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
class TestFile:
    def test_imports_only_lower_layers(self, path):
        assert entry_of(path) in LAYER, 'the package is missing in LAYERS'
        assert not forbidden_imports(entry_of(path), path.read_text())

    def test_only_mm_imports_mm_packages(self, path):
        used = {name.split('.')[0] for name in imported(path.read_text(), top_level_only=True)} & MM_PACKAGES
        assert not used or entry_of(path) == 'mm'


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
def test_every_form_of_an_import_is_detected(source):
    assert forbidden_imports('ops', source)
    assert not forbidden_imports('commands', source)

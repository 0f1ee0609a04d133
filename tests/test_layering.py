"""Import rules: packages import only lower layers, the workbench has a wall, and few packages import mm* packages.

No files import each other in a circle.
"""

import ast
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.conftest import ROOT

PACKAGE = ROOT / 'swin_dense'
FILES = sorted(PACKAGE.rglob('*.py'))
MM_PACKAGES = {'mmengine', 'mmcv', 'mmdet', 'mmseg', 'mmpretrain'}

# The packages, lowest layer first. Each may import itself and the packages of the layers below it, which are the rows
# above it here. ``swin_dense`` stands for the public names.
LAYERS = [
    {'utils'},
    {'images', 'ops', 'archs'},
    {'checkpoint'},
    {'models'},
    {'create'},
    {'features'},
    {'analysis'},
    {'mm', 'explore'},
    {'export'},
    {'workbench'},
    {'swin_dense'},
    {'commands'},
    {'__main__'},
    {'integrations'},  # nothing imports it
]
# The modules that the workbench may import, and those that may import it. Of the public names,
# which import nothing before they are asked for, three are theirs.
WORKBENCH = {'utils', 'images', 'checkpoint', 'mm', 'export'}
ABOVE_WORKBENCH = {'swin_dense', 'commands'}
LAYER = {package: level for level, packages in enumerate(LAYERS) for package in packages}


def package_of(dotted):
    """Return the entry of LAYERS that contains a module, given as a dotted name without 'swin_dense.'."""
    first = dotted.partition('.')[0]
    return first if first in LAYER else 'swin_dense'


def is_for_types(node):
    return isinstance(node, ast.If) and ast.unparse(node.test) == 'TYPE_CHECKING'


def entry_of(path):
    parts = path.relative_to(PACKAGE).with_suffix('').parts
    return package_of('.'.join(part for part in parts if part != '__init__') or 'swin_dense')


def imported(source, top_level_only=False, of_types=True):
    """Yield the dotted names that a file imports, optionally without those inside functions or for type checkers."""
    tree = ast.parse(source)
    if not of_types:
        tree.body = [node for node in tree.body if not is_for_types(node)]
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, 'a relative import'
            yield from (f'{node.module}.{alias.name}' for alias in node.names)


def module_of(path):
    parts = path.relative_to(ROOT).with_suffix('').parts
    return '.'.join(part for part in parts if part != '__init__')


def imports_of_modules(sources):
    """Return the modules that each module imports, given their sources; imports for type checkers do not count."""
    found: dict[str, set[str]] = {}
    for module, source in sources.items():
        names = imported(source, of_types=False)
        found[module] = {owner(name, sources) for name in names} - {module, ''}
    return found


def owner(name, modules):
    """Return the module that an imported dotted name belongs to, or an empty string if it is none of these."""
    while name and name not in modules:
        name = name.rpartition('.')[0]
    return name


def circle_in(imports):
    """Return modules that import each other in a circle, the first one again at the end, or an empty list."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def is_forbidden(entry, other):
    if entry == other:
        return False
    if entry == 'workbench':
        return other not in WORKBENCH
    if other == 'workbench':
        return entry not in ABOVE_WORKBENCH
    return LAYER[other] >= LAYER[entry]


def forbidden_imports(entry, source):
    """Return the imports from this package that belong neither to the given entry of LAYERS nor to a lower layer."""
    own = [name for name in imported(source) if name.partition('.')[0] == 'swin_dense']
    return [name for name in own if is_forbidden(entry, package_of(name.partition('.')[2]))]


of_each_file = pytest.mark.parametrize('path', FILES, ids=lambda path: str(path.relative_to(PACKAGE)))


@of_each_file
def test_imports_are_of_lower_layers(path):
    assert entry_of(path) in LAYER, 'the package is missing in LAYERS'
    upwards = forbidden_imports(entry_of(path), path.read_text())
    assert not upwards, 'a package may import those below it alone: see the map in CONTRIBUTING.md'


@of_each_file
def test_only_mm_imports_mm_packages(path):
    packages = {name.partition('.')[0] for name in imported(path.read_text(), top_level_only=True)}
    assert not packages & MM_PACKAGES or entry_of(path) in ('mm', 'workbench')


@pytest.mark.parametrize(
    'source',
    [
        'import swin_dense',
        'import swin_dense.models.swin as core',
        'from swin_dense import models',
        'from swin_dense.models import block, swin',
        'from swin_dense import SwinBackbone',
        'from swin_dense.models.swin import SwinBackbone',
        'from swin_dense.checkpoint import load_checkpoint',
        'def late():\n    from swin_dense.mm import backbone',
    ],
)
def test_every_form_of_an_import_is_detected(source):
    assert forbidden_imports('ops', source)
    assert not forbidden_imports('commands', source)


def test_configs_are_written_without_the_checks():
    rooms = {path: path.relative_to(PACKAGE).parts[:2] for path in FILES}
    sources = [path.read_text() for path, room in rooms.items() if room == ('workbench', 'configs')]
    assert len(sources) > 5
    checks = 'swin_dense.workbench.checking'
    assert not [name for source in sources for name in imported(source) if name.startswith(checks)]


def test_no_files_import_each_other_in_a_circle():
    imports = imports_of_modules({module_of(path): path.read_text() for path in FILES})
    assert len(imports['swin_dense.models.swin']) > 5
    assert not circle_in(imports)


@pytest.mark.parametrize('late', ['import p.a', 'def late():\n    from p.a import thing', 'from p import a'])
def test_a_circle_is_noticed(late):
    sources = {'p': '', 'p.a': 'from p.b import thing', 'p.b': 'import p.c', 'p.c': late}
    assert set(circle_in(imports_of_modules(sources))) == {'p.a', 'p.b', 'p.c'}

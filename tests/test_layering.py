"""Who may import whom: the core knows no mm* package, and no layer one above it."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / 'swin_dense'
FILES = sorted(PACKAGE.rglob('*.py'))
MM_PACKAGES = ('mmengine', 'mmcv', 'mmdet', 'mmseg', 'mmpretrain')
ADAPTER = {'backbone', 'resume'}

# The layers, lowest first; a module may import its own layer and those below.
LAYERS = [
    {'checks'},
    {'archs', 'windows', 'options', 'decode'},
    {'ops', 'checkpoint', 'images'},
    {'attention', 'layers'},
    {'model'},
    {'backbone', 'resume', 'regions', 'storage', 'tiling', 'inference', 'analysis', 'counting'},
    {'pyramid', 'dataset', 'explain'},
    {'extraction', 'visualize'},
]


def module_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix('.py')


def layer_of(module):
    return next((level for level, modules in enumerate(LAYERS) if module in modules), len(LAYERS))


def imports(path, top_level_only=False):
    """Yield the dotted names that a file imports; those inside functions only run where they are needed."""
    tree = ast.parse(path.read_text())
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f'{path.name} imports relatively'
            yield node.module


@pytest.mark.parametrize('path', FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_the_adapter_imports_mm_packages(path):
    used = {name.split('.')[0] for name in imports(path, top_level_only=True)} & set(MM_PACKAGES)
    assert not used or module_of(path) in ADAPTER


@pytest.mark.parametrize('path', FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_import_goes_upward(path):
    if path == PACKAGE / '__init__.py':
        return
    for name in imports(path):
        if name.startswith('swin_dense.'):
            assert layer_of(name.split('.')[1]) <= layer_of(module_of(path)), name

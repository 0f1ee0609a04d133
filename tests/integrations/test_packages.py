"""The integration reports a missing package, and no other module imports it."""

import ast
import importlib
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

FOLDER = ROOT / 'swin_dense' / 'integrations'
OTHERS = sorted(path for path in (ROOT / 'swin_dense').rglob('*.py') if FOLDER not in path.parents)


def test_a_missing_package_is_named_with_a_pip_command(monkeypatch):
    monkeypatch.setitem(sys.modules, 'timm', None)
    monkeypatch.delitem(sys.modules, 'swin_dense.integrations.timm', raising=False)
    with pytest.raises(ImportError, match=r'timm needs timm, .*pip install '):
        importlib.import_module('swin_dense.integrations.timm')


@pytest.mark.parametrize('path', OTHERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_other_module_imports_an_integration(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
        module = getattr(node, 'module', None) or ''
        assert not any(f'{module}.{name}'.strip('.').startswith('swin_dense.integrations') for name in names)

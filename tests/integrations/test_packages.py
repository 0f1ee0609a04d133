"""Integrations report a missing or different version of their package, and no other module imports them."""

import ast
import importlib
import os
import re
import sys
import types
import warnings
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from swin_dense import integrations
from tests.conftest import ROOT, some
from tests.processes import python

FOLDER = ROOT / 'swin_dense' / 'integrations'
PACKAGES = {
    'torchvision': 'torchvision',
    'timm': 'timm',
    'smp': 'segmentation_models_pytorch',
    'transformers': 'transformers',
    'detectron2': 'detectron2',
}


def test_every_integration_has_a_tested_package():
    assert {path.stem for path in FOLDER.glob('*.py')} - {'__init__'} == set(PACKAGES)


@pytest.mark.parametrize('name', PACKAGES)
def test_a_missing_package_is_named_with_a_pip_command(name, monkeypatch):
    monkeypatch.setitem(sys.modules, PACKAGES[name], None)
    monkeypatch.delitem(sys.modules, f'swin_dense.integrations.{name}', raising=False)
    with pytest.raises(ImportError, match=f'{name} needs {PACKAGES[name]}, .*pip install '):
        importlib.import_module(f'swin_dense.integrations.{name}')


@pytest.mark.parametrize('name', some(PACKAGES, every=5))
def test_an_incompatible_version_is_reported_with_the_tested_one(name, tmp_path):
    """A future version may have moved the names that an integration imports."""
    package = PACKAGES[name]
    for path, text in {
        f'{package}/__init__.py': '',
        f'{package}-99.0.dist-info/METADATA': f'Metadata-Version: 2.1\nName: {package}\nVersion: 99.0\n',
    }.items():
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_text(text)
    # mmengine also imports some of these packages.
    program = f'import sys; sys.modules["mmengine"] = None; import swin_dense.integrations.{name}'
    done = python('-c', program, status=1, PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]))
    assert f'swin_dense.integrations.{name} was tested with {package} ' in done.stderr
    assert f', but 99.0 is installed; if it fails, install {package} ' in done.stderr
    assert re.match(rf'(ImportError|ModuleNotFoundError): .*{package}', done.stderr.splitlines()[-1])


def test_an_import_error_inside_the_package_is_not_hidden(tmp_path, monkeypatch):
    (tmp_path / 'halfway.py').write_text('import nothing_of_the_kind')
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match='nothing_of_the_kind'):
        integrations.require('halfway', '1.0')


@pytest.mark.parametrize(('installed', 'warned'), [('1.2.7', False), ('1.3.0', True), (None, True)])
def test_a_different_version_gives_a_warning(installed, warned, monkeypatch):
    def version(name):
        if installed is None:
            raise PackageNotFoundError(name)
        return installed

    monkeypatch.setitem(sys.modules, 'some_package', types.ModuleType('some_package'))
    monkeypatch.setattr(integrations, 'version', version)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        integrations.require('some_package', '1.2.3')
    assert [str(warning.message) for warning in caught] == (
        [f'swin_dense.integrations.some_package was tested with some_package 1.2.3, '
         f'but {installed or "unknown"} is installed; if it fails, install some_package 1.2.3'] if warned else []
    )  # fmt: skip


OTHERS = sorted(path for path in (ROOT / 'swin_dense').rglob('*.py') if FOLDER not in path.parents)


@pytest.mark.parametrize('path', OTHERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_other_module_imports_an_integration(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
        module = getattr(node, 'module', None) or ''
        assert not any(f'{module}.{name}'.strip('.').startswith('swin_dense.integrations') for name in names)

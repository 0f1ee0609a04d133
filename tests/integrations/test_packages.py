"""Integrations report a missing or different version of their package."""

import importlib
import sys
import types
import warnings
from importlib.metadata import PackageNotFoundError

import pytest

from swin_dense import integrations
from tests.conftest import ROOT

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

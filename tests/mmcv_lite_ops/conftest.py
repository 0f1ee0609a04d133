"""The operators under test are those of this clone, whichever mmcv is installed."""

import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType

import mmcv.ops  # noqa: F401
import pytest

from tests.conftest import ROOT


def _load_plain() -> ModuleType:
    spec = spec_from_file_location('plain_operators', ROOT / 'mmcv_lite_ops/mmcv/_ext.py')
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PLAIN = _load_plain()


def use(operators: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every function of ``mmcv.ops`` call these operators."""
    for name, module in list(sys.modules.items()):
        if name.startswith('mmcv.ops.') and hasattr(module, 'ext_module'):
            monkeypatch.setattr(module, 'ext_module', operators)


@pytest.fixture
def plain(monkeypatch):
    use(PLAIN, monkeypatch)


@pytest.fixture
def both(monkeypatch):
    """Return a function that calls another one with compiled and with plain operators, and returns both results."""
    compiled = import_module('mmcv._ext')
    if compiled.__file__.endswith('.py'):
        pytest.skip('needs a compiled mmcv')

    def call(function):
        results = []
        for operators in (compiled, PLAIN):
            with monkeypatch.context() as patch:
                use(operators, patch)
                results.append(function())
        return results

    return call

"""The programs of examples/, as modules."""

import importlib.util
from types import ModuleType

from tests.conftest import ROOT


def load_example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / 'examples' / f'{name}.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

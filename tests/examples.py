"""The programs of examples/, as modules."""

import importlib.util

from tests.conftest import ROOT


def load_example(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / 'examples' / f'{name}.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

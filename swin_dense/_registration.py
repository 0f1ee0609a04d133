"""Register SwinDense in mmengine, without being the first to import mmengine, and say why that is not possible."""

import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


def register_with_mmengine() -> None:
    """Import ``swin_dense.mm``, which registers its classes, if mmengine is imported, or else as soon as it is."""
    if sys.modules.get('mmengine') is None:
        sys.meta_path.insert(0, _AfterMmengine())
        return
    with suppress(Exception):  # a broken mmengine can raise any error; asking for SwinDense reports it
        import_module('swin_dense.mm')


class _AfterMmengine(MetaPathFinder):
    """Detects the import of mmengine, and imports ``swin_dense.mm`` right after it."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != 'mmengine':
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec: Any = next((found for found in others if found is not None), None)
        if spec is None or spec.loader is None:  # mmengine may be installed later, in a notebook
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            sys.meta_path.remove(self)
            register_with_mmengine()

        spec.loader.exec_module = exec_module
        return spec  # which may also be asked for without an import that follows


def check_mmengine(name: str) -> None:
    """Raise ImportError, with a fix, if mmengine is missing or broken, which a public name needs."""
    core = 'SwinV2Backbone' if name.endswith('V2') else 'SwinBackbone'
    if find_spec('mmengine') is None:
        raise ImportError(f'{name} needs mmengine: pip install mmengine; {core} is the same model without mmengine')
    try:
        import_module('swin_dense.mm')
    except Exception as error:  # a broken mmengine can raise any error
        raise ImportError(
            f'{name} needs mmengine, which is installed but cannot be imported ({type(error).__name__}: {error}); run '
            '`swin-dense doctor` for a fix, for example pip install "setuptools<81" if pkg_resources is missing. '
            f'{core} is the same model without mmengine'
        ) from error

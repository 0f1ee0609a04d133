"""Register SwinDense in mmengine, without being the first to import mmengine, and say why that is not possible."""

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_NAMES = ('SwinDense', 'SwinDenseV2')


def register_with_mmengine() -> None:
    """Import ``swin_dense.mm``, which registers its classes, if mmengine is imported, or else as soon as it is.

    With SWIN_DENSE_REGISTER=0 in the environment, this is left to ``import swin_dense.mm``.
    """
    if os.environ.get('SWIN_DENSE_REGISTER') == '0':
        return
    if sys.modules.get('mmengine') is None:
        sys.meta_path.insert(0, _AfterMmengine())
        return
    try:
        import_module('swin_dense.mm')
    except Exception as error:  # a broken mmengine can raise any error
        _register_reason(error)


def _register_reason(reason: Exception) -> None:
    """Register functions that raise the reason why the classes are missing, for configs that name one of them.

    A registry of the scope swin_dense has them, too: mmengine hides the error of an import for 'swin_dense.SwinDense'.
    """
    try:
        registry = import_module('mmengine.registry')
    except Exception:  # as above; then no config can name a class
        return
    models = registry.MODELS
    own = models.children.get('swin_dense') or registry.Registry('model', parent=models, scope='swin_dense')
    for name in _NAMES:
        for scope in (models, own):
            if name not in scope.module_dict:
                scope.register_module(name=name, module=_raising(name, reason))


def _raising(name: str, reason: Exception) -> Any:
    def build(*_: Any, **__: Any) -> None:
        raise _import_error(name, reason) from reason

    return build


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
            spec.loader.exec_module = execute
            execute(module)
            if self in sys.meta_path:  # not if another thread or a reload came first
                sys.meta_path.remove(self)
                register_with_mmengine()

        spec.loader.exec_module = exec_module
        return spec  # which may also be asked for without an import that follows


def check_mmengine(name: str) -> None:
    """Raise ImportError, with a fix, if mmengine is missing, or the class of a public name cannot be imported."""
    if find_spec('mmengine') is None:
        raise ImportError(
            f'{name} needs mmengine: pip install mmengine; {_name_without_mmengine(name)} is the same model without '
            'mmengine'
        )
    try:
        import_module('swin_dense.mm')
    except Exception as error:  # a broken mmengine can raise any error
        raise _import_error(name, error) from error


def _import_error(name: str, reason: Exception) -> ImportError:
    return ImportError(
        f'{name} needs mmengine, which is installed but cannot be used ({type(reason).__name__}: {reason}); run '
        '`swin-dense doctor` for a fix, for example pip install "setuptools<81" if pkg_resources is missing. '
        f'{_name_without_mmengine(name)} is the same model without mmengine'
    )


def _name_without_mmengine(name: str) -> str:
    return 'SwinV2Backbone' if name.endswith('V2') else 'SwinBackbone'

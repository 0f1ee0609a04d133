"""Import a public name of a package when it is asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def public_name(package: str, name: str, homes: Mapping[str, str]) -> Any:
    """Return a public name, or a module, of a package, given the full name of the module of each.

    Raises AttributeError if there is no such name.
    """
    if name in homes:
        found = getattr(import_module(homes[name]), name)
        setattr(sys.modules[package], name, found)
        return found
    if name.startswith('_') or find_spec(f'{package}.{name}') is None:
        raise AttributeError(f'module {package!r} has no attribute {name!r}')
    return import_module(f'{package}.{name}')


def public_names(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package with these public names; see :func:`public_name`."""
    return partial(public_name, package, homes=homes), lambda: [*homes]


def require_core() -> None:
    """Raise ImportError if a package that all but the runtime needs is missing or broken."""
    for module in ('numpy', 'PIL.Image', 'torch'):
        try:
            import_module(module)
        except Exception as error:  # a broken package can raise any error
            package = module.partition('.')[0]
            reason = f'{type(error).__name__}: {error}'
            raise ImportError(
                f'swin_dense needs {package}, which cannot be imported ({reason}); run `swin-dense doctor` for details'
            ) from None

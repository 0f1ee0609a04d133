"""Former public names, which work and warn until they are removed."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from importlib import import_module
from typing import Any


def former_name(module: str, name: str, names: Mapping[str, str]) -> Any:
    """Return the object that replaces a former name of a module, and warn; called by the module's ``__getattr__``.

    ``names`` has the full new name by former name, such as {'build': 'swin_dense.create_backbone'}. Another name raises
    an AttributeError.
    """
    if name not in names:
        raise AttributeError(f'module {module!r} has no attribute {name!r}')
    owner, _, attribute = names[name].rpartition('.')
    warnings.warn(f'{module}.{name} will be removed; use {names[name]}', FutureWarning, stacklevel=3)
    return getattr(import_module(owner), attribute)

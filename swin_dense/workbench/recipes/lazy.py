"""Read lazy configs, whose types are imported classes, as configs whose types are names.

mmengine builds both to the same objects. Code that reads a config therefore only reads names.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mmengine.registry
from mmengine.config import Config
from mmengine.config.lazy import LazyAttr, LazyObject
from mmengine.registry import MODELS, Registry

from swin_dense.utils import private_mm
from swin_dense.workbench.configs.entries import walk

# Keys whose values mmengine looks up in a registry if they are names.
_KEYS = ('type', 'constructor', 'runner_type')
_ALWAYS_IMPORTED = ('mmengine', 'mmcv', 'torch')


def with_names(config: Config) -> Config:
    """Return a config in which every class that a lazy config imports as a type is replaced by its name.

    The name is the one of its registry, or else the path of the import. If the config has no ``default_scope``, as most
    lazy configs, it is the package of the model's class, or that of the nearest base class which has registries. Other
    imported values stay as they are. A config without imports is returned unchanged.
    """
    if not any(imported_values(config)):
        return config
    content = private_mm.lazy_dict(config)
    kind = (config.get('model') or {}).get('type')
    if content.get('default_scope') is None and isinstance(kind, type):
        packages = [_package(base) for base in kind.__mro__]
        with_registries = [package for package in packages if package in MODELS.children]
        content['default_scope'] = with_registries[0] if with_registries else None
    names = _registered(content.get('default_scope'))
    return Config(_named(content, names), filename=config.filename)


def imported_values(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the place in a config, such as 'model.backbone.type', and the import of each value that it imports."""
    for place, value in walk(private_mm.lazy_dict(config)):
        if isinstance(value, (LazyObject, LazyAttr)):
            yield place, f'{value.module}.{value}'


def _registered(scope: str | None) -> dict[Any, str]:
    """Return the registered classes and functions with the names by which configs of a scope find them.

    Names without a package are those that the scope imports itself; a file with other names would need custom_imports.
    """
    imported = (scope, *_ALWAYS_IMPORTED)
    names: dict[Any, str] = {}
    for registry in vars(mmengine.registry).values():
        if not isinstance(registry, Registry):
            continue
        for package, child in registry.children.items():
            for name, kind in child.module_dict.items():
                if _package(kind) == package:
                    names[kind] = f'{package}.{name}'
        found = dict(registry.module_dict)
        if scope in registry.children:
            found.update(registry.children[scope].module_dict)  # a name of the scope hides that of mmengine
        for name, kind in reversed(found.items()):  # the first of several names is the usual one
            if _package(kind) in imported:
                names[kind] = name
    return names


def _package(kind: Any) -> str:
    return str(getattr(kind, '__module__', '')).partition('.')[0]


def _named(value: Any, names: dict[Any, str], is_type: bool = False) -> Any:
    if isinstance(value, dict):
        named = {}
        for key, item in value.items():
            named[key] = _named(item, names, key in _KEYS)
        return named
    if isinstance(value, (list, tuple)):
        return type(value)(_named(item, names) for item in value)
    if is_type and isinstance(value, (LazyObject, LazyAttr)):
        return names.get(value.build(), f'{value.module}.{value}')
    return value

"""Read lazy configs, whose types are imported classes, as configs whose types are names.

mmengine builds both to the same objects. All that reads a config therefore reads names alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mmengine.registry
from mmengine.config import Config
from mmengine.config.lazy import LazyAttr, LazyObject
from mmengine.registry import MODELS, Registry

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
    content = config._to_lazy_dict()
    kind = (config.get('model') or {}).get('type')
    if content.get('default_scope') is None and isinstance(kind, type):
        packages = (base.__module__.partition('.')[0] for base in kind.__mro__)
        content['default_scope'] = next((package for package in packages if package in MODELS.children), None)
    return Config(_named(content, _registered(content.get('default_scope'))), filename=config.filename)


def imported_values(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the place in a config, such as 'model.backbone.type', and the import of each value that it imports."""
    yield from _imported('', config._to_lazy_dict())


def _imported(place: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, (LazyObject, LazyAttr)):
        yield place.removeprefix('.'), _path(value)
    elif isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from _imported(f'{place}.{key}', item)


def _path(value: LazyObject | LazyAttr) -> str:
    return f'{value.module}.{value}'


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
            of_package = child.module_dict.items()
            names.update({kind: f'{package}.{name}' for name, kind in of_package if _package(kind) == package})
        own = registry.children[scope].module_dict if scope in registry.children else {}
        found = {**registry.module_dict, **own}  # a name of the scope hides that of mmengine
        for name, kind in reversed(found.items()):  # the first of several names is the usual one
            if _package(kind) in imported:
                names[kind] = name
    return names


def _package(kind: Any) -> str:
    return str(getattr(kind, '__module__', '')).partition('.')[0]


def _named(value: Any, names: dict[Any, str], is_type: bool = False) -> Any:
    if isinstance(value, dict):
        return {key: _named(item, names, key in _KEYS) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_named(item, names) for item in value)
    if is_type and isinstance(value, (LazyObject, LazyAttr)):
        return names.get(value.build(), _path(value))
    return value

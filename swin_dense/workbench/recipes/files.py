"""Find and read recipes, in a clone and in an installed wheel.

A recipe is a file in ``configs``, or a config of mmdet or mmseg with its backbone replaced by SwinDense. The latter
have no files of their own and are listed in the metafiles in ``configs/mmdet`` and ``configs/mmseg``.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from swin_dense.utils import checks
from swin_dense.workbench.recipes.zoo import framework_configs

if TYPE_CHECKING:
    from mmengine.config import Config

_PACKAGE = Path(__file__).parents[2]
_SUFFIXES = ('.py', '.json', '.yaml', '.yml')  # that mmengine reads
_FOREIGN_BASE = re.compile(r"'(mmdet|mmseg)::")


def recipe_root() -> Path:
    """Return the folder that contains ``configs`` and ``model-index.yml``."""
    for root in (_PACKAGE / '.mim', _PACKAGE.parent):
        if (root / 'model-index.yml').is_file():
            return root
    raise FileNotFoundError(f'{_PACKAGE} has no .mim/configs; reinstall swin-dense from its wheel or a clone')


def recipe_names() -> list[str]:
    """Return the sorted names of all recipes."""
    own = [path.stem for path in _recipe_files()]
    return sorted([*own, *framework_configs(recipe_root())])


def unknown_recipe(name: str) -> ValueError:
    """Return the error for a name that is neither one of a recipe nor the path of a config file."""
    similar = checks.closest(Path(name).name.removesuffix('.py'), recipe_names())
    return ValueError(f'there is no recipe and no config file {name!r}{similar} (`swin-dense zoo` lists the recipes)')


def load_recipe(name: str) -> Config:
    """Read a recipe by its name, or any config file by its path; the types of a lazy config become names.

    Recipes inherit from configs of mmdet and mmseg. These are found in the folder of the imported package, not through
    its distribution as in mmengine, so recipes also work with forks under other distribution names, and with a
    setuptools without pkg_resources.

    Raises:
        ValueError: no recipe and no file has this name, or the file is not a config.
        ImportError: mmengine, or the package that the recipe inherits from, is not installed.
    """
    is_file, stem = Path(name).is_file(), Path(name).name.removesuffix('.py')
    path: Path | None = None
    place = ''
    if not is_file:
        own = {file.stem: file for file in _recipe_files()}
        path = own.get(stem)
        if path is None:
            place = framework_configs(recipe_root()).get(stem, '')
    if not (is_file or path or place):
        raise unknown_recipe(name)
    # These import torch, which the error above does not need.
    from mmengine.config import Config

    from swin_dense.workbench.recipes.lazy import with_names

    if is_file:
        if Path(name).suffix not in _SUFFIXES:
            raise ValueError(
                f'{name} is not a config, which ends in {", ".join(_SUFFIXES[:-1])} or {_SUFFIXES[-1]}; a config, or '
                'the name of a recipe, comes before checkpoints and images'
            )
        try:
            with _imports_from_current_folder():
                config = Config.fromfile(name)
                return with_names(config)  # a lazy config imports its classes here
        except Exception as error:  # a config is a program and can raise any exception
            raise ValueError(f'{name} cannot be read as a config ({type(error).__name__}: {error})') from error
    if path is None:
        package, _, inside = place.partition('::')
        config = Config.fromfile(_configs_of(package, stem) / inside)
        config.model.backbone.type = 'SwinDense'
        imports = config.get('custom_imports', {}).get('imports', [])
        imports = [imports] if isinstance(imports, str) else list(imports)
        config.custom_imports = {'imports': ['swin_dense', *imports], 'allow_failed_imports': False}
        return config
    for package in _FOREIGN_BASE.findall(path.read_text(encoding='utf-8')):
        _configs_of(package, path.stem)
    with tempfile.TemporaryDirectory() as folder:
        configs = Path(folder, 'configs')
        shutil.copytree(recipe_root() / 'configs', configs, ignore=shutil.ignore_patterns('__pycache__'))
        for file in configs.rglob('*.py'):
            # With slashes, because backslashes have a meaning in Python's strings.
            found = _FOREIGN_BASE.sub(
                lambda match: f"'{_configs_of(match[1], path.stem).as_posix()}/", file.read_text(encoding='utf-8')
            )
            file.write_text(found, encoding='utf-8')
        return Config.fromfile(configs / path.relative_to(recipe_root() / 'configs'))


@contextlib.contextmanager
def _imports_from_current_folder() -> Iterator[None]:
    """Let a config import modules of the current folder, as with `python -m`; installed packages come first."""
    folder = os.getcwd()
    if {'', folder} & {*sys.path}:
        yield
        return
    sys.path.append(folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def _recipe_files() -> list[Path]:
    files = (recipe_root() / 'configs').glob('[!_]*/*.py')
    return [path for path in files if not path.name.startswith('_')]


def _configs_of(package: str, recipe: str) -> Path:
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f'{recipe} inherits from configs of {package}, which is not installed')
    return Path(spec.submodule_search_locations[0], '.mim', 'configs')

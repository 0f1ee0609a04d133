"""Where the recipes lie, in a clone and in an installed wheel, and how they are read."""

from __future__ import annotations

import re
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from swin_dense import checks

if TYPE_CHECKING:
    from mmengine.config import Config

_PACKAGE = Path(__file__).parent.parent
_FOREIGN_BASE = re.compile(r"'(mmdet|mmseg)::")


def recipe_root() -> Path:
    """Return the folder that holds ``configs`` and ``model-index.yml``.

    Raises:
        FileNotFoundError: the package was installed without them.
    """
    for root in (_PACKAGE / '.mim', _PACKAGE.parent):
        if (root / 'model-index.yml').is_file():
            return root
    raise FileNotFoundError(f'{_PACKAGE} has no .mim/configs; install swin-dense anew from its wheel or a clone')


def recipe_names() -> list[str]:
    """Return the names of all recipes, sorted."""
    return sorted(path.stem for path in _recipe_files())


def load_recipe(name: str) -> Config:
    """Read a recipe by its name, or any config file by its path.

    A recipe starts from configs that mmdet and mmseg carry. They are looked for where these packages lie, not through
    their distributions as mmengine does: so recipes can also be read with forks that are distributed under other names,
    and with a setuptools without pkg_resources.

    Raises:
        ValueError: there is neither a recipe nor a file of this name, or the file is no config.
        ImportError: mmengine, or the package that the recipe starts from, is not installed.
    """
    from mmengine.config import Config

    if Path(name).is_file():
        try:
            return Config.fromfile(name)
        except Exception as error:  # a config is a program, and raises anything
            raise ValueError(f'{name} cannot be read as a config ({type(error).__name__}: {error})') from error
    path = _find(name)
    for package in _FOREIGN_BASE.findall(path.read_text()):
        if _configs_of(package) is None:
            raise ImportError(f'{path.stem} starts from configs of {package}, which is not installed')
    with tempfile.TemporaryDirectory() as folder:
        configs = Path(folder, 'configs')
        shutil.copytree(recipe_root() / 'configs', configs, ignore=shutil.ignore_patterns('__pycache__'))
        for file in configs.rglob('*.py'):
            file.write_text(_FOREIGN_BASE.sub(lambda match: f"'{_configs_of(match[1])}/", file.read_text()))
        return Config.fromfile(configs / path.relative_to(recipe_root() / 'configs'))


def _recipe_files() -> list[Path]:
    return [path for path in (recipe_root() / 'configs').glob('[!_]*/*.py') if not path.name.startswith('_')]


def _find(name: str) -> Path:
    stem = Path(name).name.removesuffix('.py')
    for path in _recipe_files():
        if path.stem == stem:
            return path
    raise ValueError(
        f'there is no recipe and no config file {name!r}{checks.closest(stem, recipe_names())} '
        '(`swin-dense zoo` lists the recipes)'
    )


def _configs_of(package: str) -> Path | None:
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0], '.mim', 'configs')

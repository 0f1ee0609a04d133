"""Where the recipes lie, in a clone and in an installed wheel, and how they are read.

A recipe is a file below ``configs``, or a config of mmdet or mmseg with their Swin exchanged for ours. The latter need
no files; the metafiles in ``configs/mmdet`` and ``configs/mmseg`` name them.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from swin_dense.recipes.zoo import framework_configs
from swin_dense.utils import checks

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
    return sorted([*(path.stem for path in _recipe_files()), *framework_configs(recipe_root())])


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
            config = Config.fromfile(name)
            list(config.values())  # where it imports what it names, this does
            return config
        except Exception as error:  # a config is a program, and raises anything
            raise ValueError(f'{name} cannot be read as a config ({type(error).__name__}: {error})') from error
    path = _find(name)
    if isinstance(path, str):
        return _with_our_swin(path)
    for package in _FOREIGN_BASE.findall(path.read_text()):
        _configs_of(package, path.stem)
    with tempfile.TemporaryDirectory() as folder:
        configs = Path(folder, 'configs')
        shutil.copytree(recipe_root() / 'configs', configs, ignore=shutil.ignore_patterns('__pycache__'))
        for file in configs.rglob('*.py'):
            file.write_text(_FOREIGN_BASE.sub(lambda match: f"'{_configs_of(match[1], path.stem)}/", file.read_text()))
        return Config.fromfile(configs / path.relative_to(recipe_root() / 'configs'))


def _recipe_files() -> list[Path]:
    return [path for path in (recipe_root() / 'configs').glob('[!_]*/*.py') if not path.name.startswith('_')]


def _with_our_swin(place: str) -> Config:
    """Read a config of a framework as one that inherits from it and exchanges the type of the backbone.

    Args:
        place: such as 'mmdet::dino/dino-5scale_swin-l_8xb2-12e_coco.py'.
    """
    from mmengine.config import Config

    package, _, file = place.partition('::')
    config = Config.fromfile(_configs_of(package, Path(file).stem) / file)
    config.model.backbone.type = 'SwinDense'
    imports = config.get('custom_imports', {}).get('imports', [])
    imports = [imports] if isinstance(imports, str) else list(imports)
    config.custom_imports = {'imports': ['swin_dense', *imports], 'allow_failed_imports': False}
    return config


def _find(name: str) -> Path | str:
    """Return the file of a recipe, or the place of the framework's config that it is."""
    stem = Path(name).name.removesuffix('.py')
    for path in _recipe_files():
        if path.stem == stem:
            return path
    place = framework_configs(recipe_root()).get(stem)
    if place is not None:
        return place
    raise ValueError(
        f'there is no recipe and no config file {name!r}{checks.closest(stem, recipe_names())} '
        '(`swin-dense zoo` lists the recipes)'
    )


def _configs_of(package: str, recipe: str) -> Path:
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f'{recipe} starts from configs of {package}, which is not installed')
    return Path(spec.submodule_search_locations[0], '.mim', 'configs')

"""Count every model of the zoo anew, and rewrite complexity.json and the tables of the READMEs under configs/."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from mmengine.config import Config

from swin_dense.analysis.counting import build_on_meta, count, published_shape
from swin_dense.recipes.zoo import FOLDERS, markdown, read_zoo

REPOSITORY = Path(__file__).resolve().parent.parent
TABLE_START = '<!-- written by tools/update_zoo.py -->\n'
TABLE_END = '<!-- end -->\n'


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    update(REPOSITORY)


def update(repository: Path) -> None:
    """Do so below a folder."""
    counts = {str(config.relative_to(repository)): count_config(config) for config in zoo_configs(repository)}
    (repository / 'configs/complexity.json').write_text(json.dumps(counts, indent=2) + '\n')
    for folder in FOLDERS:
        readme = repository / 'configs' / folder / 'README.md'
        readme.write_text(replace_table(readme.read_text(), markdown(read_zoo(repository, folder))))
        print(f'wrote {readme.relative_to(repository)}')


def zoo_configs(repository: Path) -> list[Path]:
    """Return the configs of the zoo, sorted."""
    return sorted(path for folder in FOLDERS for path in (repository / 'configs' / folder).glob('*.py'))


def count_config(path: Path) -> dict[str, Any]:
    """Count the model of one config at the size that published figures are for."""
    config = Config.fromfile(path)
    shape = published_shape(config)
    result = count(build_on_meta(config), *shape)
    return {
        'shape': list(shape),
        'parameters': result.parameters[''],
        'flops': result.flops[''],
        'computed_flops': result.computed_flops[''],
    }


def replace_table(text: str, table: str) -> str:
    """Replace what stands between the two markers of a README.

    Raises:
        ValueError: a marker is missing.
    """
    before, start, rest = text.partition(TABLE_START)
    _, end, after = rest.partition(TABLE_END)
    if not start or not end:
        raise ValueError(f'the README needs the lines {TABLE_START!r} and {TABLE_END!r} around its table')
    return before + start + table + end + after


if __name__ == '__main__':
    main()

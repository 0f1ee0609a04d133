"""List the recipes of configs/: task, model, schedule, published figures, parameters, FLOPs and config.

    python tools/browse_zoo.py               # a table in the terminal
    python tools/browse_zoo.py --markdown    # the tables of the READMEs
    python tools/browse_zoo.py --update      # count every model anew and rewrite complexity.json and the READMEs

Everything published comes from the metafiles, which name its source. What is counted comes from complexity.json.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).resolve().parent.parent
FOLDERS = ('mask_rcnn', 'cascade_mask_rcnn', 'retinanet', 'upernet')
TABLE_START = '<!-- written by tools/browse_zoo.py --update -->\n'
TABLE_END = '<!-- end -->\n'


@dataclass(frozen=True)
class Recipe:
    """One config, what was published for it and what its model was counted to cost.

    Attributes:
        config: path below the repository.
        metrics: published accuracy by metric; empty where nothing was published.
        weights: address of published weights, '' where there are none.
        published: parameters and FLOPs as published, '' where they were not.
        counted: one of the entries of complexity.json.
    """

    config: Path
    task: str
    head: str
    backbone: str
    window: int
    pretraining: str
    schedule: str
    origin: str
    metrics: dict[str, float]
    weights: str
    published: str
    counted: dict[str, Any]

    @property
    def accuracy(self) -> str:
        return ', '.join(f'{value} {name}' for name, value in self.metrics.items()) or 'none published'

    @property
    def cost(self) -> str:
        height, width = self.counted['shape']
        parameters, flops = self.counted['parameters'] / 1e6, self.counted['flops'] / 1e9
        return f'{parameters:.1f}M, {flops:.0f}G at {height}x{width}'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    what.add_argument('--markdown', action='store_true', help='print Markdown')
    what.add_argument('--update', action='store_true', help='count anew and rewrite complexity.json and the READMEs')
    args = parser.parse_args()
    if args.update:
        update(REPOSITORY)
    elif args.markdown:
        for folder in FOLDERS:
            print(markdown(read_zoo(REPOSITORY, folder)))
    else:
        print(plain([recipe for folder in FOLDERS for recipe in read_zoo(REPOSITORY, folder)]))


def read_zoo(repository: Path, folder: str) -> list[Recipe]:
    """Read the recipes of one folder of configs/ from its metafile."""
    counted = json.loads((repository / 'configs/complexity.json').read_text())
    models = yaml.safe_load((repository / 'configs' / folder / 'metafile.yml').read_text())['Models']
    return [_recipe(model, counted[model['Config']]) for model in models]


def _recipe(model: dict[str, Any], counted: dict[str, Any]) -> Recipe:
    metadata = model['Metadata']
    results = model.get('Results', [])
    published = model.get('Published Complexity')
    return Recipe(
        config=Path(model['Config']),
        task='segmentation' if metadata['Training Data'] == 'ADE20K' else 'detection',
        head=model['In Collection'],
        backbone=metadata['Backbone'],
        window=metadata['Window'],
        pretraining=metadata['Pretraining'],
        schedule=metadata['Schedule'],
        origin=metadata['Recipe'],
        metrics={name: value for result in results for name, value in result['Metrics'].items()},
        weights=model.get('Weights', ''),
        published=f'{published["Parameters"]}, {published["FLOPs"]}' if published else '',
        counted=counted,
    )


def plain(recipes: list[Recipe]) -> str:
    header = (
        'task',
        'head',
        'backbone',
        'window',
        'pretraining',
        'schedule',
        'recipe',
        'published',
        'counted',
        'config',
    )
    rows = [
        (
            recipe.task,
            recipe.head,
            recipe.backbone,
            str(recipe.window),
            recipe.pretraining,
            recipe.schedule,
            recipe.origin,
            recipe.accuracy,
            recipe.cost,
            str(recipe.config),
        )
        for recipe in recipes
    ]
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    return '\n'.join(
        '  '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [header, *rows]
    )


def markdown(recipes: list[Recipe]) -> str:
    """Return the table of one folder's README."""
    metrics = list(dict.fromkeys(name for recipe in recipes for name in recipe.metrics))
    header = ['Backbone', 'Window', 'Pretraining', 'Schedule', 'Recipe', *metrics, 'Published', 'Counted', 'Files']
    lines = ['| ' + ' | '.join(header) + ' |', '|' + ' --- |' * len(header)]
    for recipe in recipes:
        files = f'[config]({recipe.config.name})' + (f', [weights]({recipe.weights})' if recipe.weights else '')
        cells = [
            recipe.backbone,
            str(recipe.window),
            recipe.pretraining,
            recipe.schedule,
            recipe.origin,
            *(str(recipe.metrics.get(name, '')) for name in metrics),
            recipe.published,
            recipe.cost,
            files,
        ]
        lines.append('| ' + ' | '.join(cells) + ' |')
    return '\n'.join(lines) + '\n'


def update(repository: Path) -> None:
    """Count every model of the zoo and rewrite complexity.json and the tables of the READMEs."""
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
    from mmengine.config import Config

    from swin_dense.analysis.counting import build_on_meta, count, published_shape

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

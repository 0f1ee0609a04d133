"""What the metafiles say about the recipes, as tables.

Everything published comes from the metafiles, which name its source. What is counted comes from complexity.json.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDERS = ('mask_rcnn', 'cascade_mask_rcnn', 'retinanet', 'upernet', 'ablations')


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


def read_zoo(root: Path, folder: str) -> list[Recipe]:
    """Read the recipes of one folder of ``root/configs`` from its metafile."""
    import yaml

    counted = json.loads((root / 'configs/complexity.json').read_text())
    models = yaml.safe_load((root / 'configs' / folder / 'metafile.yml').read_text())['Models']
    return [_recipe(model, counted[model['Config']]) for model in models]


def _recipe(model: dict[str, Any], counted: dict[str, Any]) -> Recipe:
    metadata = model['Metadata']
    results = model.get('Results', [])
    published = model.get('Published Complexity')
    return Recipe(
        config=Path(model['Config']),
        task='segmentation' if metadata['Training Data'] == 'ADE20K' else 'detection',
        head=model['In Collection'],
        backbone=', '.join(metadata[key] for key in ('Backbone', 'Setting') if key in metadata),
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
    """Return a table for a terminal."""
    header = ('task', 'head', 'backbone', 'window', 'pretraining', 'schedule', 'recipe', 'published', 'counted', 'name')
    rows = [header, *(_row(recipe) for recipe in recipes)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = ('  '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return '\n'.join(line.rstrip() for line in lines)


def with_words(recipes: list[Recipe], words: list[str]) -> list[Recipe]:
    """Return the recipes in whose row every word stands, in upper or lower case."""
    return [recipe for recipe in recipes if all(word.lower() in '  '.join(_row(recipe)).lower() for word in words)]


def _row(recipe: Recipe) -> tuple[str, ...]:
    return (
        recipe.task,
        recipe.head,
        recipe.backbone,
        str(recipe.window),
        recipe.pretraining,
        recipe.schedule,
        recipe.origin,
        recipe.accuracy,
        recipe.cost,
        recipe.config.stem,
    )


def markdown(recipes: list[Recipe]) -> str:
    """Return the table of one folder's README."""
    metrics = list(dict.fromkeys(name for recipe in recipes for name in recipe.metrics))
    header = ['Backbone', 'Window', 'Pretraining', 'Schedule', 'Recipe', *metrics, 'Published', 'Counted', 'Files']
    lines = ['| ' + ' | '.join(header) + ' |', '|' + ' --- |' * len(header)]
    for recipe in recipes:
        missing = '' if recipe.metrics else 'none published'
        files = f'[config]({recipe.config.name})' + (f', [weights]({recipe.weights})' if recipe.weights else '')
        cells = [
            recipe.backbone,
            str(recipe.window),
            recipe.pretraining,
            recipe.schedule,
            recipe.origin,
            *(str(recipe.metrics.get(name, missing)) for name in metrics),
            recipe.published,
            recipe.cost,
            files,
        ]
        lines.append('| ' + ' | '.join(cells) + ' |')
    return '\n'.join(lines) + '\n'

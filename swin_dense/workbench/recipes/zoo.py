"""Tables of the recipes, from their metafiles.

Published figures come from the metafiles, which name their sources. Counted parameters and FLOPs come from
complexity.json.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FRAMEWORKS = ('mmdet', 'mmseg')  # folders with a metafile only, because their recipes are configs of the frameworks
FOLDERS = (
    'mask_rcnn',
    'cascade_mask_rcnn',
    'faster_rcnn',
    'retinanet',
    'upernet',
    'ablations',
    *FRAMEWORKS,
)

# The metrics of mmdet and mmseg for those of the metafiles, and the factor that makes them percent.
MEASURED = {
    'box AP': ('coco/bbox_mAP', 100),
    'mask AP': ('coco/segm_mAP', 100),
    'PQ': ('coco_panoptic/PQ', 1),
    'mIoU': ('mIoU', 1),
    'mIoU(ms+flip)': ('mIoU', 1),
}


@dataclass(frozen=True)
class Recipe:
    """A config with its published results and its counted parameters and FLOPs."""

    model: dict[str, Any]  # entry of the metafile
    # Entry of complexity.json, in which 'flops' is None if they cannot be counted; None if the model needs packages
    # besides the framework.
    counted: dict[str, Any] | None

    @property
    def config(self) -> Path:
        """The file in the repository, or a name such as 'mmdet::dino/dino-5scale_swin-l_8xb2-12e_coco.py'."""
        return Path(self.model['Config'])

    @property
    def metadata(self) -> dict[str, Any]:
        return self.model['Metadata']

    @property
    def backbone(self) -> str:
        return ', '.join(self.metadata[key] for key in ('Backbone', 'Setting') if key in self.metadata)

    @property
    def metrics(self) -> dict[str, float]:
        """Published accuracy by metric; empty if none was published."""
        found = {}
        for result in self.model.get('Results', []):
            other = '' if result['Dataset'] in self.metadata['Training Data'] else f' on {result["Dataset"]}'
            for name, value in result['Metrics'].items():
                found[name + other] = value
        return found

    @property
    def weights(self) -> str:
        """The address of published weights, or ''."""
        return self.model.get('Weights', '')

    @property
    def accuracy(self) -> str:
        return ', '.join(f'{value} {name}' for name, value in self.metrics.items()) or 'none published'

    @property
    def cost(self) -> str:
        if self.counted is None:
            return f'needs {self.metadata["Needs"]}'
        height, width = self.counted['shape']
        parameters, flops = f'{self.counted["parameters"] / 1e6:.1f}M', self.counted['flops']
        return parameters if flops is None else f'{parameters}, {flops / 1e9:.0f}G at {height}x{width}'


def read_zoo(root: Path, folder: str) -> list[Recipe]:
    """Read the recipes of a folder in ``root/configs`` from its metafile."""
    counted = json.loads((root / 'configs/complexity.json').read_text(encoding='utf-8'))
    return [Recipe(model, counted[model['Config']]) for model in _models(root, folder)]


def framework_configs(root: Path) -> dict[str, str]:
    """Return the paths of the recipes that are configs of mmdet or mmseg, such as 'mmdet::dino/...py', by name."""
    configs = {}
    for folder in FRAMEWORKS:
        for model in _models(root, folder):
            configs[model['Name']] = model['Config']
    return configs


def published_weights(root: Path, name: str) -> str:
    """Return the address of the published weights of the recipe with a name, '' if there are none."""
    for folder in FOLDERS:
        for model in _models(root, folder):
            if Path(model['Config']).stem == name:
                return model.get('Weights', '')
    return ''


def find_recipe(root: Path, name: str) -> Recipe | None:
    """Return the recipe with a name, or None."""
    for folder in FOLDERS:
        for recipe in read_zoo(root, folder):
            if recipe.config.stem == name:
                return recipe
    return None


REPRODUCED = 'a row for the table "Reproduced by" of docs/on-photographs.md; open an issue with it:'


def beside_published(recipe: Recipe, measured: dict[str, float], tta: bool = False) -> list[str]:
    """Return a line for each published figure of a recipe that was measured too, one on their source, and a table row.

    Args:
        recipe: that recipe.
        measured: the metrics that mmdet or mmseg returned, by name.
        tta: whether test-time augmentation was used; its figures are compared with those that were published with it.
    """
    lines = []
    both = []
    for name, published in recipe.metrics.items():
        metric, factor = MEASURED.get(name, ('', 1))
        if metric not in measured or tta != name.endswith('(ms+flip)'):
            continue
        decimals = len(str(published).partition('.')[2])  # of the published figure
        found = round(factor * measured[metric], decimals)
        difference = f'{abs(found - published):.{decimals}f} {"lower" if found < published else "higher"}'
        verdict = 'agrees' if found == published else difference
        lines.append(f'{name}: {found:.{decimals}f} measured, {published} published: {verdict}')
        both.append((f'{published} {name}', f'{found:.{decimals}f} {name}'))
    if not lines:
        return []
    sources = {f'{result["Published By"]}, {result["Source"]}' for result in recipe.model.get('Results', [])}
    lines += [f'published by {source}' for source in sorted(sources)]
    published_cell, measured_cell = (', '.join(cells) for cells in zip(*both, strict=True))
    row = f'| `{recipe.config.stem}` | {published_cell} | {measured_cell} | YOUR NAME | LINK TO THE LOG |'
    return [*lines, REPRODUCED, row]


def _models(root: Path, folder: str) -> list[dict[str, Any]]:
    import yaml  # which models in a file do not need

    text = (root / 'configs' / folder / 'metafile.yml').read_text(encoding='utf-8')
    return yaml.load(text, getattr(yaml, 'CSafeLoader', yaml.SafeLoader))['Models']


def plain(recipes: list[Recipe], weights: bool = False) -> str:
    """Return the recipes as text for a terminal: each name, and below it, in at most 100 columns, the facts about it.

    With ``weights``, add the addresses of the weights, which may be longer.
    """
    lines = []
    for recipe in recipes:
        lines.append(recipe.config.stem)
        facts = textwrap.wrap('; '.join(_facts(recipe)), 96, break_on_hyphens=False)
        lines += [f'    {line}' for line in facts]
        if weights:
            lines.append(f'    {recipe.weights or "no weights published"}')
    return '\n'.join(lines)


def matching_recipes(recipes: list[Recipe], words: Sequence[str]) -> list[Recipe]:
    """Return the recipes whose name or facts contain all words; the case of letters does not matter."""
    found = []
    for recipe in recipes:
        text = '; '.join((recipe.config.stem, *_facts(recipe))).lower()
        if all(word.lower() in text for word in words):
            found.append(recipe)
    return found


def _facts(recipe: Recipe) -> tuple[str, ...]:
    metadata = recipe.metadata
    return (
        recipe.accuracy if recipe.metrics else 'no accuracy published',
        recipe.cost,
        metadata['Task'],
        metadata['Training Data'],
        recipe.model['In Collection'],
        recipe.backbone,
        f'window {metadata["Window"]}',
        f'pretraining: {metadata["Pretraining"]}',
        metadata['Schedule'],
        metadata['Recipe'],
    )

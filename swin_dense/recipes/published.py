"""Compare the published accuracy of a recipe with the measured one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from swin_dense.recipes.files import recipe_root
from swin_dense.recipes.zoo import FOLDERS, Recipe, read_zoo
from swin_dense.utils.texts import table

# Published metric: the end of the framework's name of it, and the factor to percent.
_MEASURED = {'box AP': ('bbox_mAP', 100), 'mask AP': ('segm_mAP', 100), 'PQ': ('panoptic/PQ', 1), 'mIoU': ('mIoU', 1)}
_AUGMENTED = '(ms+flip)'  # at the end of metrics that were measured with test-time augmentation


def recipe_with_weights(name: str) -> Recipe:
    """Return the recipe of a name, or of a path of its file, that has published weights and a published accuracy."""
    stem = Path(name).name.removesuffix('.py')
    found = [recipe for folder in FOLDERS for recipe in read_zoo(recipe_root(), folder) if recipe.config.stem == stem]
    if not found:
        raise ValueError(f'--published needs the name of a recipe, got {name!r} (`swin-dense zoo` lists the recipes)')
    if not found[0].weights or not found[0].metrics:
        what = 'accuracy' if found[0].weights else 'weights'
        raise ValueError(
            f'no {what} of {stem} were published; `swin-dense zoo --weights` lists the recipes with weights'
        )
    return found[0]


def side_by_side(recipe: Recipe, measured: Mapping[str, float], is_augmented: bool = False) -> str:
    """Return a table of the published and the measured accuracy, in percent.

    The measured metrics have the framework's names, as its test returns them, with or without test-time augmentation.
    """
    rows = [('metric', 'published', 'measured', 'difference')]
    for metric, published in recipe.metrics.items():
        # 'box AP on COCO' is that of a model trained on other data.
        end, factor = _MEASURED.get(metric.partition(' on ')[0].removesuffix(_AUGMENTED), ('', 1))
        values = [float(value) * factor for name, value in measured.items() if end and name.endswith(end)]
        if len(values) != 1 or metric.endswith(_AUGMENTED) != is_augmented:
            rows.append((metric, f'{published:.2f}', 'not measured', ''))
        else:
            rows.append((metric, f'{published:.2f}', f'{values[0]:.2f}', f'{values[0] - published:+.2f}'))
    return table(rows)

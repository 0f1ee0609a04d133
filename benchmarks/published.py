"""Plot the published accuracy of the recipes against the time and memory of their backbones, measured here.

    python benchmarks/published.py --measure      # on an idle machine: writes benchmarks/results/published.json
    python benchmarks/published.py                # draws docs/images/accuracy.png from the raw results

Each backbone is timed at the test size of its recipe: 800 x 1344 pixels on COCO, the crop size on ADE20K.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

import alone
from measurements import RESULTS, read

from swin_dense.workbench.recipes.zoo import FOLDERS, Recipe, read_zoo

ROOT = Path(__file__).resolve().parent.parent
RAW = 'published.json'
IMAGES = ROOT / 'docs/images'
PANELS = {'COCO': 'box AP', 'ADE20K': 'mIoU'}


@dataclass(frozen=True)
class Point:
    """A recipe with its published accuracy, its backbone and its test size."""

    head: str
    accuracy: float
    backbone: str  # 'Swin-T'
    window: int
    size: tuple[int, int]

    @property
    def key(self) -> tuple[str, int, str]:
        """What tells its measurements from others: arch, window and size."""
        return self.backbone.replace('-', '_').lower(), self.window, f'1 x {self.size[0]} x {self.size[1]}'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--measure', action='store_true', help='measure instead of drawing')
    if parser.parse_args().measure:
        for arch, window, size in dict.fromkeys(point.key for data in PANELS for point in published(data)):
            options = ['--models', 'auto', '--processes', '3', '--turns', '5', '--json', str(RESULTS / RAW)]
            alone.main(['--arch', arch, '--window', str(window), '--cases', f'inference, {size}', *options])
    else:
        draw_accuracy(IMAGES / 'accuracy.png')


def published(data: str) -> list[Point]:
    """Return the recipes for one data set with a published value of the metric of its plot."""
    recipes = [recipe for folder in FOLDERS for recipe in read_zoo(ROOT, folder)]
    return [
        Point(
            recipe.model['In Collection'],
            recipe.metrics[PANELS[data]],
            recipe.backbone,
            recipe.metadata['Window'],
            size_of(recipe),
        )
        for recipe in recipes
        # Skip ablations and an RTMDet with a fifth stage, which have a remark after the name of the backbone.
        if recipe.metadata['Training Data'] == data and PANELS[data] in recipe.metrics and ',' not in recipe.backbone
    ]


def size_of(recipe: Recipe) -> tuple[int, int]:
    """Return the test image size of a recipe, (height, width) in pixels."""
    if recipe.metadata['Training Data'] == 'COCO':
        return 800, 1344
    side = int(re.findall(r'(\d{3})x\1', recipe.config.stem)[-1])
    return side, side


def draw_accuracy(path: Path) -> None:
    """Plot published accuracy over measured time, one panel per data set. Marker areas are proportional to memory."""
    from matplotlib.figure import Figure

    found: dict[str, dict[tuple[str, int, str], float]] = {'time': {}, 'peak memory': {}}
    for one in read(RAW):
        key = one.run['settings']['arch'], one.run['settings']['window'], one.size
        found.get(one.quantity, {})[key] = one.value
    times, memory = found.values()
    figure = Figure(figsize=(11, 4.6), layout='constrained')
    for axes, (data, metric) in zip(figure.subplots(1, 2), PANELS.items(), strict=True):
        points = published(data)
        heads = list(dict.fromkeys(point.head for point in points))
        for number, head in enumerate(heads):
            own = [point for point in points if point.head == head]
            axes.scatter(
                [times[point.key] for point in own],
                [point.accuracy for point in own],
                [memory[point.key] / 4 for point in own],
                label=head,
                color=f'C{number}',
                alpha=0.55,
                edgecolors='none',
            )
        for backbone in dict.fromkeys(point.backbone for point in points):
            keys = [point.key for point in points if point.backbone == backbone]
            key = min(keys, key=lambda key: times[key])
            top = max(point.accuracy for point in points if point.key == key)
            where = (times[key], top)
            axes.annotate(backbone, where, (0, 9), textcoords='offset points', ha='center', fontsize=8)
        slowest = max(times[point.key] for point in points)
        axes.set(xlabel='time of the backbone (ms)', ylabel=f'published {metric}', title=data)
        axes.set_xlim(0, 1.08 * slowest)
        axes.margins(y=0.15)
        legend = axes.legend(fontsize=8, loc='lower right')
        for handle in legend.legend_handles:
            handle.set_sizes([40])
    figure.savefig(path, dpi=110)


if __name__ == '__main__':
    main()

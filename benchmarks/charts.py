"""Draw the charts of the pages from the raw results.

python benchmarks/charts.py speed          # docs/images/speed.png, from benchmarks/results/h200_session_*.json
python benchmarks/charts.py areas          # benchmarks/results/cpu_sweep.png, from cpu_sweep.json
python benchmarks/charts.py photographs    # docs/images/photographs.png, from benchmarks/results/real_data.json
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use('Agg')
import matplotlib.pyplot as plt
from measurements import RESULTS, Measurement, read

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / 'docs' / 'images'
MODELS = {
    'auto': 'swin_dense',
    'sdpa': 'swin_dense,\nno kernels',
    'timm': 'timm',
    'torchvision': 'torchvision',
    'mmdet': 'mmdet',
}
LARGEST = '2 x 800 x 1344'
COLOURS = ('#30609c', '#9cb8d8', '#e08a2e')
# The control is SwinTransformer once more, from the next larger number for each weight.
BACKBONES = {'SwinTransformer': ('#e08a2e', '-'), 'control': ('#888888', ':'), 'SwinDense': ('#30609c', '--')}
TITLES = {
    'nuclei': 'Mask R-CNN, nuclei',
    'nuclei-pixels': 'UPerNet, pixels of nuclei',
    'blood-cells': 'Faster R-CNN, blood cells',
}
SMOOTHED = 10  # steps that a point of a curve averages
SEEDS = 3  # more curves hide each other


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('chart', choices=('speed', 'areas', 'photographs'))
    match parser.parse_args().chart:
        case 'speed':
            draw_speed(read(*sorted(path.name for path in RESULTS.glob('h200_session_*.json'))), IMAGES / 'speed.png')
        case 'areas':
            draw_areas(read('cpu_sweep.json'), RESULTS / 'cpu_sweep.png')
        case 'photographs':
            draw_curves(json.loads((RESULTS / 'real_data.json').read_text())['runs'], IMAGES / 'photographs.png')


def draw_speed(found: Sequence[Measurement], path: Path) -> None:
    """Draw wall time, GPU time and the time of a CUDA graph of each library, with the release that measured them."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.4), constrained_layout=True)
    for axis, what in zip(axes, ('inference', 'training step'), strict=True):
        ways = {'wall time': ('eager', 'wall time'), 'GPU time alone': ('eager', 'GPU time')}
        if what == 'inference':
            ways['CUDA graph, wall time'] = ('graphs', 'wall time')
        series = {}
        for label, names in ways.items():
            release, times = newest(found, what, *names)
            series[f'{label}, release {release}'] = [times.get(name, 0) for name in MODELS]
        width = 0.8 / len(series)
        for index, (label, times) in enumerate(series.items()):
            places = [place + (index - (len(series) - 1) / 2) * width for place in range(len(MODELS))]
            bars = axis.bar(places, times, width, color=COLOURS[index], label=label)
            axis.bar_label(bars, [f'{time:.1f}' if time else '' for time in times], fontsize=7)
        axis.set_xticks(range(len(MODELS)), MODELS.values(), fontsize=8)
        axis.set_title(
            'forward pass' if what == 'inference' else 'training step: forward and backward pass', fontsize=10
        )
        axis.set_ylabel('milliseconds', fontsize=8)
        axis.tick_params('y', labelsize=8)
        axis.spines[['top', 'right']].set_visible(False)
        axis.set_ylim(top=1.45 * max(max(times) for times in series.values()))
        axis.legend(fontsize=7, frameon=False, loc='upper left')
    figure.suptitle('Swin-T alone, 2 images of 800 x 1344, bfloat16 by autocast, NVIDIA H200', fontsize=10)
    figure.savefig(path, dpi=120)


def newest(found: Sequence[Measurement], what: str, way: str, quantity: str) -> tuple[str, dict[str, float]]:
    """Return the newest release that measured this on the largest images, and its values by model."""
    names = (what, way, LARGEST, quantity)
    rows = [one for one in found if (one.what, one.way, one.size, one.quantity) == names]
    release = max(one.release for one in rows)
    return release, {one.model: one.value for one in rows if one.release == release}


def draw_areas(found: Sequence[Measurement], path: Path) -> None:
    """Draw the time of a pass over the area of the image."""
    figure, axes = plt.subplots(figsize=(7, 4), constrained_layout=True)
    times: dict[str, dict[float, float]] = {}
    for one in found:
        batch, height, width = map(int, one.size.split(' x '))
        if (one.quantity, batch, one.run['settings']['window']) == ('time', 1, 7):
            times.setdefault(one.model, {})[height * width / 1e6] = one.value
    for model, by_area in times.items():
        axes.plot(*zip(*sorted(by_area.items()), strict=True), marker='o', label=model)
    axes.set(xlabel='image area (megapixels)', ylabel='median time (ms)', xlim=(0, None), ylim=(0, None))
    axes.legend()
    figure.savefig(path)


def draw_curves(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the loss of each step of the small runs, one panel for each data set: the backbones over each other."""
    figure, axes = plt.subplots(1, len(TITLES), figsize=(11, 3.2), constrained_layout=True)
    for axis, (dataset, title) in zip(axes, TITLES.items(), strict=True):
        for backbone, (colour, line) in BACKBONES.items():
            key = (dataset, 'small', backbone)
            own = [run for run in runs if (run['dataset'], run['size'], run['backbone']) == key][:SEEDS]
            for index, run in enumerate(own):
                losses = [step['loss'] for step in run['losses']]
                means = [statistics.fmean(losses[max(0, end - SMOOTHED) : end]) for end in range(1, len(losses) + 1)]
                axis.plot(means, line, color=colour, linewidth=1.1, label=backbone if index == 0 else None)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel('training step', fontsize=8)
        axis.tick_params(labelsize=8)
        axis.spines[['top', 'right']].set_visible(False)
    axes[0].set_ylabel(f'loss, mean of {SMOOTHED} steps', fontsize=8)
    axes[1].legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=120)


if __name__ == '__main__':
    main()

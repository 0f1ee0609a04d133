"""Draw the charts of the pages from the raw results.

python benchmarks/charts.py speed          # docs/images/speed.png, from benchmarks/results/h200_session_*.json
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

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / 'benchmarks' / 'results'
IMAGES = ROOT / 'docs' / 'images'
MODELS = {
    'auto': 'swin_dense',
    'sdpa': 'swin_dense,\nno kernels',
    'timm': 'timm',
    'torchvision': 'torchvision',
    'mmdet': 'mmdet',
}
LARGEST = (2, (800, 1344))  # images and their size
COLOURS = ('#30609c', '#9cb8d8', '#e08a2e')
BACKBONES = {'SwinTransformer': ('#e08a2e', '-'), 'SwinDense': ('#30609c', '--')}
TITLES = {
    'nuclei': 'Mask R-CNN, nuclei',
    'nuclei-pixels': 'UPerNet, pixels of nuclei',
    'blood-cells': 'Faster R-CNN, blood cells',
}
SMOOTHED = 10  # steps that a point of a curve averages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('chart', choices=('speed', 'photographs'))
    if parser.parse_args().chart == 'speed':
        sessions = [json.loads(path.read_text()) for path in sorted(RESULTS.glob('h200_session_*.json'))]
        draw_speed(sessions, IMAGES / 'speed.png')
    else:
        draw_curves(json.loads((RESULTS / 'real_data.json').read_text())['runs'], IMAGES / 'photographs.png')


def draw_speed(sessions: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw wall time, GPU time and the time of a CUDA graph of each library, with the release that measured them."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.4), constrained_layout=True)
    for axis, is_training in zip(axes, (False, True), strict=True):
        release, eager = newest(sessions, 'eager', is_training)
        series = {
            f'wall time, release {release}': [eager[name]['wall_ms'] for name in MODELS],
            f'GPU time alone, release {release}': [eager[name]['device_ms'] for name in MODELS],
        }
        if not is_training:
            of_graphs, graphs = newest(sessions, 'graphs', is_training)
            times = [graphs[name]['wall_ms'] if name in graphs else 0 for name in MODELS]
            series[f'CUDA graph, wall time, release {of_graphs}'] = times
        width = 0.8 / len(series)
        for index, (label, times) in enumerate(series.items()):
            places = [place + (index - (len(series) - 1) / 2) * width for place in range(len(MODELS))]
            bars = axis.bar(places, times, width, color=COLOURS[index], label=label)
            axis.bar_label(bars, [f'{time:.1f}' if time else '' for time in times], fontsize=7)
        axis.set_xticks(range(len(MODELS)), MODELS.values(), fontsize=8)
        axis.set_title('training step: forward and backward pass' if is_training else 'forward pass', fontsize=10)
        axis.set_ylabel('milliseconds', fontsize=8)
        axis.tick_params('y', labelsize=8)
        axis.spines[['top', 'right']].set_visible(False)
        axis.set_ylim(top=1.45 * max(max(times) for times in series.values()))
        axis.legend(fontsize=7, frameon=False, loc='upper left')
    figure.suptitle('Swin-T alone, 2 images of 800 x 1344, bfloat16 by autocast, NVIDIA H200', fontsize=10)
    figure.savefig(path, dpi=120)


def newest(sessions: Sequence[dict[str, Any]], step: str, is_training: bool) -> tuple[str, dict[str, dict[str, Any]]]:
    """Return the newest release that measured a step on the largest images, and its rows by model."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for session in sessions:
        for row in session['steps'].get(step, {'rows': []})['rows']:
            form = (row.get('batch'), tuple(row['size'])), row.get('training', False), row.get('pure_bfloat16', False)
            if 'wall_ms' in row and form == (LARGEST, is_training, False):
                found.setdefault(session['machine']['release'], {})[row['model']] = row
    release = max(found)
    return release, found[release]


def draw_curves(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the loss of each step of all runs, one panel for each data set: both backbones over each other."""
    figure, axes = plt.subplots(1, len(TITLES), figsize=(11, 3.2), constrained_layout=True)
    for axis, (dataset, title) in zip(axes, TITLES.items(), strict=True):
        for backbone, (colour, line) in BACKBONES.items():
            own = [run for run in runs if (run['dataset'], run['backbone']) == (dataset, backbone)]
            for index, run in enumerate(own):
                losses = [step['loss'] for step in run['losses']]
                means = [statistics.fmean(losses[max(0, end - SMOOTHED) : end]) for end in range(1, len(losses) + 1)]
                axis.plot(means, line, color=colour, linewidth=1.1, label=backbone if index == 0 else None)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel('training step', fontsize=8)
        axis.tick_params(labelsize=8)
        axis.spines[['top', 'right']].set_visible(False)
    axes[0].set_ylabel(f'loss, mean of {SMOOTHED} steps', fontsize=8)
    axes[0].legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=120)


if __name__ == '__main__':
    main()

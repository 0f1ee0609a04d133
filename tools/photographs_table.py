"""Write what pages say of benchmarks/real_data.py: tables of scores and of differences, and a table for the README."""

from __future__ import annotations

import json
import statistics
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from markdown_table import markdown_table

RESULTS = Path(__file__).resolve().parent.parent / 'benchmarks' / 'results' / 'real_data.json'
ORIGINAL, CONTROL, OURS = BACKBONES = ('SwinTransformer', 'control', 'SwinDense')
# Data set -> the model and the data, in English and in Chinese, and the scores to show; the README shows the last.
SHOWN: dict[str, tuple[str, str, dict[str, tuple[str, ...]]]] = {
    'nuclei': (
        'Mask R-CNN, nuclei',
        'Mask R-CNN，细胞核',
        {
            'box AP': ('box', 'AP'),
            'box AP50': ('box', 'AP50'),
            'mask AP50': ('mask', 'AP50'),
            'mask AP': ('mask', 'AP'),
        },
    ),
    'nuclei-pixels': (
        'UPerNet, pixels of nuclei',
        'UPerNet，细胞核像素',
        {'IoU of nuclei': ('IoU of classes', 'nucleus'), 'mIoU': ('mIoU',)},
    ),
    'blood-cells': (
        'Faster R-CNN, blood cells',
        'Faster R-CNN，血细胞',
        {
            'AP of red cells': ('box', 'AP of classes', 'RBC'),
            'AP of white cells': ('box', 'AP of classes', 'WBC'),
            'AP of platelets': ('box', 'AP of classes', 'Platelets'),
            'box AP50': ('box', 'AP50'),
            'box AP': ('box', 'AP'),
        },
    ),
}
FIRST = 3  # steps that must agree


def photographs_table() -> str:
    """Return the facts of the runs, their scores, and the differences within each seed."""
    runs = _runs('small')
    rows, differences = [], []
    for dataset, (title, _, metrics) in SHOWN.items():
        for name, path in metrics.items():
            values = [_values(runs, dataset, backbone, path) for backbone in BACKBONES]
            rows.append([title, name, *(_by_seed(found) for found in values)])
        # Of the last score, which the README shows too.
        for backbone, other in zip(BACKBONES[1:], values[1:], strict=True):
            pairs = {seed: value - values[0][seed] for seed, value in other.items()}
            differences.append([f'{title}, {name}', backbone, _by_seed(pairs, '+.3f'), _mean_and_error(pairs.values())])
    table = markdown_table(['model, data', 'score', *BACKBONES], rows)
    titles = ['difference from SwinTransformer', 'of', 'for each seed', 'mean, and its standard error']
    return f'{_facts(runs)}\n\n{table}\n{markdown_table(titles, differences)}'


def medium_table() -> str:
    """Return the scores of the larger trainings, by the framework and by the exported file."""
    rows = []
    for run in _runs('medium'):
        title, _, metrics = SHOWN[run['dataset']]
        minutes = run['costs']['train']['processor seconds'] / 60
        how = f'{title}, {run["backbone"]}, {run["settings"]["epochs"]} epochs, {minutes:.0f} min of one thread'
        for name, path in metrics.items():
            rows.append([how, name, *(f'{_score(run, source, path):.3f}' for source in ('framework', 'file'))])
    return markdown_table(['model, data', 'score', 'framework', 'file'], rows)


def trained_table() -> str:
    """Return the table of the README."""
    titles = ['trained on public photographs', '`SwinTransformer`', 'control', '`SwinDense`']
    return markdown_table(titles, _last_scores(0, ' to ', ', '))


def chinese_trained_table() -> str:
    """Return the same table in Chinese."""
    titles = ['在公开照片上训练', '`SwinTransformer`', '对照', '`SwinDense`']
    return markdown_table(titles, _last_scores(1, ' 至 ', '，'))


def _runs(size: str) -> list[dict[str, Any]]:
    runs = json.loads(RESULTS.read_text())['runs']
    return sorted((run for run in runs if run['size'] == size), key=lambda run: run['seed'])


def _last_scores(language: int, to: str, comma: str) -> list[list[str]]:
    """Return a row for each model: its title, and for each backbone the mean, range and number of the seeds."""
    runs = _runs('small')
    rows = []
    for dataset, (*titles, metrics) in SHOWN.items():
        name, path = list(metrics.items())[-1]
        cells = []
        for backbone in BACKBONES:
            values = list(_values(runs, dataset, backbone, path).values())
            spread = f'{min(values):.3f}{to}{max(values):.3f}; {len(values)}' if values else ''
            cells.append(f'{statistics.fmean(values):.3f} ({spread})' if values else '')
        rows.append([f'{titles[language]}{comma}{name}', *cells])
    return rows


def _facts(runs: Sequence[dict[str, Any]]) -> str:
    """Return how far the first steps differ, how far files differ from the framework, and what the runs cost."""
    by_seed: dict[tuple[str, int], dict[str, Any]] = {}
    for run in runs:
        by_seed.setdefault((run['dataset'], run['seed']), {})[run['backbone']] = run
    steps = {}
    for backbone in (CONTROL, OURS):
        pairs = [(pair[ORIGINAL], pair[backbone]) for pair in by_seed.values() if {ORIGINAL, backbone} <= pair.keys()]
        steps[backbone] = max(
            abs(other['losses'][step]['loss'] / original['losses'][step]['loss'] - 1)
            for original, other in pairs
            for step in range(FIRST)
        )
    of_files = [
        abs(_score(run, 'file', path) - _score(run, 'framework', path))
        for run in runs
        if 'file' in run['scores']
        for path in SHOWN[run['dataset']][2].values()
    ]
    seconds = [run['costs']['train']['processor seconds'] for run in runs]
    processors = ' and '.join(sorted({run['processor'].partition(' (')[0] for run in runs}))
    return (
        f'The losses of the first {FIRST} steps differ from those of SwinTransformer by at most {steps[OURS]:.0e} of '
        f'their value with SwinDense, and by {steps[CONTROL]:.0e} in the control. {len(of_files)} scores of exported '
        f'files differ from those of the framework by at most {max(of_files):.0e}. A training took {min(seconds):.0f} '
        f'to {max(seconds):.0f} s of one thread ({processors}). A cell has the score of each seed, from seed 0.'
    )


def _values(runs: Sequence[dict[str, Any]], dataset: str, backbone: str, path: Sequence[str]) -> dict[int, float]:
    """Return a score by seed."""
    chosen = [run for run in runs if (run['dataset'], run['backbone']) == (dataset, backbone)]
    return {run['seed']: _score(run, 'framework', path) for run in chosen}


def _score(run: dict[str, Any], source: str, path: Sequence[str]) -> float:
    value: Any = run['scores'][source]
    for key in path:
        value = value[key]
    return value


def _by_seed(values: dict[int, float], form: str = '.3f') -> str:
    """Return the values from seed 0 on, with a dash for a seed that is missing before the last."""
    seeds = range(max(values, default=-1) + 1)
    return ', '.join(format(values[seed], form) if seed in values else '-' for seed in seeds)


def _mean_and_error(values: Collection[float]) -> str:
    """Return the mean of the values and its standard error; '' for fewer than two values."""
    if len(values) < 2:
        return ''
    return f'{statistics.fmean(values):+.3f} ± {statistics.stdev(values) / len(values) ** 0.5:.3f}'

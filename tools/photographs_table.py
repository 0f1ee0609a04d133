"""Write what pages say of benchmarks/real_data.py: a table of scores, and one sentence for the README."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent.parent / 'benchmarks' / 'results' / 'real_data.json'
BACKBONES = ('SwinTransformer', 'SwinDense')
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
    """Return the facts of the runs and the table of their scores, a column for each backbone and its file."""
    runs = _runs()
    rows = []
    for dataset, (title, _, metrics) in SHOWN.items():
        for name, path in metrics.items():
            cells = [
                _values(runs, dataset, backbone, source, path)
                for backbone in BACKBONES
                for source in ('framework', 'file')
            ]
            rows.append([title, name, *cells])
    titles = [f'{backbone}, {source}' for backbone in BACKBONES for source in ('framework', 'file')]
    lines = [['model, data', 'score', *titles], ['---'] * 6, *rows]
    table = ''.join('| ' + ' | '.join(cells) + ' |\n' for cells in lines)
    return f'{_facts(runs)}\n\n{table}'


def trained_line() -> str:
    """Return the sentence of the README."""
    scores = _last_scores(_runs(), 0)
    shown = '\n'.join(
        f'- {title}: {name} {values[0]}, and {values[1]} with `SwinDense`' for title, name, values in scores
    )
    return (
        'Three small models were trained on public photographs from random weights, with `SwinTransformer` and with '
        'the word changed (a figure for each seed):\n\n'
        f'{shown}\n\n'
        'The losses of the first step agree within rounding. Later, rounding grows from step to step, and '
        'each training takes its own way. `python benchmarks/real_data.py` repeats this ([on '
        'photographs](docs/on-photographs.md)).\n'
    )


def chinese_trained_line() -> str:
    """Return the same sentence in Chinese."""
    scores = _last_scores(_runs(), 1)
    shown = '\n'.join(f'- {title}：{name} {values[0]}，`SwinDense` 为 {values[1]}' for title, name, values in scores)
    return (
        '三个小模型在公开照片上由随机权重开始训练，分别使用 `SwinTransformer` 与改动一个词之后的配置'
        '（每个随机种子一个数值）：\n\n'
        f'{shown}\n\n'
        '第一步的损失在舍入误差内一致。之后舍入误差逐步放大，各次训练因此不同。'
        '`python benchmarks/real_data.py` 可重复这一训练（[真实照片](docs/on-photographs.md)）。\n'
    )


def _runs() -> list[dict[str, Any]]:
    return json.loads(RESULTS.read_text())['runs']


def _last_scores(runs: Sequence[dict[str, Any]], language: int) -> list[tuple[str, str, list[str]]]:
    found = []
    for dataset, (*titles, metrics) in SHOWN.items():
        name, path = list(metrics.items())[-1]
        values = [_values(runs, dataset, backbone, 'framework', path) for backbone in BACKBONES]
        if all(values):
            found.append((titles[language], name, values))
    return found


def _facts(runs: Sequence[dict[str, Any]]) -> str:
    """Return what the runs were, how far their first steps differ, and what they cost."""
    seeds = {dataset: {run['seed'] for run in runs if run['dataset'] == dataset} for dataset in SHOWN}
    counted = ', '.join(f'{len(found)} of {SHOWN[name][0]}' for name, found in seeds.items() if found)
    pairs: dict[tuple[str, int], dict[str, Any]] = {}
    for run in runs:
        pairs.setdefault((run['dataset'], run['seed']), {})[run['backbone']] = run
    differences = []
    for pair in pairs.values():
        if len(pair) == len(BACKBONES):
            losses = [[step['loss'] for step in pair[name]['losses'][:FIRST]] for name in BACKBONES]
            differences += [abs(one / other - 1) for one, other in zip(*losses, strict=True)]
    seconds = [run['costs']['train']['processor seconds'] for run in runs]
    processors = ' and '.join(sorted({run['processor'].partition(' (')[0] for run in runs}))
    return (
        f'Seeds of three that have been run: {counted}. The losses of the first {FIRST} steps differ by at most '
        f'{max(differences):.0e} of their value between the backbones. A training took {min(seconds):.0f} to '
        f'{max(seconds):.0f} s of one thread ({processors}). A cell has the score of each seed, in their order.'
    )


def _values(runs: Sequence[dict[str, Any]], dataset: str, backbone: str, source: str, path: Sequence[str]) -> str:
    """Return a score of each seed, in their order; '' if there is none."""
    values = []
    for run in sorted(runs, key=lambda run: run['seed']):
        value: Any = run['scores'].get(source)
        if (run['dataset'], run['backbone']) == (dataset, backbone) and value is not None:
            for key in path:
                value = value[key]
            values.append(f'{value:.3f}')
    return ', '.join(values)

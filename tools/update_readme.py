"""Write the tables of README.md from the raw results under benchmarks/, so that no figure in it is typed in."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# What mmdet and mmseg call a metric, and what the table says.
DEMO_METRICS = {
    'coco/bbox_mAP': 'Mask R-CNN, box AP',
    'coco/bbox_mAP_50': 'Mask R-CNN, box AP at IoU 0.5',
    'coco/segm_mAP': 'Mask R-CNN, mask AP',
    'coco/segm_mAP_50': 'Mask R-CNN, mask AP at IoU 0.5',
    'mIoU': 'UPerNet, mIoU',
}


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    readme = ROOT / 'README.md'
    readme.write_text(with_tables(readme.read_text()))


def with_tables(text: str) -> str:
    """Return the README with every table as the raw results have it."""
    for name, (source, table) in TABLES.items():
        text = replace_block(text, name, table(json.loads((ROOT / 'benchmarks' / source).read_text())))
    return text


def replace_block(text: str, name: str, block: str) -> str:
    """Replace what stands between the line ``<!-- name -->`` and the next ``<!-- end -->``.

    Raises:
        ValueError: a marker is missing.
    """
    start, end = f'<!-- {name} -->\n', '<!-- end -->'
    before, found, rest = text.partition(start)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f'README.md needs the lines {start.strip()} and {end} around this table')
    return before + start + block + end + after


def demo_table(summary: dict[str, Any]) -> str:
    """Return what ``make demo`` wrote into its summary.json as a table."""
    rows = [f'| {label} | {summary[name]:.3f} |' for name, label in DEMO_METRICS.items()]
    minutes = sum(summary['seconds'].values()) / 60
    return '\n'.join(['| validation images | |', '| --- | --- |', *rows, f'| minutes in all | {minutes:.1f} |', ''])


def tile_overlap_table(report: dict[str, Any]) -> str:
    """Return what benchmarks/tile_overlap.py measured on a photograph, as a table."""
    errors = report['errors']['photograph']
    strides = list(next(iter(errors.values())))
    rows = [
        f'| {overlap} | ' + ' | '.join(f'{row[s]:.0e}' if row[s] else '0' for s in strides) + ' |'
        for overlap, row in errors.items()
    ]
    header = '| overlap | ' + ' | '.join(f'stride {stride}' for stride in strides) + ' |'
    return '\n'.join([header, '|' + ' --- |' * (len(strides) + 1), *rows, ''])


# Per marker in the README, the file below benchmarks/ and what makes a table of it.
TABLES = {
    'tile overlap': ('tile_overlap.json', tile_overlap_table),
    'demo': ('demo.json', demo_table),
}


if __name__ == '__main__':
    main()

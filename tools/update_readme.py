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
    return replace_block(text, 'demo', demo_table(json.loads((ROOT / 'benchmarks' / 'demo.json').read_text())))


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


if __name__ == '__main__':
    main()

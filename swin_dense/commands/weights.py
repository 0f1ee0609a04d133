"""List published weights: the names that --checkpoint and create_backbone(checkpoint=...) take.

    swin-dense weights
    swin-dense weights swinv2 22k     # only weights that match all words
    swin-dense weights swin_t.in1k    # all facts about one file

The first use of a name downloads the file, and prints its address and size.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from swin_dense.archs.published import PublishedFile, published
from swin_dense.utils import checks

GROUP = 'backbones'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('words', nargs='*', metavar='WORD', help='list only weights that match all words')


def run(args: argparse.Namespace) -> int:
    rows = {file: ' '.join(_row(file)).lower() for file in published().values()}
    chosen = [file for file, row in rows.items() if all(word.lower() in row for word in args.words)]
    if len(args.words) == 1 and args.words[0] in published():
        chosen = [published()[args.words[0]]]
    if not chosen:
        words = ' '.join(args.words)
        raise ValueError(f'no weights match {words!r}{checks.closest(words, published())}')
    if len(chosen) == 1:
        print(_table([(f'{name}:', str(value)) for name, value in vars(chosen[0]).items() if value not in (None, '')]))
    else:
        print(_table([('name', 'image', 'window', 'classes', 'normalization', 'publisher'), *map(_row, chosen)]))
        licences = {file.publisher: file.licence for file in chosen}
        print('\n' + _table([('publisher', 'licence, as published'), *licences.items()]))
    return 0


def _row(file: PublishedFile) -> tuple[str, ...]:
    image, classes = str(file.img_size or ''), str(file.classes or 'none')
    return file.name, image, str(file.window_size), classes, file.normalization, file.publisher


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of the same number of cells as lines whose columns are aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ('  '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return '\n'.join(line.rstrip() for line in lines)

"""Write a page on which to see what a Swin does to a photograph: windows, shifts, attention, pyramid, reach and cost.

    swin-dense explore photo.jpg --checkpoint swin_tiny_patch4_window7_224.pth --out page.html
    swin-dense explore photo.jpg --out page.html --lang zh

The page is one file, opens without a network or a server, and follows the mouse, a finger or the arrow keys.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from swin_dense import checks
from swin_dense.atomic import written_whole
from swin_dense.commands._backbone import add_backbone_arguments, build_backbone
from swin_dense.commands._out import check_out
from swin_dense.explore.page import LANGUAGES, LARGEST_PAGE, make_page
from swin_dense.explore.record import make_record

# Weights that are shown further off than this are worth a word.
COARSE = 0.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('image', type=Path, help='path')
    add_backbone_arguments(parser)
    parser.add_argument('--out', required=True, type=Path, metavar='FILE', help='.html file to write')
    parser.add_argument('--lang', choices=LANGUAGES, default='en', help='in which it opens (default: %(default)s)')
    parser.add_argument(
        '--max-side',
        type=int,
        default=512,
        metavar='N',
        help='shrink an image with a longer side until it has N pixels (default: %(default)s)',
    )
    parser.add_argument(
        '--max-size',
        type=float,
        default=LARGEST_PAGE / 1e6,
        metavar='MB',
        help='of the page; attention is rounded until it fits (default: %(default)g)',
    )
    parser.add_argument('--force', action='store_true', help='replace FILE')


def run(args: argparse.Namespace) -> int:
    if args.out.suffix.lower() not in ('.html', '.htm'):
        raise ValueError(f'--out must end in .html, got {str(args.out)!r}')
    check_out(args.out, args.force)
    checks.integer('--max-side', args.max_side)
    if not 0 < args.max_size < float('inf'):
        raise ValueError(f'--max-size must be above 0, got {args.max_size:g}')
    if not args.image.is_file():
        raise FileNotFoundError(f'there is no file {args.image}')
    record = make_record(build_backbone(args), args.image, args.max_side)
    name = os.fsencode(args.image.name).decode(errors='replace')  # a file's name need not be text
    page = make_page(record, name, args.checkpoint is None, args.lang, int(args.max_size * 1e6))
    with written_whole(args.out) as unfinished:
        unfinished.path.write_text(page.text, encoding='utf-8')
    height, width = record.pixels.shape[:2]
    print(
        f'{args.out}: {record.model} on {height} x {width} pixels, {args.out.stat().st_size / 1e6:.1f} MB; 999 of '
        f"1000 attention weights within {100 * page.usually_off:.2f} percentage points of the model's, all within "
        f'{100 * page.off:.2f}'
    )
    if page.usually_off > COARSE:
        print('swin-dense explore: note: a larger --max-size or a smaller --max-side is more exact', file=sys.stderr)
    return 0

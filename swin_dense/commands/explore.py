"""Write an interactive page about a Swin on one photograph: windows, attention, pyramid, receptive fields, cost.

    swin-dense explore photo.jpg --checkpoint swin_t.in1k --out page.html
    swin-dense explore photo.jpg --out page.html --lang zh

The page is one HTML file and needs no network or server. Move over it with the mouse, a finger or the arrow keys.
"""

from __future__ import annotations

import argparse
import os
import sys

from swin_dense.commands._options import (
    add_backbone,
    add_checkpoint,
    add_normalization,
    add_out,
    check_backbone,
    check_file,
    check_out,
    normalization_options,
)
from swin_dense.utils import checks
from swin_dense.utils.atomic import write_text
from swin_dense.utils.choices import LANGUAGES, LARGEST_PAGE

GROUP = 'backbones'
# The command prints a note if the displayed attention weights have a larger error.
COARSE = 0.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('image', help='image file')
    add_checkpoint(parser)
    add_backbone(parser)
    add_normalization(parser)
    add_out(parser, '.html file to write')
    parser.add_argument(
        '--lang', choices=LANGUAGES, default='en', help='language of the page when it opens (default: %(default)s)'
    )
    parser.add_argument(
        '--max-side',
        type=int,
        default=512,
        metavar='N',
        help='shrink the image until its longer side has at most N pixels (default: %(default)s)',
    )
    parser.add_argument(
        '--max-size',
        type=float,
        default=LARGEST_PAGE / 1e6,
        metavar='MB',
        help='maximum size of the page; attention is rounded until it fits (default: %(default)g)',
    )


def run(args: argparse.Namespace) -> int:
    check_out(args, '.html', '.htm')
    check_file(args.image)
    check_backbone(args)
    normalization_options(args)
    checks.integer('--max-side', args.max_side)
    if not 0 < args.max_size < float('inf'):
        raise ValueError(f'--max-size must be above 0, got {args.max_size:g}')
    # These import torch, which --help does not need.
    from swin_dense.commands._backbone import build_backbone, normalization_of
    from swin_dense.explore.page import make_page
    from swin_dense.explore.record import make_record

    record = make_record(build_backbone(args), args.image, args.max_side, normalization_of(args))
    name = os.fsencode(os.path.basename(args.image)).decode(errors='replace')  # file names may be invalid UTF-8
    page = make_page(record, name, args.checkpoint is None, args.lang, int(args.max_size * 1e6))
    write_text(args.out, page.text)
    height, width = record.pixels.shape[:2]
    print(
        f'{args.out}: {record.model} on {height} x {width} pixels, {args.out.stat().st_size / 1e6:.1f} MB; 999 of '
        f"1000 attention weights within {100 * page.usually_off:.2f} percentage points of the model's, all within "
        f'{100 * page.off:.2f}'
    )
    if page.usually_off > COARSE:
        print(
            'swin-dense explore: note: for more exact weights, give a larger --max-size or a smaller --max-side',
            file=sys.stderr,
        )
    return 0

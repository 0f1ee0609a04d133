"""Draw features, attention, Grad-CAM, windows and shift masks of a backbone as PNG or PDF.

    swin-dense visualize pyramid photo.jpg --checkpoint swin_tiny.pth --out pyramid.png
    swin-dense visualize attention photo.jpg --checkpoint swin_tiny.pth --stage 2 --pixel 120 200 --out a.png
    swin-dense visualize grad-cam photo.jpg --checkpoint swin_tiny.pth --stages 2 3 --out cam.png
    swin-dense visualize windows photo.jpg --stage 1 --out windows.png
    swin-dense visualize masks --grid 20 26 --out masks.pdf

Stages and blocks count from 0. Odd blocks have shifted windows.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING, Any

import swin_dense
from swin_dense.commands._options import (
    add_adapter,
    add_backbone,
    add_normalization,
    add_out,
    add_window_size,
    check_backbone,
    check_file,
    check_out,
    normalization_of,
)
from swin_dense.utils import checks, packages
from swin_dense.utils.atomic import written_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

GROUP = 'backbones'
EXTRA = 'visualize'
SMALLEST_DPI = 10  # below, letters have no height and cannot be drawn
STAGES = range(4)  # of every published size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    output = argparse.ArgumentParser(add_help=False)
    add_out(output, 'file to write, .png or .pdf')
    output.add_argument('--dpi', type=int, default=100, help='dots per inch of a PNG (default: %(default)s)')
    model = argparse.ArgumentParser(add_help=False)
    model.add_argument('image', help='image file')
    add_backbone(model)
    add_adapter(model)
    add_normalization(model)
    window = argparse.ArgumentParser(add_help=False)
    add_window_size(window)

    kinds = parser.add_subparsers(dest='kind', metavar='PICTURE', required=True, help='what to draw')
    kinds.add_parser('pyramid', parents=[model, output], help='every level as colours (PCA), next to the image')
    attention = kinds.add_parser('attention', parents=[model, output], help='attention of one token')
    attention.add_argument('--stage', type=int, choices=STAGES, default=2, help='stage, from 0 (default: %(default)s)')
    attention.add_argument('--block', type=int, default=0, help='block, from 0 (default: %(default)s)')
    attention.add_argument(
        '--pixel', type=int, nargs=2, metavar=('ROW', 'COLUMN'), required=True, help='pixel of the token'
    )
    attention.add_argument(
        '--heads', type=int, nargs='*', default=[], help='heads to draw in addition to the mean over all heads'
    )
    cam = kinds.add_parser('grad-cam', parents=[model, output], help='Grad-CAM of one channel of the coarsest map')
    cam.add_argument('--stages', type=int, choices=STAGES, nargs='+', help='stages, from 0 (default: all)')
    cam.add_argument('--channel', type=int, help='channel of the coarsest map (default: the one with the largest mean)')
    windows = kinds.add_parser('windows', parents=[window, output], help='window grid and shifted regions')
    windows.add_argument('image', help='image file')
    windows.add_argument('--stage', type=int, choices=STAGES, default=1, help='stage, from 0 (default: %(default)s)')
    masks = kinds.add_parser('masks', parents=[window, output], help='shift masks as matrices')
    masks.add_argument('--grid', type=int, nargs=2, metavar=('H', 'W'), required=True, help='size of the map in tokens')


def run(args: argparse.Namespace) -> int:
    check_out(args, '.png', '.pdf')
    checks.integer('--dpi', args.dpi, minimum=SMALLEST_DPI)
    if args.kind != 'masks':
        check_file(args.image)
    if args.kind not in ('masks', 'windows'):
        check_backbone(args)
    packages.require('this command', 'matplotlib')
    figure = draw(args)
    with written_whole(args.out) as unfinished:
        figure.savefig(unfinished.path, dpi=args.dpi)
    print(f'wrote {args.out}')
    return 0


def draw(args: argparse.Namespace) -> Figure:
    """Return the requested figure."""
    # These import torch and matplotlib, which --help does not need.
    from swin_dense.analysis import explain, visualize
    from swin_dense.commands._backbone import build_backbone
    from swin_dense.features.normalization import Normalization, read_picture

    if args.kind == 'masks':
        return visualize.draw_shift_masks(tuple(args.grid), args.window_size)
    if args.kind == 'windows':
        return visualize.draw_windows(args.image, 4 * 2**args.stage, args.window_size)
    options = normalization_of(args)
    how = Normalization(**options)
    backbone = build_backbone(args)
    shown = read_picture(args.image, how)
    if args.kind == 'pyramid':
        return visualize.draw_pyramid(swin_dense.extract_pyramid(backbone, args.image, **options), shown)
    how.check_for(backbone)
    if args.kind == 'attention':
        pixel = tuple(args.pixel)
        attention = explain.token_attention(backbone, args.image, args.stage, args.block, pixel, normalization=how)
        return visualize.draw_attention(attention, shown, args.heads)
    target = None if args.channel is None else partial(channel_mean, channel=args.channel)
    stages = range(len(backbone.stages)) if args.stages is None else args.stages
    cams = {
        backbone.out_strides[stage]: explain.grad_cam(backbone, args.image, stage, target, normalization=how)
        for stage in stages
    }
    return visualize.draw_grad_cam(cams, shown)


def channel_mean(maps: Any, channel: int) -> Tensor:
    coarsest = maps[max(maps)]
    if not 0 <= channel < coarsest.shape[1]:
        raise ValueError(f'--channel must lie between 0 and {coarsest.shape[1] - 1}, got {channel}')
    return coarsest[:, channel].mean()

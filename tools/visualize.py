"""Draw what the backbone sees and how it works, as PNG or PDF by the suffix of --out.

    python tools/visualize.py pyramid photo.jpg --checkpoint swin_tiny.pth --out pyramid.png
    python tools/visualize.py attention photo.jpg --checkpoint swin_tiny.pth --stage 2 --pixel 120 200 --out a.png
    python tools/visualize.py grad-cam photo.jpg --checkpoint swin_tiny.pth --stages 2 3 --out cam.png
    python tools/visualize.py windows photo.jpg --stage 1 --out windows.png
    python tools/visualize.py masks --grid 20 26 --out masks.pdf

Stages and blocks count from 0. Blocks with an odd number have shifted windows.
"""

from __future__ import annotations

import argparse
import logging
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console

from swin_dense import create_backbone
from swin_dense.analysis.explain import grad_cam, token_attention
from swin_dense.analysis.visualize import draw_attention, draw_grad_cam, draw_pyramid, draw_shift_masks, draw_windows
from swin_dense.features.pyramid import extract_pyramid

STAGES = range(4)  # of every published size


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    output = argparse.ArgumentParser(add_help=False)
    output.add_argument('--out', required=True, type=Path, help='file to write, .png or .pdf')
    output.add_argument('--dpi', type=int, default=100, help='dots per inch of a PNG (default: %(default)s)')
    output.add_argument('--window-size', type=int, default=7, help='in tokens (default: %(default)s)')
    model = argparse.ArgumentParser(add_help=False)
    model.add_argument('image', help='path')
    model.add_argument('--arch', default='swin_t', help='swin_t, swin_s, swin_b or swin_l (default: %(default)s)')
    model.add_argument('--checkpoint', help='weights; without them they are random')

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest='kind', required=True)
    kinds.add_parser('pyramid', parents=[model, output], help='every level, PCA to RGB, beside the image')
    attention = kinds.add_parser('attention', parents=[model, output], help='where a token looks')
    attention.add_argument('--stage', type=int, choices=STAGES, default=2, help='(default: %(default)s)')
    attention.add_argument('--block', type=int, default=0, help='(default: %(default)s)')
    attention.add_argument('--pixel', type=int, nargs=2, metavar=('ROW', 'COLUMN'), required=True)
    attention.add_argument('--heads', type=int, nargs='*', default=[], help='drawn beside the mean of all heads')
    cam = kinds.add_parser('grad-cam', parents=[model, output], help='which cells raise a channel of the coarsest map')
    cam.add_argument('--stages', type=int, choices=STAGES, nargs='+', help='(default: all)')
    cam.add_argument('--channel', type=int, help='of the coarsest map (default: the one with the largest mean)')
    windows = kinds.add_parser('windows', parents=[output], help='window grid and shifted regions over the image')
    windows.add_argument('image', help='path')
    windows.add_argument('--stage', type=int, choices=STAGES, default=1, help='(default: %(default)s)')
    masks = kinds.add_parser('masks', parents=[output], help='shift masks as matrices')
    masks.add_argument('--grid', type=int, nargs=2, metavar=('H', 'W'), required=True, help='size of the map in tokens')
    args = parser.parse_args(argv)
    if args.out.suffix.lower() not in ('.png', '.pdf'):
        parser.error(f'--out must end in .png or .pdf, got {str(args.out)!r}')
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    logging.basicConfig(format='%(message)s')
    logging.getLogger('swin_dense.checkpoint').setLevel(logging.INFO)
    try:
        figure = draw(args)
        figure.savefig(args.out, dpi=args.dpi)
    except (ValueError, TypeError, OSError, ImportError) as error:
        Console(stderr=True).print(f'error: {error}', style='red', markup=False, highlight=False, soft_wrap=True)
        return 2
    return 0


def draw(args: argparse.Namespace) -> Figure:
    window_size = (args.window_size, args.window_size)
    if args.kind == 'masks':
        return draw_shift_masks(tuple(args.grid), window_size)
    if args.kind == 'windows':
        return draw_windows(args.image, 4 * 2**args.stage, window_size)
    backbone = build_backbone(args)
    if args.kind == 'pyramid':
        return draw_pyramid(extract_pyramid(backbone, args.image), args.image)
    if args.kind == 'attention':
        attention = token_attention(backbone, args.image, args.stage, args.block, tuple(args.pixel))
        return draw_attention(attention, args.image, args.heads)
    target = None if args.channel is None else partial(channel_mean, channel=args.channel)
    stages = range(len(backbone.layers)) if args.stages is None else args.stages
    cams = {backbone.out_strides[stage]: grad_cam(backbone, args.image, stage, target) for stage in stages}
    return draw_grad_cam(cams, args.image)


def channel_mean(maps: Any, channel: int) -> torch.Tensor:
    coarsest = maps[max(maps)]
    if not 0 <= channel < coarsest.shape[1]:
        raise ValueError(f'--channel must lie between 0 and {coarsest.shape[1] - 1}, got {channel}')
    return coarsest[:, channel].mean()


def build_backbone(args: argparse.Namespace) -> Any:
    if args.checkpoint is None:
        torch.manual_seed(0)
        Console(stderr=True).print('WARNING: no --checkpoint, so the weights are RANDOM', style='bold red')
    return create_backbone(args.arch, checkpoint=args.checkpoint, window_size=args.window_size)


if __name__ == '__main__':
    sys.exit(main())

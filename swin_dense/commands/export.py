"""Write a backbone as ONNX, torch.export or TorchScript, right at every size or folded for one.

    swin-dense export swin_tiny.onnx --checkpoint swin_tiny_patch4_window7_224.pth
    swin-dense export swin_tiny_800x1344.onnx --checkpoint swin_tiny.pth --static --size 800 1344 --half

The suffix of the file decides: .onnx, .pt2 (torch.export) or .ts (TorchScript). The file is compared with the backbone
at sizes that it was not recorded at, and removed if a number differs.
"""

from __future__ import annotations

import argparse
import sys

from swin_dense import export_model
from swin_dense.commands._backbone import add_backbone_arguments, build_backbone
from swin_dense.export import ExportError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('path', metavar='FILE', help='.onnx, .pt2 or .ts; replaced where it is there')
    add_backbone_arguments(parser)
    parser.add_argument('--static', action='store_true', help='for images of --size alone, all tables folded')
    parser.add_argument(
        '--size',
        nargs=2,
        type=int,
        default=(224, 224),
        metavar=('HEIGHT', 'WIDTH'),
        help='in pixels; without --static an example (default: 224 224)',
    )
    parser.add_argument(
        '--batch', type=int, default=1, help='images at once with --static; 0 leaves it free (default: %(default)s)'
    )
    parser.add_argument('--opset', type=int, help='of ONNX (default: 20)')
    parser.add_argument('--half', action='store_true', help='in float16')
    parser.add_argument('--no-check', action='store_true', help='do not compare the file with the backbone')


def run(args: argparse.Namespace) -> int:
    try:
        exported = export_model(
            build_backbone(args),
            args.path,
            dynamic=not args.static,
            size=tuple(args.size),
            batch=args.batch or None,
            opset=args.opset,
            half=args.half,
            check=not args.no_check,
        )
    except ExportError as error:
        print(f'swin-dense export: {error}', file=sys.stderr)
        return 1
    print(f'{exported.path}: {exported.nodes} nodes')
    for shape, off in exported.errors.items():
        print(f'  image {"x".join(map(str, shape))}: within {off:.1e} of the backbone')
    return 0

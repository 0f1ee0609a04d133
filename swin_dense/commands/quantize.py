"""Quantise an exported detector or segmentor to 8-bit integers, on photographs.

    swin-dense quantize model.onnx photos/ --out int8.onnx

The .onnx file must come from `swin-dense export CONFIG CHECKPOINT --out FILE`. `swin-dense predict` and runtime.load
take the new file as they take the old one. The command needs onnx and onnxruntime, and neither torch nor the
frameworks.

Give photographs like those that the model will see, at least 20. Half of them measure the ranges of the layers. The
predictions of both files for the other half are compared: instances with a score above 0.3 by label, score, box and
mask, classes and segments pixel by pixel. If more than --limit differ, the layers that lose most stay in float. If that
is not enough, nothing is written (exit status 1).
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

import swin_dense
from swin_dense.commands._images import images_at
from swin_dense.commands._options import add_out, check_file, check_out
from swin_dense.utils.choices import LARGEST_LOSS

GROUP = 'models'
EXTRA = 'export'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('model', metavar='MODEL.onnx', help='file of a whole model in float')
    parser.add_argument('images', nargs='+', metavar='IMAGE', help='image files or folders of images')
    add_out(parser, '.onnx file to write')
    parser.add_argument(
        '--limit',
        type=float,
        default=LARGEST_LOSS,
        help='largest share of instances or pixels that may differ (default: %(default)s)',
    )


def run(args: argparse.Namespace) -> int:
    check_file(args.model)
    check_out(args, '.onnx')
    images, unread = images_at(args.images)
    for message in unread:
        print(f'swin-dense quantize: {message}', file=sys.stderr)
    # So that temporary files are removed.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        done = swin_dense.runtime.quantize(args.model, [image.path for image in images], args.out, limit=args.limit)
    except swin_dense.runtime.QuantizationError as error:
        print(f'swin-dense quantize: {error}', file=sys.stderr)
        return 1
    before, after = (Path(path).stat().st_size / 2**20 for path in (args.model, done.path))
    print(f'{done.path}: {after:.1f} MiB, {before:.1f} MiB in float')
    print(f'  {1 - done.loss:.2%} of {done.compared:,} results agree with the float file')
    print(f'  in float: {", ".join(done.in_float)}')
    return 0

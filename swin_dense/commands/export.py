"""Export a backbone to ONNX, torch.export or TorchScript, or a whole detector or segmentor to ONNX.

    swin-dense export swin_t.in1k --out swin_tiny.onnx
    swin-dense export swin_tiny.pth --out swin_tiny_800x1344.onnx --no-dynamic --size 800 1344 --half
    swin-dense export mine.py work_dirs/mine/epoch_12.pth --out model.onnx

With a checkpoint, the command exports a backbone, to .onnx, .pt2 (torch.export) or .ts (TorchScript) by the suffix.
With a config and a checkpoint, it exports the whole model, from the image to boxes, masks or classes, for any height
and width.
It compares the file with the model at sizes that the trace did not use, and deletes a file that differs.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

import swin_dense
from swin_dense.commands._mm import add_allow_partial, read_config
from swin_dense.commands._options import (
    add_backbone,
    add_normalization,
    add_out,
    add_settings,
    add_size,
    check_backbone,
    check_checkpoint,
    check_file,
    check_out,
    normalization_options,
)
from swin_dense.utils import checks, packages
from swin_dense.utils.choices import EXPORT_SUFFIXES

if TYPE_CHECKING:
    from swin_dense.export import Exported

GROUP = 'backbones'
EXTRA = 'export'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        'model',
        nargs='*',
        metavar='FILE',
        help='CHECKPOINT of a backbone, or CONFIG CHECKPOINT of a whole model (default: a backbone of random weights)',
    )
    add_out(parser, '.onnx, .pt2 or .ts file to write')
    add_settings(parser)
    parser.add_argument('--opset', type=int, help='ONNX opset (default: 20)')
    parser.add_argument(
        '--image',
        help='image to compare a whole model on; a detector must find something in it (default: a photo of a woman)',
    )
    add_allow_partial(parser)
    backbone = parser.add_argument_group('options for a backbone')
    add_backbone(backbone, device='cpu')  # as some files only run on the device that they were recorded on
    backbone.add_argument(
        '--out-indices',
        nargs='+',
        type=int,
        metavar='STAGE',
        help='stages to return, from 0 (default: those of the checkpoint)',
    )
    backbone.add_argument(
        '--no-dynamic',
        dest='dynamic',
        action='store_false',
        help='export for images of --size only, with all tables as constants',
    )
    add_size(backbone, 'without --no-dynamic only an example (default: 224)', default=(224, 224))
    backbone.add_argument(
        '--batch', type=int, default=1, help='batch size with --no-dynamic; 0 allows any (default: %(default)s)'
    )
    backbone.add_argument('--half', action='store_true', help='write float16')
    backbone.add_argument(
        '--no-check', dest='check', action='store_false', help='do not compare the file with the backbone'
    )
    add_normalization(parser, 'for images of stored values instead of normalised ones', scale='255')


def run(args: argparse.Namespace) -> int:
    args.checkpoint = args.model.pop() if len(args.model) == 1 else None
    if len(args.model) not in (0, 2):
        raise ValueError('give CHECKPOINT for a backbone, or CONFIG CHECKPOINT for a whole model')
    if args.checkpoint is not None and args.checkpoint.endswith('.py'):
        raise ValueError(
            f'{args.checkpoint} is a config, whose model also needs a checkpoint: give CONFIG CHECKPOINT, such as '
            f'{args.checkpoint} work_dirs/mine/epoch_12.pth'
        )
    suffixes = ['.onnx'] if args.model else EXPORT_SUFFIXES
    check_out(args, *suffixes)
    check_together(args)
    if args.out.suffix == '.onnx':
        needed = ['onnx', 'onnxscript']
        if args.check:
            needed.append('onnxruntime')
        packages.require('this command', *needed)
    if args.model:
        args.config, checkpoint = args.model
        config = read_config(args)
    from swin_dense.export import ExportError  # imports torch, which --help does not need

    try:
        if args.model:
            print('reading the config and the checkpoint ...', file=sys.stderr, flush=True)
            from swin_dense.workbench.export.whole import export_whole

            options = {name: getattr(args, name) for name in ('image', 'opset', 'allow_partial')}
            exported = export_whole(config, checkpoint, args.out, **options)
        else:
            exported = _write_backbone(args)
    except ExportError as error:
        print(f'swin-dense export: {error}', file=sys.stderr)
        return 1
    print(f'{exported.path}: {exported.nodes} nodes')
    for shape, off in exported.errors.items():
        found = f'within {off:.1e} of the backbone'
        if args.model:
            found = f'{1 - off:.2%} of the results agree with the framework'
        print(f'  image {"x".join(map(str, shape))}: {found}')
    return 0


def check_together(args: argparse.Namespace) -> None:
    """Check that only options of the chosen kind of export are given, and the files that it reads."""
    normalization = normalization_options(args)
    if args.model:
        others = (args.prefix, args.arch, args.window_size, args.out_indices, args.half, normalization)
        changed = not (args.dynamic and args.check) or tuple(args.size) != (224, 224) or args.batch != 1
        if any(others) or changed:
            raise ValueError(
                'for a whole model (CONFIG CHECKPOINT), only --out, --force, --set, --image, --opset and '
                '--allow-partial are allowed'
            )
        check_checkpoint(args.model[1], of_backbone=False)
        if args.image is not None:
            check_file(args.image)
        return
    if args.image or args.set or args.allow_partial:
        raise ValueError('--image, --set and --allow-partial are for a whole model; give CONFIG CHECKPOINT')
    if args.out_indices is not None:
        checks.integers('--out-indices', args.out_indices, minimum=0)
    if args.clamp_window and args.dynamic:
        raise ValueError(
            '--clamp-window lets a map choose its windows, so one graph cannot serve all sizes: add --no-dynamic'
        )
    check_backbone(args)


def _write_backbone(args: argparse.Namespace) -> Exported:
    from swin_dense.commands._backbone import build_backbone, normalization_of

    return swin_dense.export_model(
        build_backbone(args, out_indices=args.out_indices),
        args.out,
        dynamic=args.dynamic,
        size=args.size,
        batch=args.batch or None,
        opset=args.opset,
        half=args.half,
        check=args.check,
        normalization=normalization_of(args),
    )

"""Convert the backbone of any Swin checkpoint to the format of another library.

swin-dense convert mask_rcnn_swin_tiny.pth --out swin_tiny_mmdet.pth --to mmdet --hash
swin-dense convert work_dirs/mine/epoch_12.pth --out mine.adapter.pth --to adapter
swin-dense convert hf://microsoft/swin-tiny-patch4-window7-224 --out swin_tiny.safetensors --to timm
"""

from __future__ import annotations

import argparse
import json

from swin_dense.commands._options import (
    add_adapter,
    add_out,
    add_prefix,
    add_window_size,
    check_arch,
    check_checkpoint,
    check_out,
)
from swin_dense.utils import checks, packages
from swin_dense.utils.choices import CHANNEL_POLICIES, FAMILIES, TABLE_METHODS

GROUP = 'backbones'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        'source', help='checkpoint: name (`swin-dense weights`), file or address (http, https, hf or file)'
    )
    add_out(parser, 'file to write: .safetensors, or any other suffix for torch.save')
    parser.add_argument(
        '--to',
        choices=(*FAMILIES, 'adapter'),
        default='official',
        help='library whose format to write (default: %(default)s; export_state_dict in Python defaults to mmdet), or '
        'adapter: all of a model but the base of its backbone',
    )
    parser.add_argument(
        '--arch',
        help='required architecture, an error if the checkpoint has another: swin_t to swin_l, swinv2_t to swinv2_l',
    )
    add_window_size(parser, default=None, help='weights are resized to it (default: that of the checkpoint)')
    parser.add_argument(
        '--source-window-size',
        type=int,
        nargs='+',
        metavar='N',
        help='window size of the checkpoint, if the file does not store it; for Swin V2 also one per stage',
    )
    parser.add_argument(
        '--table-resize',
        choices=TABLE_METHODS,
        default='bicubic',
        help='how to resize relative position tables (default: %(default)s)',
    )
    parser.add_argument('--in-channels', type=int, metavar='N', help='adapt the patch embedding to N image channels')
    parser.add_argument(
        '--channel-policy',
        choices=CHANNEL_POLICIES,
        default='repeat',
        help='how to fill the channels of --in-channels (default: %(default)s)',
    )
    add_adapter(parser)
    add_prefix(parser)
    parser.add_argument('--ema', action='store_true', help='convert the exponential moving average of the weights')
    parser.add_argument(
        '--final-norm', action='store_true', help="use the classifier's final norm as the norm of the last output"
    )
    parser.add_argument('--trust', action='store_true', help='unpickle unknown classes, which can run arbitrary code')
    parser.add_argument('--hash', action='store_true', help='append 8 or more digits of the SHA-256 to the file name')
    parser.add_argument('--json', action='store_true', help='print the report as JSON')


def run(args: argparse.Namespace) -> int:
    check_out(args)
    check_checkpoint(args.source)
    if args.adapter_checkpoint is not None:
        check_checkpoint(args.adapter_checkpoint)
    if args.in_channels is not None:
        checks.integer('--in-channels', args.in_channels)
    if args.arch is not None:
        check_arch(args.arch)
    if args.out.suffix == '.safetensors':
        packages.require('this command', 'safetensors')
    if args.table_resize == 'geometric':
        packages.require('this command', 'scipy')
    from swin_dense.export.convert import convert, write_adapter  # imports torch, which --help does not need

    if args.to == 'adapter':
        _check_of_adapter(args)
        path = write_adapter(
            args.source, args.out, prefix=args.prefix, trust=args.trust, force=args.force, add_hash=args.hash
        )
        print(json.dumps({'out': str(path), 'to': args.to}) if args.json else f'wrote {path} (adapter)')
        return 0

    path, report = convert(
        args.source,
        args.out,
        args.to,
        options={'arch': args.arch, 'in_channels': args.in_channels, 'window_size': args.window_size},
        source_window_size=args.source_window_size,
        table_resize=args.table_resize,
        channel_policy=args.channel_policy,
        adapter_checkpoint=args.adapter_checkpoint,
        prefix=args.prefix,
        ema=args.ema,
        final_norm=args.final_norm,
        trust=args.trust,
        force=args.force,
        add_hash=args.hash,
    )
    if args.json:
        print(json.dumps({'out': str(path), 'to': args.to, **report.as_dict()}, indent=2))
    else:
        print(f'{report}\nwrote {path} ({args.to})')
    return 0


def _check_of_adapter(args: argparse.Namespace) -> None:
    names = ('arch', 'window_size', 'source_window_size', 'in_channels', 'adapter_checkpoint', 'ema', 'final_norm')
    refused = [f'--{name.replace("_", "-")}' for name in names if getattr(args, name)]
    if refused:
        raise ValueError(f'--to adapter keeps the parameters as they are; leave {", ".join(refused)} out')

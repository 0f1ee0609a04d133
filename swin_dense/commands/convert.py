"""Convert the backbone of any Swin checkpoint to the format of another library.

swin-dense convert mask_rcnn_swin_tiny.pth --out swin_tiny_mmdet.pth --to mmdet --hash
swin-dense convert hf://microsoft/swin-tiny-patch4-window7-224 --out swin_tiny.safetensors --to timm
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from swin_dense.commands._options import (
    add_out,
    add_prefix,
    add_window_size,
    check_arch,
    check_out,
)
from swin_dense.utils import checks, packages

if TYPE_CHECKING:
    from swin_dense import SwinBackbone
    from swin_dense.checkpoint.find import Found

FAMILIES = ('mmdet', 'mmseg', 'official', 'mmpretrain', 'timm', 'torchvision', 'transformers')


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('source', help='checkpoint: file or address (http, https, hf or file)')
    add_out(parser, 'file to write: .safetensors, or any other suffix for torch.save')
    parser.add_argument(
        '--to',
        choices=FAMILIES,
        default='official',
        help='library whose format to write (default: %(default)s; export_state_dict in Python defaults to mmdet)',
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
        choices=('bicubic', 'geometric'),
        default='bicubic',
        help='how to resize relative position tables (default: %(default)s)',
    )
    parser.add_argument('--in-channels', type=int, metavar='N', help='adapt the patch embedding to N image channels')
    parser.add_argument(
        '--channel-policy',
        choices=('repeat', 'mean', 'zero'),
        default='repeat',
        help='how to fill the channels of --in-channels (default: %(default)s)',
    )
    add_prefix(parser)
    parser.add_argument('--ema', action='store_true', help='convert the exponential moving average of the weights')
    parser.add_argument(
        '--final-norm', action='store_true', help="use the classifier's final norm as the norm of the last output"
    )
    parser.add_argument('--trust', action='store_true', help='unpickle unknown classes, which can run arbitrary code')
    parser.add_argument('--hash', action='store_true', help='append 8 or more digits of the SHA-256 to the file name')
    parser.add_argument('--json', action='store_true', help='print the report as JSON')


def source_window(args: argparse.Namespace) -> tuple[int, int] | None:
    given = args.source_window_size
    return None if given is None else checks.pair('--source-window-size', given)


def build_for(found: Found, args: argparse.Namespace) -> SwinBackbone:
    """Build the backbone of the checkpoint on the meta device, without memory for weights."""
    import torch

    from swin_dense.models.create import BACKBONES, infer_options

    trained = args.source_window_size if found.version == 2 else None
    given = {
        'arch': args.arch,
        'in_channels': args.in_channels,
        'pretrained_window_size': trained and (trained if len(trained) > 1 else trained[0]),
        'window_size': max(trained) if trained else source_window(args),
    }
    given = {option: value for option, value in given.items() if value is not None}
    options = infer_options(found, given, any_heads=True)
    if args.window_size is not None:
        options['window_size'] = args.window_size
    with torch.device('meta'):
        return BACKBONES[found.network](**options)


def convert(args: argparse.Namespace) -> dict[str, Any]:
    """Convert the checkpoint, write it, and return the report, which contains the path of the file."""
    from swin_dense.checkpoint.export import as_checkpoint, export_parameters, write_file
    from swin_dense.checkpoint.fit import Options, Target, fit
    from swin_dense.checkpoint.load import find_backbone

    found = find_backbone(args.source, args.prefix, args.ema, args.trust)
    target = Target.of(build_for(found, args))
    options = Options(
        final_norm=args.final_norm,
        table_resize=args.table_resize,
        in_channels=args.channel_policy,
        window_size=source_window(args) if found.version == 1 else None,
    )
    parameters, report = fit(found, target, options)
    exported = export_parameters(parameters, args.to, target)
    checkpoint = as_checkpoint(exported, args.to, flat=args.out.suffix == '.safetensors')
    path = write_file(args.out, checkpoint, args.force, args.hash)
    return {'out': str(path), 'to': args.to, 'text': str(report), **report.as_dict()}


def run(args: argparse.Namespace) -> int:
    check_out(args)
    if args.in_channels is not None:
        checks.integer('--in-channels', args.in_channels)
    if args.arch is not None:
        check_arch(args.arch)
    if args.out.suffix == '.safetensors':
        packages.require('this command', 'safetensors')
    if args.table_resize == 'geometric':
        packages.require('this command', 'scipy')
    report = convert(args)
    text = report.pop('text')
    print(json.dumps(report, indent=2) if args.json else f'{text}\nWrote {report["out"]} ({args.to})')
    return 0

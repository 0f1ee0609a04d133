"""Write the backbone of any Swin checkpoint into a file of another family.

swin-dense convert mask_rcnn_swin_tiny.pth swin_tiny_mmdet.pth --to mmdet --hash
swin-dense convert hf://microsoft/swin-tiny-patch4-window7-224 swin_tiny.safetensors --to timm
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from swin_dense import SwinBackbone, checks
from swin_dense.archs import resolve_arch, split_name
from swin_dense.checkpoint.export import as_checkpoint, export_parameters
from swin_dense.checkpoint.families import EXPORTED
from swin_dense.checkpoint.files import check_destination, write_file
from swin_dense.checkpoint.fit import Options, fit
from swin_dense.checkpoint.load import find_backbone
from swin_dense.checkpoint.report import CheckpointError
from swin_dense.checkpoint.resize import CHANNEL_POLICIES, TABLE_METHODS
from swin_dense.checkpoint.source import Source
from swin_dense.checkpoint.target import Target
from swin_dense.checkpoint.told import told_options
from swin_dense.create import BACKBONES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('source', help='checkpoint: a file, or an address of http, https, hf or file')
    parser.add_argument('destination', type=Path, help='file to write, .safetensors or a file of torch.save')
    parser.add_argument(
        '--to',
        choices=EXPORTED,
        default='official',
        help='family to write (default: %(default)s; that of export_state_dict in Python is mmdet)',
    )
    parser.add_argument('--arch', help='swin_t to swin_l, swinv2_t to swinv2_l: refuse any other')
    parser.add_argument(
        '--window-size', type=int, nargs='+', metavar='N', help='side, or height and width, to resize to'
    )
    parser.add_argument(
        '--source-window-size',
        type=int,
        nargs='+',
        metavar='N',
        help='of the checkpoint, where it does not tell; of V2 also per stage',
    )
    parser.add_argument('--table-resize', choices=TABLE_METHODS, default='bicubic', help='how (default: %(default)s)')
    parser.add_argument('--in-channels', type=int, metavar='N', help='image channels to adapt to')
    parser.add_argument(
        '--channel-policy', choices=CHANNEL_POLICIES, default='repeat', help='how (default: %(default)s)'
    )
    parser.add_argument('--prefix', help="where the backbone is, as in 'teacher.backbone', if there are several")
    parser.add_argument('--ema', action='store_true', help='take the running average of the weights')
    parser.add_argument('--final-norm', action='store_true', help="make the classifier's final norm the last output's")
    parser.add_argument('--trust', action='store_true', help='unpickle unknown classes, which can run any code')
    parser.add_argument('--force', action='store_true', help='replace DESTINATION')
    parser.add_argument('--hash', action='store_true', help='append 8 digits of the SHA-256 to the file name')
    parser.add_argument('--json', action='store_true', help='print the report as JSON')


def source_window(args: argparse.Namespace) -> tuple[int, int] | None:
    given = args.source_window_size
    return None if given is None else checks.pair('--source-window-size', given)


def build_for(found: Source, args: argparse.Namespace) -> SwinBackbone:
    """Build the backbone that the checkpoint is of, without memory for weights."""
    options = told_options(found, any_heads=True)
    if args.arch is not None:
        options['arch'] = args.arch
    if args.in_channels is not None:
        options['in_channels'] = args.in_channels
    window = args.window_size or (source_window(args) if found.version == 1 else None)
    if window is not None:
        options['window_size'] = window
    if found.version == 2:
        given = args.source_window_size
        if given is None and not found.trained_windows:
            raise CheckpointError(
                f'{found.described} is a Swin V2 that does not tell the windows it was trained with, which others need '
                'to know; give --source-window-size, one side or one per stage'
            )
        if given is not None:
            options.update(
                pretrained_window_size=given if len(given) > 1 else given[0],
                window_size=args.window_size or max(given),
            )
    with torch.device('meta'):
        return BACKBONES[found.network](**options)


def convert(args: argparse.Namespace) -> dict[str, Any]:
    """Convert, and return the report with the file that was written."""
    check_destination(args.destination, args.force)  # before the work, not only after
    if args.arch is not None:
        resolve_arch(args.arch, split_name(args.arch)[0] or 'swin')
    found = find_backbone(args.source, None, args.prefix, args.ema, args.trust)
    target = Target.of(build_for(found, args))
    options = Options(
        final_norm=args.final_norm,
        table_resize=args.table_resize,
        in_channels=args.channel_policy,
        window_size=source_window(args) if found.version == 1 else None,
    )
    parameters, report = fit(found, target, options)
    exported = export_parameters(parameters, args.to, target.window, target.trained_windows)
    checkpoint = as_checkpoint(exported, args.to, flat=args.destination.suffix == '.safetensors')
    path = write_file(args.destination, checkpoint, args.force, args.hash)
    return {'destination': str(path), 'to': args.to, 'text': str(report), **report.as_dict()}


def run(args: argparse.Namespace) -> int:
    report = convert(args)
    text = report.pop('text')
    print(json.dumps(report, indent=2) if args.json else f'{text}\nWrote {report["destination"]} ({args.to})')
    return 0

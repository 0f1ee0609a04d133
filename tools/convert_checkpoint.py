"""Convert the backbone of a Swin checkpoint, of any family and from any place, into the file of another family."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from swin_dense import SwinBackbone, checks
from swin_dense.archs import resolve_arch
from swin_dense.checkpoint import CheckpointError
from swin_dense.checkpoint.export import as_checkpoint, export_parameters
from swin_dense.checkpoint.families import EXPORTED
from swin_dense.checkpoint.files import check_destination, write_file
from swin_dense.checkpoint.fit import Options, fit
from swin_dense.checkpoint.load import find_backbone
from swin_dense.checkpoint.misfit import options_of
from swin_dense.checkpoint.resize import CHANNEL_POLICIES, TABLE_METHODS, square_window
from swin_dense.checkpoint.source import Source
from swin_dense.checkpoint.target import Target


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('source', help='checkpoint: a file, or an address of http, https, hf or file')
    parser.add_argument('destination', type=Path, help='file to write, .safetensors or a file of torch.save')
    parser.add_argument(
        '--to',
        choices=EXPORTED,
        default='official',
        help='family to write (default: %(default)s; that of export_state_dict in Python is mmdet)',
    )
    parser.add_argument('--arch', help='swin_t, swin_s, swin_b or swin_l: refuse a checkpoint of another architecture')
    parser.add_argument(
        '--window-size', type=int, nargs='+', metavar='N', help='side, or height and width, to resize to'
    )
    parser.add_argument(
        '--source-window-size', type=int, nargs='+', metavar='N', help='of the checkpoint, where it does not tell'
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
    return parser.parse_args(arguments)


def source_window(args: argparse.Namespace) -> tuple[int, int] | None:
    given = args.source_window_size
    return None if given is None else checks.pair('--source-window-size', given)


def build_for(found: Source, args: argparse.Namespace) -> SwinBackbone:
    """Build the backbone that the checkpoint is of, without memory for weights."""
    options: dict[str, Any] = options_of({name: tuple(tensor.shape) for name, tensor in found.parameters.items()})
    try:
        arch: Any = args.arch
        if arch is None:
            arch = {
                'embed_dims': options['embed_dims'],
                'depths': options['depths'],
                'num_heads': options.get('num_heads', (1,) * len(options['depths'])),
            }
    except KeyError as error:
        raise CheckpointError(f'{found.described}: the patch embedding is missing, so {error} is not known') from None
    table = 'layers.0.blocks.0.attn.relative_position_bias_table'
    window = source_window(args) or found.windows.get(table)
    if window is None and table in found.parameters:
        window = square_window(len(found.parameters[table]))
    position = found.parameters.get('absolute_pos_embed')
    kept = ('patch_size', 'mlp_ratio', 'qkv_bias', 'use_rel_pos_bias', 'patch_norm', 'use_abs_pos_embed')
    with torch.device('meta'):
        return SwinBackbone(
            arch,
            window_size=args.window_size or window or 7,
            in_channels=options['in_channels'] if args.in_channels is None else args.in_channels,
            pretrain_img_size=224
            if position is None
            else [side * options['patch_size'] for side in position.shape[2:]],
            **{key: options[key] for key in kept if key in options},
        )


def convert(args: argparse.Namespace) -> dict[str, Any]:
    """Convert, and return the report with the file that was written."""
    check_destination(args.destination, args.force)  # before the work, not only after
    if args.arch is not None:
        resolve_arch(args.arch)
    found = find_backbone(args.source, None, args.prefix, args.ema, args.trust)
    target = Target.of(build_for(found, args))
    options = Options(
        final_norm=args.final_norm,
        table_resize=args.table_resize,
        in_channels=args.channel_policy,
        window_size=source_window(args),
    )
    parameters, report = fit(found, target, options)
    exported = export_parameters(parameters, args.to, target.window)
    checkpoint = as_checkpoint(exported, args.to, flat=args.destination.suffix == '.safetensors')
    path = write_file(args.destination, checkpoint, args.force, args.hash)
    return {'destination': str(path), 'to': args.to, 'text': str(report), **report.as_dict()}


def main(arguments: list[str] | None = None) -> int:
    args = parse_args(arguments)
    try:
        report = convert(args)
    except (ValueError, OSError, ImportError) as error:
        print(f'convert_checkpoint: {error}', file=sys.stderr)
        return 1
    text = report.pop('text')
    print(json.dumps(report, indent=2) if args.json else f'{text}\nWrote {report["destination"]} ({args.to})')
    return 0


if __name__ == '__main__':
    sys.exit(main())

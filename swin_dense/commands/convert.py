"""Convert the backbone of any Swin checkpoint to the format of another library.

    swin-dense convert mask_rcnn_swin_tiny.pth --out swin_tiny_mmdet.pth --family mmdet
    swin-dense convert hf://microsoft/swin-tiny-patch4-window7-224 --out swin_tiny.safetensors --family timm

For another window, other image channels or a running average, build the backbone in Python and write the result of
export_state_dict.
"""

from __future__ import annotations

import argparse

from swin_dense.commands._options import add_out, add_prefix, check_checkpoint, check_out
from swin_dense.utils import packages
from swin_dense.utils.choices import FAMILIES

GROUP = 'backbones'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        'source', help='checkpoint: name (`swin-dense weights`), file or address (http, https, hf or file)'
    )
    add_out(parser, 'file to write: .safetensors, or any other suffix for torch.save')
    parser.add_argument(
        '--family',
        choices=FAMILIES,
        default='official',
        help='library whose format to write (default: %(default)s)',
    )
    add_prefix(parser)


def run(args: argparse.Namespace) -> int:
    check_out(args)
    check_checkpoint(args.source)
    if args.out.suffix == '.safetensors':
        packages.require('this command', 'safetensors')
    # These import torch, which --help does not need.
    from swin_dense.checkpoint.save import as_checkpoint, export_state_dict, write_file
    from swin_dense.create import create_backbone

    weights = export_state_dict(create_backbone(checkpoint=args.source, prefix=args.prefix), args.family)
    path = write_file(args.out, as_checkpoint(weights, args.family, flat=args.out.suffix == '.safetensors'), args.force)
    print(f'wrote {path} ({args.family})')
    return 0

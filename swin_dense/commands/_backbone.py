"""The arguments by which commands get their backbone, and the backbone that they ask for."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

import torch

from swin_dense import SwinBackbone, create_backbone
from swin_dense.checkpoint.load import find_backbone
from swin_dense.checkpoint.told import told_options


def add_backbone_arguments(parser: argparse.ArgumentParser) -> None:
    told = 'default: as the checkpoint tells, else'
    parser.add_argument('--checkpoint', help='weights, a file or an address; without them they are random')
    parser.add_argument('--arch', help=f'swin_t, swin_s, swin_b or swin_l ({told} swin_t)')
    parser.add_argument('--window-size', type=int, metavar='N', help=f'side in tokens ({told} 7); resizes the weights')


def build_backbone(args: argparse.Namespace) -> SwinBackbone:
    """Build the backbone, with the options that its checkpoint tells in place of those that the user left out."""
    options: dict[str, Any] = {}
    if args.checkpoint is None:
        torch.manual_seed(0)
        if os.environ.get('RANK', '0') == '0':
            print('WARNING: no --checkpoint, so the weights are RANDOM, and so is what comes out', file=sys.stderr)
    else:
        found = find_backbone(args.checkpoint, None, None, False, False)
        options = told_options(found, any_heads=args.arch is not None)
    if args.arch is not None:
        options['arch'] = args.arch
    if args.window_size is not None:
        options['window_size'] = args.window_size
    return create_backbone(options.pop('arch', 'swin_t'), checkpoint=args.checkpoint, **options)

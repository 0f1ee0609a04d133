"""The arguments by which commands get their backbone, and the backbone that they ask for."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

import torch

from swin_dense import SwinBackbone, load_checkpoint
from swin_dense.archs import split_name
from swin_dense.checkpoint.load import find_backbone
from swin_dense.checkpoint.told import told_options
from swin_dense.create import BACKBONES


def add_backbone_arguments(parser: argparse.ArgumentParser) -> None:
    told = 'default: as the checkpoint tells, else'
    parser.add_argument('--checkpoint', help='weights, a file or an address; without them they are random')
    parser.add_argument('--arch', help=f'swin_t to swin_l, or swinv2_t to swinv2_l ({told} swin_t)')
    parser.add_argument('--window-size', type=int, metavar='N', help=f'side in tokens ({told} 7); resizes the weights')


def build_backbone(args: argparse.Namespace) -> SwinBackbone:
    """Build the backbone, with the options that its checkpoint tells in place of those that the user left out."""
    options: dict[str, Any] = {}
    network = 'swin'
    if args.checkpoint is None:
        torch.manual_seed(0)
        if os.environ.get('RANK', '0') == '0':
            print('WARNING: no --checkpoint, so the weights are RANDOM, and so is what comes out', file=sys.stderr)
    else:
        found = find_backbone(args.checkpoint, None, None, False, False)
        network = found.network
        options = told_options(found, any_heads=args.arch is not None)
    if args.arch is not None:
        options['arch'] = args.arch
    if args.window_size is not None:
        options['window_size'] = args.window_size
    arch = options.pop('arch', 't')
    if isinstance(arch, str):
        network = split_name(arch)[0] or network
    backbone = BACKBONES[network](arch, **options)
    if args.checkpoint is not None:
        load_checkpoint(backbone, args.checkpoint)
    return backbone.eval()

"""Print parameters and FLOPs of a model, of the stages of a backbone, or of global and window attention.

    swin-dense flops mask-rcnn_swin-t-p4-w7_fpn_1x_coco --size 800 1280 --depth 2
    swin-dense flops my_config.py --set model.backbone.window_size=12
    swin-dense flops --arch swin_t --size 800 1280     # a backbone, stage by stage
    swin-dense flops --arch swin_t --out flops.png     # plot FLOPs against image size
    swin-dense flops --grid 112 112 --channels 128     # attention on one map

Published figures are for 800 x 1280 pixels (detection), or for the crop height and four times the crop width
(segmentation).

A FLOP is one multiply-add. The command allocates no weights, so even the largest model takes seconds.
"""

from __future__ import annotations

import argparse
import json

from swin_dense.archs import split_name
from swin_dense.commands import _options
from swin_dense.commands._mm import read_config
from swin_dense.utils import checks, packages
from swin_dense.utils.atomic import written_whole

GROUP = 'backbones'
MODES = {'config': 'a config', 'arch': '--arch', 'grid': '--grid'}
# The modes of each option.
MODES_OF = {
    **dict.fromkeys(('depth', 'json', 'set'), ('config',)),
    'size': ('config', 'arch'),
    'window_size': ('arch', 'grid'),
    **dict.fromkeys(('out', 'force'), ('arch',)),
    'channels': ('grid',),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('config', nargs='?', help='config file of mmdet or mmseg, or the name of a recipe')
    parser.add_argument('--arch', help='a backbone instead of a config: swin_t, swin_s, swin_b or swin_l')
    parser.add_argument(
        '--grid',
        nargs=2,
        type=int,
        metavar=('H', 'W'),
        help='attention on a map of this size in tokens, instead of a config',
    )
    _options.add_size(parser, 'default: as published, 224 with --arch')
    parser.add_argument(
        '--depth', type=int, help='depth of the modules to list; 0 lists the whole model only (default: 1)'
    )
    parser.add_argument('--json', action='store_true', help='print JSON instead of a table')
    _options.add_settings(parser)
    _options.add_window_size(parser, default=None, help='with --arch or --grid (default: 7)')
    parser.add_argument('--channels', type=int, help='channels of the map of --grid (default: 128)')
    _options.add_out(parser, '.png or .pdf file for a plot of FLOPs of --arch against image size', required=False)


def run(args: argparse.Namespace) -> int:
    check_together(args)
    window = args.window_size or (7, 7)
    if args.config is not None:
        print(of_config(args))
        return 0
    if args.arch is not None:
        _options.check_arch(args.arch)
        if split_name(args.arch)[0] == 'swinv2':
            raise ValueError(
                f'--arch counts a Swin V1, not {args.arch}; of a Swin V2, give the config of a whole model'
            )
    if args.out is not None:
        _options.check_out(args, '.png', '.pdf')
        packages.require('this command', 'matplotlib')
        draw(args, window)
        return 0
    if args.grid is not None:
        height, width = checks.integers('--grid', args.grid)
        channels = checks.integer('--channels', 128 if args.channels is None else args.channels)
    from swin_dense.analysis import tables  # imports torch, which --help does not need

    if args.grid is not None:
        print(tables.attention_table(height, width, channels, window))
    else:
        print(tables.backbone_table(args.arch, args.size or (224, 224), window))
    return 0


def check_together(args: argparse.Namespace) -> None:
    """Check that exactly one mode is given, and only options of this mode."""
    asked = [mode for mode in MODES if getattr(args, mode) is not None]
    if len(asked) != 1:
        raise ValueError('give exactly one of: a config or the name of a recipe, --arch, --grid')
    for option, modes in MODES_OF.items():
        if asked[0] not in modes and getattr(args, option):
            raise ValueError(f'--{option.replace("_", "-")} needs {" or ".join(MODES[mode] for mode in modes)}')
    if args.size is not None and args.out is not None:
        raise ValueError('--out plots many sizes; leave --size out')


def of_config(args: argparse.Namespace) -> str:
    """Return the table, or the JSON, for the model of a config."""
    config = read_config(args)
    if config.get('default_scope') is None:
        raise ValueError(
            f'{args.config} has no default_scope, so the framework of the model is unknown; '
            'add --set default_scope=mmdet or --set default_scope=mmseg'
        )
    # These import torch, which --help does not need.
    from swin_dense.analysis import flop_counter, tables
    from swin_dense.workbench.building import build_on_meta, published_shape, run_on_shapes

    height, width = args.size or published_shape(config)
    counted = flop_counter.count(build_on_meta(config), height, width, run_on_shapes)
    depth = 1 if args.depth is None else args.depth
    if args.json:
        return json.dumps(tables.model_summary(counted, height, width, depth), indent=2)
    return tables.model_table(counted, height, width, depth)


def draw(args: argparse.Namespace, window: tuple[int, int]) -> None:
    """Write the plot of FLOPs against image size."""
    from swin_dense.analysis.visualize import draw_costs  # imports matplotlib

    figure = draw_costs(args.arch, window)
    with written_whole(args.out) as unfinished:
        figure.savefig(unfinished.path, dpi=150)
    print(f'wrote {args.out}')

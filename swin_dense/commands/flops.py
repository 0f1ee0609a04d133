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
from typing import TYPE_CHECKING

from swin_dense.commands import _options
from swin_dense.commands._mm import read_config
from swin_dense.utils import checks, packages
from swin_dense.utils.atomic import written_whole

if TYPE_CHECKING:
    from swin_dense.analysis.complexity import Cost
    from swin_dense.analysis.flop_counter import Count

# The three modes, and the options of each.
OPTIONS_OF = {
    'config': ('size', 'depth', 'json', 'set'),
    'arch': ('size', 'window_size', 'out', 'force'),
    'grid': ('channels', 'window_size'),
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
    if args.config is not None:
        print(of_config(args))
    elif args.grid is not None:
        height, width = checks.integers('--grid', args.grid)
        channels = checks.integer('--channels', 128 if args.channels is None else args.channels)
        print(attention_table(height, width, channels, args.window_size or (7, 7)))
    elif args.out is None:
        print(backbone_table(args.arch, args.size or (224, 224), args.window_size or (7, 7)))
    else:
        _options.check_out(args, '.png', '.pdf')
        packages.require('this command', 'matplotlib')
        from swin_dense.analysis.visualize import draw_costs

        figure = draw_costs(args.arch, args.window_size or (7, 7))
        with written_whole(args.out) as unfinished:
            figure.savefig(unfinished.path, dpi=150)
        print(f'wrote {args.out}')
    return 0


def check_together(args: argparse.Namespace) -> None:
    """Check that exactly one mode is given, and only options of this mode."""
    asked = [name for name in OPTIONS_OF if getattr(args, name) is not None]
    if len(asked) != 1:
        raise ValueError('give exactly one of: a config or the name of a recipe, --arch, --grid')
    for options in OPTIONS_OF.values():
        for option in options:
            if option not in OPTIONS_OF[asked[0]] and getattr(args, option) not in (None, False, []):
                owners = [name for name, options in OPTIONS_OF.items() if option in options]
                owner = ' or '.join('a config' if name == 'config' else f'--{name}' for name in owners)
                raise ValueError(f'--{option.replace("_", "-")} needs {owner}')
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
    from swin_dense.analysis.flop_counter import count
    from swin_dense.workbench.building import build_on_meta, published_shape, run_on_shapes

    height, width = args.size or published_shape(config)
    result = count(build_on_meta(config), height, width, run_on_shapes)
    depth = 1 if args.depth is None else args.depth
    return (
        json.dumps(summary(result, height, width, depth), indent=2)
        if args.json
        else table(result, height, width, depth)
    )


def summary(result: Count, height: int, width: int, depth: int) -> dict:
    return {
        'shape': [height, width],
        'parameters': result.parameters[''],
        'flops': result.flops[''],
        'computed_flops': result.computed_flops[''],
        'modules': {
            name: {'parameters': result.parameters[name], 'flops': result.flops[name]}
            for name in modules(result, depth)
        },
    }


def table(result: Count, height: int, width: int, depth: int) -> str:
    """Return parameters and FLOPs by module, down to ``depth``, for an image of height x width pixels."""
    lines = [f'{"module":48} {"parameters":>14} {"GFLOPs":>10}']
    for name in ['', *modules(result, depth)]:
        label = '  ' * (name.count('.') + 1) + name.rpartition('.')[2] if name else 'model'
        lines.append(f'{label:48} {result.parameters[name]:14,} {result.flops[name] / 1e9:10,.2f}')
    saved = result.flops[''] - result.computed_flops['']
    lines.append(f'\nFor one image of {height} x {width} pixels (height x width); a FLOP is one multiply-add.')
    if saved:
        lines.append(
            f'Counted as in published figures, including {saved / 1e9:.2f} GFLOPs for output projections of '
            f'padding tokens, which SwinDense skips:\nit computes {result.computed_flops[""] / 1e9:,.2f} GFLOPs.'
        )
    return '\n'.join(lines)


def modules(result: Count, depth: int) -> list[str]:
    """Return the names of the modules down to ``depth``, in the order of the model."""
    return [name for name in result.parameters if name and name.count('.') < depth]


def attention_table(height: int, width: int, channels: int, window: tuple[int, int]) -> str:
    """Return a table that compares global and window attention on a map of height x width tokens."""
    from swin_dense.analysis.complexity import msa_flops, window_msa_flops
    from swin_dense.ops.windows import window_grid

    everywhere = msa_flops(height, width, channels)
    rows, columns = window_grid(height, width, window)
    padded = (rows * window[0], columns * window[1])
    windowed = window_msa_flops(padded[0], padded[1], channels, window)
    less = everywhere / windowed
    lines = [
        f'attention on a map of {height} x {width} tokens with {channels} channels',
        f'  global:                 {everywhere:20,} FLOPs',
        f'  in windows of {window[0]:2} x {window[1]:2}:   {windowed:20,} FLOPs, {less:.1f} times less',
        f'  saved by the windows:   {everywhere - windowed:20,} FLOPs',
    ]
    if padded != (height, width):
        lines.append(f'  The windows do not divide the map, so it is padded to {padded[0]} x {padded[1]} tokens.')
    return '\n'.join(lines)


def backbone_table(arch: str, size: tuple[int, int], window: tuple[int, int]) -> str:
    """Return the FLOPs of a backbone by stage and part, for an image of ``size``, (height, width) in pixels."""
    from swin_dense.analysis.complexity import PARTS, backbone_costs, total
    from swin_dense.archs import arch_letter

    letter = arch_letter(arch)
    stages = backbone_costs(letter, *size, window)
    lines = [
        f'Swin-{letter.upper()} with windows of {window[0]} x {window[1]} on an image of {size[0]} x {size[1]} pixels, '
        'GFLOPs',
        '',
        f'{"":16}' + ''.join(f'{name:>10}' for name in [*(f'stage {index}' for index in range(len(stages))), 'all']),
        *(_row(part, [stage[part] for stage in stages]) for part in PARTS),
        _row('all', [total([stage]) for stage in stages]),
    ]
    everywhere = total(backbone_costs(letter, *size, window_size=None)).flops
    return '\n'.join(
        [
            *lines,
            '',
            f'{total(stages).parameters:,} parameters',
            f'{everywhere / 1e9:,.2f} GFLOPs if every token attended to all others',
        ]
    )


def _row(name: str, costs: list[Cost]) -> str:
    flops = [cost.flops for cost in costs]
    return f'{name:16}' + ''.join(f'{value / 1e9:10.2f}' for value in [*flops, sum(flops)])

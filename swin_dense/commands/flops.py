"""Print the parameters and FLOPs of a detector or segmentor, whole and module by module.

    swin-dense flops mask-rcnn_swin-t-p4-w7_fpn_1x_coco --shape 800 1280 --depth 2
    swin-dense flops my_config.py --cfg-options model.backbone.window_size=12

Published figures are those for 800 x 1280 (detection) and for the crop, four times as wide (segmentation).

A FLOP is one multiply-add. Nothing is allocated or computed, so the largest model takes seconds.
"""

from __future__ import annotations

import argparse
import json

from swin_dense.analysis.counting import Count, build_on_meta, count, published_shape
from swin_dense.recipes.files import load_recipe
from swin_dense.recipes.settings import merge_settings, parse_settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('config', help='config file of mmdet or mmsegmentation, or the name of a recipe')
    parser.add_argument(
        '--shape', nargs=2, type=int, metavar=('HEIGHT', 'WIDTH'), help='of the image in pixels (default: as published)'
    )
    parser.add_argument('--depth', type=int, default=1, help='how deep modules are listed; 0 is the whole model only')
    parser.add_argument('--json', action='store_true', help='print JSON in place of a table')
    parser.add_argument(
        '--cfg-options', nargs='+', default=[], metavar='KEY=VALUE', help='entries of the config to change'
    )


def run(args: argparse.Namespace) -> int:
    config = load_recipe(args.config)
    merge_settings(config, parse_settings(args.cfg_options))
    if config.get('default_scope') is None:
        raise ValueError(
            f'{args.config} has no default_scope, which says in which framework its model is; '
            'give --cfg-options default_scope=mmdet, or mmseg'
        )
    height, width = args.shape or published_shape(config)
    result = count(build_on_meta(config), height, width)
    if args.json:
        print(json.dumps(summary(result, height, width, args.depth), indent=2))
    else:
        print(table(result, height, width, args.depth))
    return 0


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
    lines = [f'{"module":48} {"parameters":>14} {"GFLOPs":>10}']
    for name in ['', *modules(result, depth)]:
        label = '  ' * (name.count('.') + 1) + name.rpartition('.')[2] if name else 'model'
        lines.append(f'{label:48} {result.parameters[name]:14,} {result.flops[name] / 1e9:10,.2f}')
    saved = result.flops[''] - result.computed_flops['']
    lines.append(f'\nFor one image of {height} x {width} pixels (height x width); a FLOP is one multiply-add.')
    if saved:
        lines.append(
            f'Counted as published figures are. Of these, {saved / 1e9:.2f} GFLOPs are the projections of padding '
            f'tokens, which SwinDense leaves out:\nit computes {result.computed_flops[""] / 1e9:,.2f} GFLOPs.'
        )
    return '\n'.join(lines)


def modules(result: Count, depth: int) -> list[str]:
    """Return the names of the modules down to ``depth``, in the order of the model."""
    return [name for name in result.parameters if name and name.count('.') < depth]

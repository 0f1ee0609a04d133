"""Print parameters and FLOPs of a model by module, for any image size.

    swin-dense flops mask-rcnn_swin-t-p4-w7_fpn_1x_coco --size 800 1280 --depth 2
    swin-dense flops my_config.py --set model.backbone.window_size=12

Published figures are for 800 x 1280 pixels (detection), or for the crop height and four times the crop width
(segmentation).

A FLOP is one multiply-add. The command allocates no weights, so even the largest model takes seconds.
"""

from __future__ import annotations

import argparse
import json

from swin_dense.commands import _options
from swin_dense.commands._mm import read_config

GROUP = 'models'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('config', help='config file of mmdet or mmseg, or the name of a recipe')
    _options.add_size(parser, 'default: as published')
    parser.add_argument(
        '--depth', type=int, default=1, help='depth of the modules to list; 0 is the whole model (default: %(default)s)'
    )
    parser.add_argument('--json', action='store_true', help='print JSON instead of a table')
    _options.add_settings(parser)


def run(args: argparse.Namespace) -> int:
    config = read_config(args)
    if config.get('default_scope') is None:
        raise ValueError(
            f'{args.config} has no default_scope, so the framework of the model is unknown; '
            'add --set default_scope=mmdet or --set default_scope=mmseg'
        )
    # These import torch, which --help does not need.
    from swin_dense.analysis.flop_counter import count
    from swin_dense.workbench.building import build_on_meta, published_shape, run_on_shapes

    height, width = args.size or published_shape(config)
    result = count(build_on_meta(config), height, width, run_on_shapes)
    modules = [name for name in result.parameters if name and name.count('.') < args.depth]
    if args.json:
        rows = {name: {'parameters': result.parameters[name], 'flops': result.flops[name]} for name in modules}
        whole = {'parameters': result.parameters[''], 'flops': result.flops['']}
        whole['computed_flops'] = result.computed_flops
        print(json.dumps({'shape': [height, width], **whole, 'modules': rows}, indent=2))
        return 0
    print(f'{"module":48} {"parameters":>14} {"GFLOPs":>10}')
    for name in ['', *modules]:
        label = '  ' * (name.count('.') + 1) + name.rpartition('.')[2] if name else 'model'
        print(f'{label:48} {result.parameters[name]:14,} {result.flops[name] / 1e9:10,.2f}')
    print(f'\nFor one image of {height} x {width} pixels (height x width); a FLOP is one multiply-add.')
    saved = result.flops[''] - result.computed_flops
    if saved:
        print(
            f'Counted as in published figures, including {saved / 1e9:.2f} GFLOPs for output projections of padding '
            'tokens, which SwinDense skips.'
        )
    return 0

"""Print the parameters and FLOPs of a model, whole and module by module.

    python tools/get_flops.py configs/mask_rcnn/mask-rcnn_swin-t-p4-w7_fpn_1x_coco.py --shape 800 1280 --depth 2

A FLOP is one multiply-add. Nothing is allocated or computed, so the largest model takes seconds.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from mmengine.config import Config, DictAction

from swin_dense.analysis.counting import Count, build_on_meta, count, published_shape


def main() -> None:
    args, config = parse_args()
    height, width = args.shape or published_shape(config)
    result = count(build_on_meta(config), height, width)
    if args.json:
        print(json.dumps(summary(result, height, width, args.depth), indent=2))
    else:
        print(table(result, height, width, args.depth))


def parse_args() -> tuple[argparse.Namespace, Config]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('config', help='config of mmdet or mmsegmentation')
    parser.add_argument(
        '--shape',
        nargs=2,
        type=int,
        metavar=('HEIGHT', 'WIDTH'),
        help='size of the image in pixels; without it that of published figures, see below',
    )
    parser.add_argument('--depth', type=int, default=1, help='how deep modules are listed; 0 is the whole model only')
    parser.add_argument('--json', action='store_true', help='print JSON in place of a table')
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, help='settings to change, key=value')
    parser.epilog = (
        'Published figures are those for 800 x 1280 (detection) and for the crop, four times as wide (segmentation).'
    )
    args = parser.parse_args()
    if not Path(args.config).is_file():
        parser.error(f'there is no config file {args.config!r}')
    config = Config.fromfile(args.config)
    config.merge_from_dict(args.cfg_options or {})
    if config.get('default_scope') is None:
        parser.error(
            f'{args.config} has no default_scope, which says in which framework its model is; '
            'give --cfg-options default_scope=mmdet, or mmseg'
        )
    return args, config


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


if __name__ == '__main__':
    main()

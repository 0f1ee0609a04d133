"""Write a recipe whole, for your own data, into one file that mmdet's or mmseg's own tools train.

    swin-dense config mask-rcnn_swin-t-p4-w7_fpn_1x_coco --out mine.py --data-root data/fruit --classes apple,pear
    swin-dense config swin-tiny-patch4-window7-in1k-pre_upernet_8xb2-160k_ade20k-512x512 --out roads.py \\
        --data-root data/roads --classes background,road --set train_dataloader.batch_size=4

The data lies as COCO (train2017/, val2017/, annotations/instances_train2017.json, ...) or ADE20K does
(images/training/, annotations/training/, .../validation/), or --set says where. In masks, the value of a pixel is
the index of its class in --classes, and 255 is ignored.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import swin_dense
from swin_dense.atomic import written_whole
from swin_dense.commands._out import check_out
from swin_dense.recipes.files import load_recipe
from swin_dense.recipes.settings import merge_settings, parse_settings
from swin_dense.recipes.standalone import as_text, check_classes, check_form, checked_settings, missing_data, own_data


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('name', help='name of a recipe, see `swin-dense zoo`, or a config file')
    parser.add_argument('--out', type=Path, metavar='FILE', help='.py file to write (default: print it)')
    parser.add_argument('--data-root', metavar='DIR', help='folder of your data, in the layout of COCO or ADE20K')
    parser.add_argument('--classes', metavar='A,B,C', help='names of your classes, in the order of your labels')
    parser.add_argument(
        '--set', nargs='+', action='extend', default=[], metavar='KEY=VALUE', help='entries of the config to change'
    )
    parser.add_argument('--force', action='store_true', help='replace FILE')


def run(args: argparse.Namespace) -> int:
    if args.out is not None:
        if args.out.suffix != '.py':
            raise ValueError(f'--out must end in .py, as mmengine reads configs by their suffix, got {str(args.out)!r}')
        check_out(args.out, args.force)
    config = load_recipe(args.name)
    own_data(config, args.data_root, None if args.classes is None else args.classes.split(','))
    merge_settings(config, checked_settings(parse_settings(args.set)))
    check_form(config)
    check_classes(config)
    for path in missing_data(config):
        print(f'swin-dense config: note: {path} does not exist; --set can say where else it is', file=sys.stderr)
    text = as_text(config, f'{Path(args.name).stem}, written whole by swin-dense {swin_dense.__version__}.')
    if args.out is None:
        print(text, end='')
        return 0
    with written_whole(args.out) as unfinished:
        unfinished.path.write_text(text)
    print(f'wrote {args.out}')
    return 0

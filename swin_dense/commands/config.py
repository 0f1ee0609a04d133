"""Write a recipe for your own data into one self-contained file, for `swin-dense train` or the tools of mmdet or mmseg.

    swin-dense config mask-rcnn_swin-t-p4-w7_fpn_1x_coco --out mine.py --data-root data/fruit --classes apple,pear
    swin-dense config swin-tiny-patch4-window7-in1k-pre_upernet_8xb2-160k_ade20k-512x512 --out roads.py \\
        --data-root data/roads --train-images train --train-masks trainannot --val-images val --val-masks valannot \\
        --classes ground,road --ignore 11 --set train_dataloader.batch_size=4
    swin-dense config mask-rcnn_swin-t-p4-w7_fpn_1x_coco --out mine.py --data-root data/fruit --val-share 0.2

Without the options for annotations, images and masks, the layout must be that of COCO (train2017/, val2017/,
annotations/instances_train2017.json, ...), ADE20K (images/training/, annotations/training/, .../validation/) or
Roboflow (train/_annotations.coco.json, valid/, ...). Data without a split need --val-share: images/ and masks/, or one
.json file of annotations and its images. A mask contains, for each pixel, the index of its class in --classes, or the
value in --mask-values; 255 is ignored.

The command checks the data that exist, as `swin-dense train` does before training: all annotations and names of
files, the sizes in the headers of a sample of the images and the values of a sample of the masks.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from pathlib import Path

import swin_dense
from swin_dense.commands._mm import add_json, print_checked, raise_errors
from swin_dense.commands._options import add_check_images, add_out, add_settings, check_out
from swin_dense.utils import packages
from swin_dense.utils.atomic import write_text
from swin_dense.workbench.configs.settings import as_text
from swin_dense.workbench.recipes.files import load_recipe

GROUP = 'models'
EXTRA = 'mm'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('config', help='name of a recipe (`swin-dense zoo` lists them), or a config file')
    add_out(parser, '.py file to write (default: print it)', required=False)
    parser.add_argument('--data-root', metavar='DIR', help='folder with your data (default: that of the recipe)')
    below = 'relative to --data-root or to the current folder'
    for split, use in (('train', 'training'), ('val', 'validation and test')):
        parser.add_argument(
            f'--{split}-ann',
            metavar='FILE',
            help=f"{use} annotations in COCO's format; for segmentation, a list of names ({below})",
        )
        parser.add_argument(f'--{split}-images', metavar='DIR', help=f'{use} images ({below})')
        parser.add_argument(f'--{split}-masks', metavar='DIR', help=f'{use} masks ({below})')
    parser.add_argument(
        '--val-share',
        type=float,
        metavar='X',
        help='share of the training data to hold out for validation, such as 0.2; the names are written beside --out',
    )
    parser.add_argument(
        '--val-group',
        metavar='PATTERN',
        help='with --val-share: keep images together whose names have the same match of this regular expression, such '
        "as 'video\\d+' for the frames of a video, or its parenthesis, such as '(.*)_tile' for the tiles of an image",
    )
    parser.add_argument(
        '--classes',
        metavar='A,B,C',
        help='names of your classes, in the order of your labels; or a .txt file with a name per line, or the .json '
        'file of annotations with all of them',
    )
    parser.add_argument('--ignore', metavar='N,M', help='further values in masks to ignore, besides 255')
    parser.add_argument(
        '--mask-values',
        metavar='N,M',
        help='values of the classes in masks, in the order of --classes, such as 0,255 (default: 0,1,2 and so on)',
    )
    parser.add_argument(
        '--epochs',
        type=int,
        metavar='N',
        help='train for N epochs, with schedules, warm-up and the interval of validation scaled (a recipe for COCO)',
    )
    parser.add_argument('--iters', type=int, metavar='N', help='train for N iterations, likewise (a recipe for ADE20K)')
    parser.add_argument(
        '--image-size',
        type=int,
        metavar='N',
        help='longer side of test images in pixels; all other sizes of images and crops are scaled alike',
    )
    add_check_images(parser)
    add_settings(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    if args.out is not None:
        check_out(args, '.py')  # mmengine reads configs by their suffix
    packages.require('this command', 'mmengine')
    config = load_recipe(args.config)
    # These import torch, which --help does not need.
    from swin_dense.workbench.checking.data import check_data
    from swin_dense.workbench.configs.experiment import Experiment, framework_of
    from swin_dense.workbench.configs.own_data import OwnDataOptions, adapt
    from swin_dense.workbench.configs.schedule import described_schedule, notes_on_schedule, shorten_warm_up

    experiment = Experiment(config)
    framework_of(config)
    options = OwnDataOptions(**{field.name: getattr(args, field.name) for field in dataclasses.fields(OwnDataOptions)})
    with contextlib.ExitStack() as stack:  # removes the files of a split if the config cannot be written
        notes = adapt(experiment, options, stack)
        checked = check_data(experiment, experiment.present(), args.check_images)
        if options.sets_length and not any(setting.startswith('param_scheduler') for setting in options.set):
            shorten_warm_up(experiment, checked.used_images)
        checked.notes = [*notes, *checked.notes, *notes_on_schedule(experiment, checked.used_images)]
        schedule = described_schedule(experiment)
        raise_errors(checked, args.json)
        print_checked('config', checked)
        text = as_text(config, f'{Path(args.config).stem}, written by swin-dense {swin_dense.__version__}.')
        if args.out is None:
            print(text, end='')
            return 0
        write_text(args.out, text)
    print(f'wrote {args.out}')
    if schedule:
        print(f'schedule: {schedule}')
    return 0

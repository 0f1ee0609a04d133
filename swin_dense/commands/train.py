"""Train a detector of mmdet or a segmentor of mmseg.

    swin-dense train mine.py
    swin-dense train mine.py --resume                       # continue from the last checkpoint
    torchrun --nproc-per-node 2 -m swin_dense train mine.py --launcher pytorch

Before training, the command checks the data of the config: all annotations of COCO's format, all names of files, the
headers of a sample of the images and the values of a sample of the masks. With --check-images, it
decodes every image and mask.
"""

from __future__ import annotations

import argparse
import sys

from swin_dense.commands._mm import (
    add_json,
    add_run_arguments,
    config_to_run,
    print_checked,
    process_of,
    raise_errors,
    run_to_its_end,
)
from swin_dense.commands._options import add_check_images, check_checkpoint

GROUP = 'models'
EXTRA = 'mm'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    add_check_images(parser)
    add_json(parser)
    parser.add_argument('--amp', action='store_true', help='train in automatic mixed precision')
    parser.add_argument(
        '--auto-scale-lr', action='store_true', help='scale the learning rate with the total batch size'
    )
    parser.add_argument(
        '--resume',
        nargs='?',
        const='auto',
        metavar='CHECKPOINT',
        help='resume from this checkpoint; without a value, from the last checkpoint in the work directory',
    )


def run(args: argparse.Namespace) -> int:
    if args.resume not in (None, 'auto'):
        check_checkpoint(args.resume, of_backbone=False)
    config = config_to_run(args)
    number, processes = process_of(args.launcher)
    if number == 0:
        print('swin-dense train: checking the data and a first step of training ...', file=sys.stderr, flush=True)
    # These import the frameworks, which --help does not need.
    from mmengine.registry import RUNNERS

    from swin_dense.workbench import training
    from swin_dense.workbench.checking.data import check_data
    from swin_dense.workbench.configs.experiment import Experiment
    from swin_dense.workbench.configs.schedule import notes_on_schedule
    from swin_dense.workbench.configs.settings import notes_on_settings

    config = training.prepare_training(config, amp=args.amp, auto_scale_lr=args.auto_scale_lr, resume=args.resume)
    experiment = Experiment(config)
    checked = None
    if number == 0:  # the others wait for it to join them; if it stops, the launcher stops them
        checked = check_data(experiment, ('train', 'val'), args.check_images, take_step=True)
        on_schedule = notes_on_schedule(experiment, checked.used_images, processes)
        checked.notes = [*notes_on_settings(args.set), *checked.notes, *on_schedule]
        raise_errors(checked, args.json)
    training.join_processes(config)
    try:
        runner = RUNNERS.build(config)
    finally:  # below the long log of the config
        if checked:
            print_checked('train', checked)
    try:
        return run_to_its_end(runner.train)
    except KeyboardInterrupt:
        print('swin-dense train: --resume continues from the last checkpoint', file=sys.stderr)
        raise

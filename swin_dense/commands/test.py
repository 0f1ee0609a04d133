"""Test a detector of mmdet or a segmentor of mmseg on the test data of its config.

swin-dense test mine.py work_dirs/mine/epoch_12.pth --show-dir painted
"""

from __future__ import annotations

import argparse
from pathlib import Path

from swin_dense.commands._mm import (
    add_allow_partial,
    add_run_arguments,
    checkpoint_file,
    config_to_run,
    print_notes,
    run_to_its_end,
)
from swin_dense.commands._options import add_force, check_checkpoint
from swin_dense.utils.atomic import check_folder, check_free

GROUP = 'models'
EXTRA = 'mm'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    parser.add_argument('checkpoint', help='file or address of the weights')
    add_allow_partial(parser)
    parser.add_argument('--out', type=Path, help='mmdet: .pkl file for the predictions; mmseg: folder for label maps')
    add_force(parser)
    parser.add_argument('--show-dir', type=Path, help='folder for images of predictions next to the ground truth')
    parser.add_argument('--tta', action='store_true', help='use the test-time augmentation of the config')


def run(args: argparse.Namespace) -> int:
    check_checkpoint(args.checkpoint, of_backbone=False)
    if args.out is not None:
        check_folder(args.out.parent)
        check_free(args.out, args.force)
    if args.show_dir is not None:
        check_folder(args.show_dir)
    config = config_to_run(args)
    # These import the frameworks, which --help does not need.
    from mmengine.registry import RUNNERS

    from swin_dense.workbench import training
    from swin_dense.workbench.configs.checking import check_data
    from swin_dense.workbench.configs.experiment import Experiment
    from swin_dense.workbench.weights import build_whole

    options = {'out': args.out and str(args.out), 'show_dir': args.show_dir and str(args.show_dir), 'tta': args.tta}
    with checkpoint_file(args.checkpoint) as checkpoint:
        prepared = training.prepare_test(config, checkpoint, **options)
        # mmengine leaves at random what a checkpoint lacks, with a line in its log.
        build_whole(config, checkpoint, args.allow_partial)
        training.join_processes(prepared)
        print_notes('test', check_data(Experiment(prepared), ('test',)))
        return run_to_its_end(RUNNERS.build(prepared).test)

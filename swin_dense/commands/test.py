"""Test a detector of mmdet or a segmentor of mmseg on the test data of its config.

    swin-dense test mine.py work_dirs/mine/epoch_12.pth --show-dir painted
    swin-dense test mask-rcnn_swin-t-p4-w7_fpn_1x_coco --published

With --published, the command fetches the published weights of a recipe, tests them, and prints the published and the
measured accuracy side by side. The data are found as in training: set COCO_ROOT or ADE20K_ROOT.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from swin_dense.commands._mm import (
    add_run_arguments,
    config_to_run,
    is_first_process,
    print_notes,
    run_to_its_end,
)
from swin_dense.commands._options import add_force, check_checkpoint
from swin_dense.recipes.published import recipe_with_weights, side_by_side
from swin_dense.utils.atomic import check_free

GROUP = 'models'
EXTRA = 'mm'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    parser.add_argument('checkpoint', nargs='?', help='file or address of the weights')
    parser.add_argument(
        '--published', action='store_true', help='test the published weights of a recipe against its published accuracy'
    )
    parser.add_argument('--out', type=Path, help='mmdet: .pkl file for the predictions; mmseg: folder for label maps')
    add_force(parser)
    parser.add_argument('--show-dir', help='folder for images that show predictions next to the ground truth')
    parser.add_argument(
        '--tta', action='store_true', help='use test-time augmentation: that of the config, or flips if it has none'
    )


def run(args: argparse.Namespace) -> int:
    if (args.checkpoint is None) != args.published:
        raise ValueError('give either a checkpoint or --published')
    recipe = None
    if args.published:
        recipe = recipe_with_weights(args.config)
        args.checkpoint = recipe.weights
    else:
        check_checkpoint(args.checkpoint, of_backbone=False)
    if args.out is not None:
        check_free(args.out, args.force)
    config = config_to_run(args)
    # These import the frameworks, which --help does not need.
    from swin_dense.workbench import training
    from swin_dense.workbench.configs.checking import check_data

    options = {'out': args.out and str(args.out), 'show_dir': args.show_dir, 'tta': args.tta}
    config = training.prepare_test(config, args.checkpoint, **options)
    training.join_processes(config)
    print_notes('test', check_data(config, ('test',)))

    def test() -> None:
        measured = training.build_runner(config).test()
        if recipe is not None and is_first_process():
            print(f'{recipe.weights}\n{side_by_side(recipe, measured, args.tta)}')

    return run_to_its_end(test, config.work_dir)

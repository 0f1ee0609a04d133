"""Test a detector of mmdet or a segmentor of mmseg on the test data of its config.

    swin-dense test mine.py work_dirs/mine/epoch_12.pth --show-dir painted
    swin-dense test mask-rcnn_swin-t-p4-w7_fpn_1x_coco --data-root data/coco

Without a checkpoint, the name of a recipe stands for its published weights, which are downloaded once. After the test
of a recipe, the command prints the accuracy that its authors published beside the measured accuracy, and whether they
agree within the published decimals.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from swin_dense.commands._mm import (
    add_allow_partial,
    add_json,
    add_run_arguments,
    checkpoint_file,
    config_to_run,
    print_checked,
    process_of,
    published_checkpoint,
    raise_errors,
    run_to_its_end,
)
from swin_dense.commands._options import add_force, check_checkpoint, is_exported_file
from swin_dense.utils.atomic import check_folder, check_free

GROUP = 'models'
EXTRA = 'mm'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    parser.add_argument(
        'checkpoint', nargs='?', help='file or address of the weights (default: those published for the recipe)'
    )
    parser.add_argument('--data-root', metavar='DIR', help='folder of COCO or ADE20K (default: that of the recipe)')
    add_allow_partial(parser)
    add_json(parser)
    parser.add_argument('--out', type=Path, help='mmdet: .pkl file for the predictions; mmseg: folder for label maps')
    add_force(parser)
    parser.add_argument('--show-dir', type=Path, help='folder for images of predictions next to the ground truth')
    parser.add_argument('--tta', action='store_true', help='use the test-time augmentation of the config')


def run(args: argparse.Namespace) -> int:
    place = args.checkpoint or published_checkpoint(args.config, 'test', 'after the recipe')
    check_checkpoint(place, of_backbone=False)
    if is_exported_file(place):
        raise ValueError(f'{place} is an exported file, not a checkpoint: examples/evaluate_file.py scores it')
    if args.out is not None:
        check_folder(args.out.parent)
        check_free(args.out, args.force)
    if args.show_dir is not None:
        check_folder(args.show_dir)
    config = config_to_run(args)
    # These import the frameworks, which --help does not need.
    from swin_dense.workbench import training
    from swin_dense.workbench.checking.data import check_data
    from swin_dense.workbench.configs.experiment import Experiment
    from swin_dense.workbench.configs.own_data import replace_root
    from swin_dense.workbench.configs.settings import notes_on_settings
    from swin_dense.workbench.loading import build_whole, saved_names
    from swin_dense.workbench.recipes.files import recipe_root
    from swin_dense.workbench.recipes.zoo import beside_published, find_recipe

    is_recipe = not Path(args.config).is_file()
    recipe = find_recipe(recipe_root(), Path(args.config).name.removesuffix('.py')) if is_recipe else None
    if args.data_root is not None:
        replace_root(Experiment(config), args.data_root, ['test'])
    if absent := Experiment(config).missing(['test']):  # before any weights are downloaded
        advice = 'the config, or give --data-root' if args.data_root is None else f'--data-root {args.data_root}'
        raise FileNotFoundError(f'there is no {", no ".join(absent)}, which the config tests on: correct {advice}')
    options = {'out': args.out and str(args.out), 'show_dir': args.show_dir and str(args.show_dir), 'tta': args.tta}
    with checkpoint_file(place) as checkpoint:
        prepared = training.prepare_test(config, checkpoint, **options)
        # mmengine would leave parameters random that the checkpoint lacks, with a line in its log.
        model, content = build_whole(prepared, checkpoint, args.allow_partial)
        trained = saved_names(content).get('classes') or ()
        if process_of(args.launcher)[0] == 0:  # the others wait for it to join them
            checked = check_data(Experiment(prepared), ('test',), trained=trained)
            checked.notes = notes_on_settings(args.set) + checked.notes
            raise_errors(checked, args.json)
            print_checked('test', checked)
        training.join_processes(prepared)

        def test() -> None:
            measured = training.build_test_runner(prepared, model, content).test()
            if recipe is not None and os.environ.get('RANK', '0') == '0':
                print(*beside_published(recipe, measured, args.tta), sep='\n')

        return run_to_its_end(test)

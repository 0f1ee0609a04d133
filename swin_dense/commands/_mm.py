"""Shared code of the commands that read a config of mmdet or mmseg."""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import swin_dense
from swin_dense.commands._options import add_settings
from swin_dense.utils import packages
from swin_dense.utils.addresses import is_address
from swin_dense.utils.atomic import check_folder
from swin_dense.workbench.configs.settings import merge_settings
from swin_dense.workbench.recipes.files import load_recipe, recipe_names, recipe_root, unknown_recipe
from swin_dense.workbench.recipes.zoo import published_weights

if TYPE_CHECKING:
    from mmengine.config import Config

    from swin_dense.workbench.checking.data import Checked
    from swin_dense.workbench.checking.question import Used

_OTHER_WEIGHTS = (
    'model.backbone.init_cfg in the config is the checkpoint of the backbone, load_from that of the whole model. To '
    'change it: --set model.backbone.init_cfg.checkpoint=FILE, or model.backbone.init_cfg=None for random weights'
)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of mmdet's and mmseg's own tools."""
    parser.add_argument('config', help='config file of mmdet or mmseg, or the name of a recipe')
    parser.add_argument('--work-dir', help='folder for logs and checkpoints (default: work_dirs/NAME of the config)')
    add_settings(parser)
    parser.add_argument(
        '--launcher',
        choices=['none', 'pytorch', 'slurm', 'mpi'],
        default='none',
        help='launcher that started the processes (default: %(default)s)',
    )
    parser.add_argument('--local_rank', '--local-rank', type=int, default=0, help=argparse.SUPPRESS)


def add_allow_partial(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        '--allow-partial',
        action='store_true',
        help='accept a checkpoint that does not fill the model, whose other parameters are then random',
    )


def read_config(args: argparse.Namespace) -> Config:
    """Load the config, and apply ``--set``."""
    packages.require('this command', 'mmengine', 'mmcv')
    folders = getattr(find_spec('mmcv'), 'submodule_search_locations', None)
    if PathFinder.find_spec('mmcv._ext', folders) is None:
        raise ImportError(packages.cure_for("No module named 'mmcv._ext'"))
    config = load_recipe(args.config)
    merge_settings(config, args.set)
    return config


def published_checkpoint(recipe: str, command: str, where: str) -> str:
    """Return the address of the published weights of a recipe.

    Args:
        recipe: the first argument of a command.
        command: that command.
        where: the place of the checkpoint among its arguments.

    Raises:
        ValueError: it is a config file, no recipe has this name, or no weights are published for the recipe.
    """
    if Path(recipe).is_file():
        raise ValueError(
            f'{recipe} is a config file, for which no weights are published; give its checkpoint {where}: '
            f'swin-dense {command} {recipe} CHECKPOINT'
        )
    name = Path(recipe).name.removesuffix('.py')
    if name not in recipe_names():
        raise unknown_recipe(recipe)
    address = published_weights(recipe_root(), name)
    if not address:
        raise ValueError(
            f'no weights are published for the recipe {recipe}; give a checkpoint {where}, or take a recipe '
            'with weights (`swin-dense zoo --weights` lists them)'
        )
    return address


@contextmanager
def checkpoint_file(place: str) -> Iterator[str]:
    """Yield the path of a checkpoint, downloaded first if it is an address."""
    if not is_address(place):
        yield place
        return
    from swin_dense.utils.fetch import local_file  # imports torch, which --help does not need

    with local_file(place) as path:
        yield str(path)


def config_to_run(args: argparse.Namespace) -> Config:
    """Load the config, and apply all options of :func:`add_run_arguments`."""
    os.environ.setdefault('LOCAL_RANK', str(args.local_rank))
    config = read_config(args)
    config.launcher = args.launcher
    if args.work_dir is not None:
        config.work_dir = args.work_dir
    elif config.get('work_dir') is None:
        config.work_dir = f'work_dirs/{Path(args.config).stem}'
    check_folder(Path(config.work_dir), ' with --work-dir')
    return config


def process_of(launcher: str) -> tuple[int, int]:
    """Return the number of this process and of all processes that a launcher started, before mmengine joins them."""
    variables = {
        'pytorch': ('RANK', 'WORLD_SIZE'),
        'slurm': ('SLURM_PROCID', 'SLURM_NTASKS'),
        'mpi': ('OMPI_COMM_WORLD_RANK', 'OMPI_COMM_WORLD_SIZE'),
    }
    number, count = variables.get(launcher, ('', ''))
    return int(os.environ.get(number, 0)), int(os.environ.get(count, 1))


def print_notes(command: str, notes: Sequence[str]) -> None:
    """Print notes to stderr."""
    for note in notes:
        print(f'swin-dense {command}: note: {note}', file=sys.stderr)


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--json', action='store_true', help='print the results of the checks of data as a line of JSON')


def raise_errors(checked: Checked, as_json: bool) -> None:
    """Raise the errors that a check of data found; with ``as_json``, print all that it found on stdout before."""
    if as_json:
        print(json.dumps(checked.as_dict(), default=str), flush=True)
    checked.raise_errors()


def print_checked(command: str, checked: Checked) -> None:
    """Print notes, the share of each split that is used, and the scores of a perfect model, in one block on stderr."""
    print_notes(command, checked.notes)
    for line in [*_table(checked.used), *(str(score) for score in checked.scores if score.is_perfect)]:
        print(f'swin-dense {command}: {line}', file=sys.stderr)


def _table(used: Sequence[Used]) -> list[str]:
    """Return the lines of a table of the images and objects that each split uses."""
    rows = [['', 'images', 'used', 'objects', 'used']]
    for split in used:
        counts = (split.images, split.used_images, split.objects, split.used_objects)
        rows.append([split.split, *('' if count is None else str(count) for count in counts)])
    columns = 5 if any(split.objects is not None for split in used) else 3
    lines = [row[0].ljust(6) + ''.join(cell.rjust(10) for cell in row[1:columns]) for row in rows]
    return [line.rstrip() for line in lines] if used else []


def run_to_its_end(start: Callable[[], object]) -> int:
    """Call a long-running function and return the exit status: 1 with a traceback on error, not 2 for wrong usage."""
    try:
        start()
    except BrokenPipeError:  # the reader of the output has gone
        return 1
    except (ValueError, TypeError, OSError, ImportError) as error:
        from swin_dense.mm.resume import ResumeError

        if isinstance(error, ResumeError):
            print(error, file=sys.stderr)
        elif isinstance(error, swin_dense.CheckpointError):
            print(f'{error}\n{_OTHER_WEIGHTS}', file=sys.stderr)
        else:
            traceback.print_exc()
        return 1
    return 0

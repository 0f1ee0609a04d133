"""Write the maps of a teacher into a folder, from which a small machine can train without the teacher.

    swin-dense config distill_swin-t-p4-w7_100e_224x224 --out photos.py --data-root photos/ \\
        --teacher facebook/dinov2-small
    swin-dense teach photos.py --out maps  # where the teacher can run
    swin-dense config distill_swin-t-p4-w7_100e_224x224 --out small.py --data-root photos/ --teacher maps
    swin-dense train small.py

The maps are those of crops that are drawn once and for all, --views of each image for training, and one of each
held-out image. Both folders can be moved to another machine. To continue after an interruption, run the same command
again.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from swin_dense.commands._options import add_device, add_settings, check_integers
from swin_dense.recipes.files import load_recipe
from swin_dense.utils import packages
from swin_dense.workbench.configs.settings import merge_settings, parse_settings

GROUP = 'models'
EXTRA = 'mm'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('config', help='config file of a recipe for feature distillation, with the teacher')
    parser.add_argument('--out', required=True, type=Path, metavar='DIR', help='folder for the maps')
    parser.add_argument(
        '--views',
        type=int,
        default=4,
        metavar='N',
        help='fixed crops of each image for training (default: %(default)s)',
    )
    parser.add_argument(
        '--dtype', choices=('float16', 'float32'), default='float16', help='type of the maps (default: %(default)s)'
    )
    parser.add_argument('--batch-size', type=int, default=8, help='crops per batch (default: %(default)s)')
    add_device(parser)
    add_settings(parser)


def run(args: argparse.Namespace) -> int:
    packages.require('this command', 'mmengine', 'tqdm')
    check_integers(args, views=1, batch_size=1)
    # These import torch and tqdm, which --help does without.
    import torch

    from swin_dense.commands._progress import Progress
    from swin_dense.mm.teacher import write_maps

    config = load_recipe(args.config)
    merge_settings(config, parse_settings(args.set))
    dtype = getattr(torch, args.dtype)
    count, batches = write_maps(config, args.out, args.views, args.batch_size, dtype, args.device)
    written = 0
    with Progress(count) as progress:
        for crops in batches:
            written += crops
            for _ in range(crops):
                progress.show()
    print(f'wrote the maps of {written} of {count} crops to {args.out}; the others are there already, or have no image')
    return 0

"""Train a detector of mmdet or a segmentor of mmseg, or pretrain a backbone on images without labels.

    swin-dense train mine.py
    swin-dense train mine.py --resume                       # continue from the newest complete checkpoint
    torchrun --nproc-per-node 2 -m swin_dense train mine.py --launcher pytorch

Before training, the command looks at the data of the config: at all annotations of COCO's format, at all names of
files, at the headers of a sample of the images and at the values of a sample of the masks. With --check-images, it
decodes every image. On a GPU whose Triton kernels were
never verified, it first verifies and times them, which takes a few minutes.
"""

from __future__ import annotations

import argparse
import os

from swin_dense.commands._mm import add_run_arguments, config_to_run, print_notes, run_to_its_end
from swin_dense.commands._options import add_check_images

# The environment variable with the local rank, by launcher.
_LOCAL_RANKS = {'pytorch': 'LOCAL_RANK', 'slurm': 'SLURM_LOCALID', 'mpi': 'OMPI_COMM_WORLD_LOCAL_RANK'}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    add_check_images(parser)
    parser.add_argument('--amp', action='store_true', help='train in automatic mixed precision')
    parser.add_argument(
        '--auto-scale-lr', action='store_true', help='scale the learning rate with the total batch size'
    )
    parser.add_argument(
        '--resume',
        nargs='?',
        const='auto',
        metavar='CHECKPOINT',
        help='resume from this checkpoint; without a value, from the newest complete one in the work directory',
    )


def run(args: argparse.Namespace) -> int:
    config = config_to_run(args)
    from mmengine.dist import get_world_size  # not needed for --help

    from swin_dense.doctor import kernels
    from swin_dense.workbench import training
    from swin_dense.workbench.configs.checking import check_batch, check_data

    config = training.prepare_training(config, amp=args.amp, auto_scale_lr=args.auto_scale_lr)
    # Local rank 0 verifies the kernels before any process uses a GPU; the other ranks wait in `join_processes`.
    is_first = int(os.environ.get(_LOCAL_RANKS.get(args.launcher, ''), 0)) == 0
    if is_first and 'SwinDense' in str(config.model):
        kernels.ensure_verdict()
    training.join_processes(config)
    print_notes('train', check_data(config, ('train', 'val'), args.check_images))
    check_batch(config, get_world_size())
    with training.held_alone(config, args.resume) as config:
        return run_to_its_end(training.build_runner(config).train, config.work_dir)

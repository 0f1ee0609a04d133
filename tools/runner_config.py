"""The command-line options that train.py and test.py share, and the config that they make."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from mmengine.config import Config

from swin_dense.recipes.settings import parse_settings


def make_parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options that every mmdet and mmseg user knows."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument('config', help='config file of mmdet or mmseg')
    parser.add_argument('--work-dir', help='directory for logs and checkpoints; default: work_dirs/<config name>')
    parser.add_argument(
        '--cfg-options',
        nargs='+',
        default=[],
        metavar='KEY=VALUE',
        help='override entries of the config, for example train_dataloader.batch_size=4 model.backbone.with_cp=True; '
        'lists as key="[a,b]" or key=a,b',
    )
    parser.add_argument('--launcher', choices=['none', 'pytorch', 'slurm', 'mpi'], default='none', help='job launcher')
    parser.add_argument('--local_rank', '--local-rank', type=int, default=0, help=argparse.SUPPRESS)
    return parser


def load_config(args: argparse.Namespace, parser: argparse.ArgumentParser) -> Config:
    """Read the config of ``args`` and apply the shared options to it."""
    if not Path(args.config).is_file():
        parser.error(f'there is no config file {args.config!r}')
    os.environ.setdefault('LOCAL_RANK', str(args.local_rank))
    cfg = Config.fromfile(args.config)
    cfg.launcher = args.launcher
    try:
        cfg.merge_from_dict(parse_settings(args.cfg_options))
    except ValueError as error:
        parser.error(str(error))
    if args.work_dir is not None:
        cfg.work_dir = args.work_dir
    elif cfg.get('work_dir') is None:
        cfg.work_dir = f'work_dirs/{Path(args.config).stem}'
    if args.launcher == 'pytorch' and not torch.cuda.is_available():
        # mmengine takes for granted that every rank has a GPU; without one it must find its process group made.
        torch.distributed.init_process_group('gloo')
        cfg.model_wrapper_cfg = {'type': 'MMDistributedDataParallel', 'device_ids': None}
    return cfg

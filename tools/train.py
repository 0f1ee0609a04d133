"""Train a detector of mmdet or a segmentor of mmseg."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from mmengine._strategy import FSDPStrategy
from mmengine.config import Config, ConfigDict
from mmengine.hooks import CheckpointHook
from mmengine.registry import HOOKS, STRATEGIES
from runner_config import build_runner, check_data, load_config, make_parser

from swin_dense.checkpoint import CheckpointError
from swin_dense.mm.checkpoints import check_training_checkpoint, newest_checkpoint, seed_of


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument('--amp', action='store_true', help='train in automatic mixed precision')
    parser.add_argument(
        '--auto-scale-lr', action='store_true', help='scale the learning rate with the total batch size'
    )
    parser.add_argument(
        '--resume',
        nargs='?',
        const='auto',
        metavar='CHECKPOINT',
        help='resume from this checkpoint, or from the newest whole one in the work directory',
    )
    args = parser.parse_args()
    cfg = load_config(args, parser)

    if args.amp:
        if not torch.cuda.is_available():
            parser.error('--amp needs a CUDA device, and none is available')
        cfg.optim_wrapper.type = 'AmpOptimWrapper'
        cfg.optim_wrapper.loss_scale = 'dynamic'
    if args.auto_scale_lr:
        if 'base_batch_size' not in cfg.get('auto_scale_lr', {}):
            parser.error(f'--auto-scale-lr needs auto_scale_lr=dict(base_batch_size=...) in {args.config}')
        cfg.auto_scale_lr.enable = True
    _resume(cfg, args.resume, parser)
    _write_whole_checkpoints(cfg)
    if cfg.get('strategy') and STRATEGIES.get(cfg.strategy.get('type', '')) is FSDPStrategy:
        cfg.strategy.type = 'ResumableFSDPStrategy'
    check_data(cfg, ('train', 'val'), parser)
    with _alone(cfg, parser):
        try:
            build_runner(cfg, parser).train()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            sys.exit(
                f'train.py: {error.strerror} for {cfg.work_dir}: the training has ended, and the checkpoints in there '
                'are whole; make room and go on with --resume'
            )


def _resume(cfg: Config, asked: str | None, parser: argparse.ArgumentParser) -> None:
    """Let a training that is to be resumed go on from a checkpoint that is whole."""
    if asked is not None:
        cfg.resume = True
        cfg.load_from = None if asked == 'auto' else asked
    if not cfg.get('resume'):
        return
    try:
        if cfg.get('load_from') is None:
            checkpoint, passed = newest_checkpoint(Path(cfg.work_dir))
            for message in passed:
                print(f'--resume: {message}')
            print(f'--resume: going on from {checkpoint}' if checkpoint else '--resume: no checkpoint; starting anew')
            cfg.resume, cfg.load_from = checkpoint is not None, checkpoint and str(checkpoint)
        elif '://' not in cfg.load_from:
            if not Path(cfg.load_from).exists():
                parser.error(f'there is no checkpoint {cfg.load_from!r} to resume from')
            check_training_checkpoint(Path(cfg.load_from))
        if cfg.get('load_from') is not None and '://' not in cfg.load_from:
            _take_seed(cfg, Path(cfg.load_from))
    except CheckpointError as error:
        parser.error(f'{error}; --resume without a file takes the newest whole checkpoint of the work directory')


def _take_seed(cfg: Config, checkpoint: Path) -> None:
    """Let a config that sets no seed go on with that of its first run, from which the order of the data comes."""
    randomness = cfg.setdefault('randomness', ConfigDict())
    if randomness.get('seed') is None:
        randomness.seed = seed_of(checkpoint)


def _write_whole_checkpoints(cfg: Config) -> None:
    """Put our checkpoint hook in the place of mmengine's, which it extends; another is left alone."""
    hooks = cfg.setdefault('default_hooks', ConfigDict())
    hook = hooks.setdefault('checkpoint', ConfigDict(type='CheckpointHook', interval=1))
    if hook is not None and HOOKS.get(hook.get('type', '')) is CheckpointHook:
        hook.type = 'WholeCheckpointHook'


@contextlib.contextmanager
def _alone(cfg: Config, parser: argparse.ArgumentParser) -> Iterator[None]:
    """Hold the work directory against another training; of several processes the first does."""
    rank = {'pytorch': 'RANK', 'slurm': 'SLURM_PROCID', 'mpi': 'OMPI_COMM_WORLD_RANK'}.get(cfg.launcher)
    if rank and int(os.environ.get(rank, 0)):
        yield
        return
    Path(cfg.work_dir).mkdir(parents=True, exist_ok=True)
    lock = FileLock(Path(cfg.work_dir, '.training.lock'))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        parser.error(f'another training is writing into {cfg.work_dir}; wait for it, or give this one a --work-dir')
    with lock:
        yield


if __name__ == '__main__':
    main()

"""The command-line options that train.py and test.py share, the config that they make, and the runner it asks for."""

from __future__ import annotations

import argparse
import atexit
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config
from mmengine.registry import RUNNERS
from mmengine.runner import Runner

from swin_dense.recipes.settings import merge_settings, parse_settings

_FSDP_ON_CPU = {'type': 'MMFullyShardedDataParallel', 'device_id': 'cpu'}
# What the wrappers of the FlexibleRunner's strategies need where there is no GPU.
ON_CPU: dict[str, dict[str, Any]] = {
    'DDPStrategy': {'type': 'MMDistributedDataParallel', 'device_ids': None},
    'FSDPStrategy': _FSDP_ON_CPU,
    'ResumableFSDPStrategy': _FSDP_ON_CPU,
}
# FSDPStrategy's 'full' without the moves to a CPU, which free there what is yet to be written.
FULL_ON_CPU = {
    'state_dict_type': 'FULL_STATE_DICT',
    'state_dict_config': {'type': 'FullStateDictConfig', 'rank0_only': True},
    'optim_state_dict_config': {'type': 'FullOptimStateDictConfig', 'rank0_only': True},
}


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
        merge_settings(cfg, parse_settings(args.cfg_options))
    except ValueError as error:
        parser.error(str(error))
    if args.work_dir is not None:
        cfg.work_dir = args.work_dir
    elif cfg.get('work_dir') is None:
        cfg.work_dir = f'work_dirs/{Path(args.config).stem}'
    if args.launcher == 'pytorch' and not torch.cuda.is_available():
        # mmengine takes for granted that every rank has a GPU; without one it must find its process group made.
        torch.distributed.init_process_group('gloo')
        atexit.register(_leave_process_group)  # its threads must not outlive Python, which would abort the process
        cfg.model_wrapper_cfg = {'type': 'MMDistributedDataParallel', 'device_ids': None}
        wrapper = ON_CPU.get((cfg.get('strategy') or {}).get('type', ''))
        if wrapper is not None:
            cfg.strategy.model_wrapper = {**wrapper, **(cfg.strategy.get('model_wrapper') or {})}
            if cfg.strategy.get('state_dict_cfg') == 'full':
                cfg.strategy.state_dict_cfg = FULL_ON_CPU
    return cfg


def _leave_process_group() -> None:
    gc.collect()  # sharded models, which are cycles, hold on to the group
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def build_runner(cfg: Config, parser: argparse.ArgumentParser) -> Any:
    """Return the runner that a config asks for with ``runner_type``, mmengine's ``Runner`` where it asks for none."""
    kind = cfg.get('runner_type', 'Runner')
    if isinstance(kind, str) and RUNNERS.get(kind) is None:
        parser.error(f'there is no runner_type {kind!r}; mmengine has Runner and FlexibleRunner')
    if cfg.get('strategy') and kind in ('Runner', Runner):
        parser.error("strategy is for the FlexibleRunner alone; add runner_type='FlexibleRunner' to the config")
    return RUNNERS.build(cfg)


def check_data(cfg: Config, splits: tuple[str, ...], parser: argparse.ArgumentParser) -> None:
    """End with a message if a folder that a split's data are read from is not there."""
    for split in splits:
        for path, root in _data_roots((cfg.get(f'{split}_dataloader') or {}).get('dataset')):
            if '://' not in root and not Path(root).is_dir():
                parser.error(
                    f'there is no data folder {root!r}, the data_root of the {split} data; the recipes take it from '
                    'the environment variable COCO_ROOT (for ADE20K: ADE20K_ROOT), and others from '
                    f'--cfg-options {split}_dataloader.dataset{path}.data_root=FOLDER'
                )


def _data_roots(dataset: Any, path: str = '') -> Iterator[tuple[str, str]]:
    """Yield where in the config a folder of data stands, and the folder, also inside of wrappers of data sets."""
    if not isinstance(dataset, dict):
        return
    if dataset.get('data_root'):
        yield path, dataset['data_root']
    yield from _data_roots(dataset.get('dataset'), f'{path}.dataset')
    for index, part in enumerate(dataset.get('datasets') or ()):
        yield from _data_roots(part, f'{path}.datasets.{index}')

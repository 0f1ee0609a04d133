"""Prepare configs for training and testing with mmdet and mmseg, and choose the checkpoint to resume from."""

from __future__ import annotations

import atexit
import contextlib
import copy
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from mmengine._strategy import FSDPStrategy
from mmengine.config import Config, ConfigDict
from mmengine.dist import broadcast_object_list, init_dist, is_main_process
from mmengine.registry import RUNNERS, STRATEGIES
from mmengine.runner import Runner
from mmengine.utils.dl_utils import set_multi_processing

from swin_dense.mm.resume import CheckpointError, check_training_checkpoint, training_meta
from swin_dense.utils.addresses import is_address
from swin_dense.utils.atomic import alone
from swin_dense.workbench.checkpoints import newest_checkpoint, use_whole_checkpoints

_FSDP_ON_CPU = {'type': 'MMFullyShardedDataParallel', 'device_id': 'cpu'}
# Model wrapper settings that the FlexibleRunner's strategies need without a GPU.
_ON_CPU: dict[str, dict[str, Any]] = {
    'DDPStrategy': {'type': 'MMDistributedDataParallel', 'device_ids': None},
    'FSDPStrategy': _FSDP_ON_CPU,
    'ResumableFSDPStrategy': _FSDP_ON_CPU,
}
# FSDPStrategy's 'full' without offloading to the CPU, which on a CPU frees tensors before they are written.
_FULL_ON_CPU = {
    'state_dict_type': 'FULL_STATE_DICT',
    'state_dict_config': {'type': 'FullStateDictConfig', 'rank0_only': True},
    'optim_state_dict_config': {'type': 'FullOptimStateDictConfig', 'rank0_only': True},
}


def prepare_training(config: Config, *, amp: bool = False, auto_scale_lr: bool = False) -> Config:
    """Return a config for training with atomic checkpoints that can be resumed.

    Args:
        config: config with ``work_dir`` and ``launcher``.
        amp: whether to train in automatic mixed precision.
        auto_scale_lr: whether to scale the learning rate with the total batch size.
    """
    config = _prepare(config, ('model', 'train_dataloader', 'train_cfg', 'optim_wrapper'))
    if amp:
        if not torch.cuda.is_available():
            raise ValueError('--amp needs a CUDA device, but none is available')
        config.optim_wrapper.type = 'AmpOptimWrapper'
        config.optim_wrapper.loss_scale = 'dynamic'
    if auto_scale_lr:
        if 'base_batch_size' not in config.get('auto_scale_lr', {}):
            raise ValueError('--auto-scale-lr needs auto_scale_lr=dict(base_batch_size=...) in the config')
        config.auto_scale_lr.enable = True
    use_whole_checkpoints(config)
    if config.get('strategy') and STRATEGIES.get(config.strategy.get('type', '')) is FSDPStrategy:
        config.strategy.type = 'ResumableFSDPStrategy'
    return config


def prepare_test(
    config: Config, checkpoint: str, *, out: str | None = None, show_dir: str | None = None, tta: bool = False
) -> Config:
    """Return a config for testing.

    Args:
        config: config with ``work_dir`` and ``launcher``.
        checkpoint: file or address.
        out: for a detector, a .pkl file for the predictions; for a segmentor, a folder for label maps.
        show_dir: folder for images of predictions next to the ground truth.
        tta: whether to use test-time augmentation, as set in the config, or flips for a detector without such settings.
    """
    config = _prepare(config, ('model', 'test_dataloader', 'test_cfg', 'test_evaluator'))
    config.load_from = checkpoint
    is_detector = config.get('default_scope') == 'mmdet'
    if tta:
        _augment(config, is_detector)
    if show_dir is not None:
        hook = config.default_hooks.get('visualization')
        if hook is None:
            raise ValueError('--show-dir needs default_hooks.visualization in the config')
        hook.draw = True
        if is_detector:
            hook.test_out_dir = os.path.abspath(show_dir)  # mmdet places a relative folder inside the work directory
        else:
            hook.interval = 1
            config.visualizer.save_dir = show_dir
    if out is not None and not is_detector:
        _evaluators(config)[0].update(output_dir=out, keep_results=True)
    elif out is not None:
        if not out.endswith(('.pkl', '.pickle')):
            raise ValueError(f'--out of a detector must end in .pkl or .pickle, got {out!r}')
        config.test_evaluator = [*_evaluators(config), {'type': 'DumpDetResults', 'out_file_path': out}]
    return config


def join_processes(config: Config) -> None:
    """Initialise the process group of a launcher, with or without GPUs, before mmengine's runner would do so."""
    if config.launcher == 'none' or torch.distributed.is_initialized():
        return
    if config.launcher == 'pytorch' and not torch.cuda.is_available():
        torch.distributed.init_process_group('gloo')  # mmengine assumes that every rank has a GPU
        atexit.register(_destroy_process_group)  # gloo threads that outlive the interpreter would abort the process
        return
    environment = config.get('env_cfg', {})
    set_multi_processing(**environment.get('mp_cfg', {}), distributed=True)  # else init_dist sets another start method
    init_dist(config.launcher, **environment.get('dist_cfg', {}))


@contextlib.contextmanager
def held_alone(config: Config, resume: str | None) -> Iterator[Config]:
    """Lock the work directory against other trainings, and yield the config with the checkpoint to resume from.

    Rank 0 locks the directory, chooses the checkpoint and broadcasts it to the other ranks. ``resume`` is a checkpoint,
    'auto' for the newest complete one in the work directory, or None to follow the config.
    """
    with contextlib.ExitStack() as held:
        answer: list[Any] = [None]
        if is_main_process():
            try:
                work_dir = Path(config.work_dir)
                work_dir.mkdir(parents=True, exist_ok=True)
                busy = f'another training is writing to {work_dir}; wait for it, or choose another --work-dir'
                held.enter_context(alone(work_dir / '.training.lock', busy))
                answer = [_resumed(config, resume)]
            except (ValueError, OSError) as error:
                answer = [error]
        broadcast_object_list(answer)
        if isinstance(answer[0], Exception):
            raise answer[0]
        config = copy.deepcopy(config)
        config.merge_from_dict(answer[0])
        yield config


def build_runner(config: Config) -> Any:
    """Build the runner of a config: its ``runner_type``, by default mmengine's ``Runner``."""
    return RUNNERS.build(config)


def _prepare(config: Config, needed: tuple[str, ...]) -> Config:
    missing = [key for key in needed if config.get(key) is None]
    if missing:
        raise ValueError(f'the config has no {", no ".join(missing)}; `swin-dense config` writes a complete one')
    config = copy.deepcopy(config)
    kind = config.setdefault('runner_type', 'Runner')
    if isinstance(kind, str) and RUNNERS.get(kind) is None:
        raise ValueError(f'unknown runner_type {kind!r}; mmengine has Runner and FlexibleRunner')
    if config.get('strategy') and kind in ('Runner', Runner):
        raise ValueError("strategy needs the FlexibleRunner; add runner_type='FlexibleRunner' to the config")
    if config.launcher == 'pytorch' and not torch.cuda.is_available():
        config.model_wrapper_cfg = {'type': 'MMDistributedDataParallel', 'device_ids': None}
        wrapper = _ON_CPU.get((config.get('strategy') or {}).get('type', ''))
        if wrapper is not None:
            config.strategy.model_wrapper = {**wrapper, **(config.strategy.get('model_wrapper') or {})}
            if config.strategy.get('state_dict_cfg') == 'full':
                config.strategy.state_dict_cfg = _FULL_ON_CPU
    return config


def _destroy_process_group() -> None:
    gc.collect()  # sharded models are reference cycles that keep the process group alive
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _resumed(config: Config, asked: str | None) -> dict[str, Any]:
    """Return the config entries that make training resume from a complete checkpoint; empty if it is not to resume."""
    if asked is None and not config.get('resume'):
        return {}
    named = config.get('load_from') if asked is None else None if asked == 'auto' else asked
    try:
        if named is None:
            checkpoint, skipped = newest_checkpoint(Path(config.work_dir))
            for message in skipped:
                print(f'--resume: {message}')
            found = f'resuming from {checkpoint}' if checkpoint else 'no checkpoint found; starting from the beginning'
            print(f'--resume: {found}')
            if checkpoint is None:
                return {'resume': False, 'load_from': None}
            named = str(checkpoint)
        elif not is_address(named):
            if not Path(named).exists():
                raise FileNotFoundError(f'there is no checkpoint {named!r} to resume from')
            check_training_checkpoint(Path(named))
        entries: dict[str, Any] = {'resume': True, 'load_from': named}
        # The seed determines the order of the data, so without a seed in the config, use that of the first run.
        meta = {} if is_address(named) else training_meta(Path(named))
        if meta and config.get('randomness', {}).get('seed') is None:
            entries['randomness.seed'] = meta.get('seed')
        for key, unit in (('max_epochs', 'epoch'), ('max_iters', 'iter')):
            if meta.get(unit, 0) >= (config.get('train_cfg') or {}).get(key, float('inf')):
                print(f'--resume: {named} is the end of this training; to train longer: --set train_cfg.{key}=N')
        return entries
    except CheckpointError as error:
        raise CheckpointError(
            f'{error}; --resume without a file uses the newest complete checkpoint of the work directory'
        ) from error


def _augment(config: Config, is_detector: bool) -> None:
    if 'tta_model' not in config or 'tta_pipeline' not in config:
        if not is_detector:
            raise ValueError('--tta needs tta_model and tta_pipeline in the config')
        config.tta_model = {
            'type': 'DetTTAModel',
            'tta_cfg': {'nms': {'type': 'nms', 'iou_threshold': 0.5}, 'max_per_img': 100},
        }
        # The image and its horizontal flip.
        *steps, pack = copy.deepcopy(config.test_dataloader.dataset.pipeline)
        pack['meta_keys'] = (*pack.get('meta_keys', ()), 'flip', 'flip_direction')
        flips = [{'type': 'RandomFlip', 'prob': 1.0}, {'type': 'RandomFlip', 'prob': 0.0}]
        config.tta_pipeline = [*steps, {'type': 'TestTimeAug', 'transforms': [flips, [pack]]}]
    if is_detector and config.model.get('roi_head', {}).get('mask_head'):
        print('mmdet cannot merge masks in test-time augmentation; testing boxes only')
        config.model.roi_head.mask_head = None
        config.model.roi_head.mask_roi_extractor = None
        for evaluator in _evaluators(config):
            if 'metric' in evaluator:
                evaluator.metric = 'bbox'
    config.model = ConfigDict(**config.tta_model, module=config.model)
    config.test_dataloader.dataset.pipeline = config.tta_pipeline


def _evaluators(config: Config) -> list[Any]:
    return config.test_evaluator if isinstance(config.test_evaluator, list) else [config.test_evaluator]

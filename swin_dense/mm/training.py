"""Trainings and tests of mmdet and mmseg, prepared: a config in, a config out, and what they go on from."""

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

from swin_dense.checkpoint import CheckpointError
from swin_dense.mm.checkpoints import check_training_checkpoint, newest_checkpoint, seed_of, use_whole_checkpoints
from swin_dense.utils import locks

_FSDP_ON_CPU = {'type': 'MMFullyShardedDataParallel', 'device_id': 'cpu'}
# What the wrappers of the FlexibleRunner's strategies need where there is no GPU.
_ON_CPU: dict[str, dict[str, Any]] = {
    'DDPStrategy': {'type': 'MMDistributedDataParallel', 'device_ids': None},
    'FSDPStrategy': _FSDP_ON_CPU,
    'ResumableFSDPStrategy': _FSDP_ON_CPU,
}
# FSDPStrategy's 'full' without the moves to a CPU, which free there what is yet to be written.
_FULL_ON_CPU = {
    'state_dict_type': 'FULL_STATE_DICT',
    'state_dict_config': {'type': 'FullStateDictConfig', 'rank0_only': True},
    'optim_state_dict_config': {'type': 'FullOptimStateDictConfig', 'rank0_only': True},
}


def prepare_training(config: Config, *, amp: bool = False, auto_scale_lr: bool = False) -> Config:
    """Return the config of a training whose checkpoints are whole, and which can be resumed.

    Args:
        config: with ``work_dir`` and ``launcher``.
        amp: train in automatic mixed precision.
        auto_scale_lr: scale the learning rate with the total batch size.

    Raises:
        ValueError: the config lacks what a training or ``auto_scale_lr`` needs, there is no GPU for ``amp``, or it asks
            for a runner that there is not.
    """
    config = _prepare(config, ('model', 'train_dataloader', 'train_cfg', 'optim_wrapper'))
    if amp:
        if not torch.cuda.is_available():
            raise ValueError('--amp needs a CUDA device, and none is available')
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
    """Return the config of a test.

    Args:
        config: with ``work_dir`` and ``launcher``.
        checkpoint: file or address.
        out: for a detector a .pkl for the predictions, for a segmentor a folder for label maps.
        show_dir: folder for pictures of predictions beside the ground truth.
        tta: augment the images, as the config says, or else by flips.

    Raises:
        ValueError: the config lacks what a test or one of these needs, or asks for a runner that there is not.
    """
    config = _prepare(config, ('model', 'test_dataloader', 'test_cfg', 'test_evaluator'))
    config.load_from = checkpoint
    is_detector = config.get('default_scope') == 'mmdet'
    if tta:
        _augment(config, is_detector)
    if show_dir is not None:
        _paint(config, is_detector, show_dir)
    if out is not None:
        _write_predictions(config, is_detector, out)
    return config


def join_processes(config: Config) -> None:
    """Let the processes of a launcher find each other, as mmengine's runner does later, and without GPUs too."""
    if config.launcher == 'none' or torch.distributed.is_initialized():
        return
    if config.launcher == 'pytorch' and not torch.cuda.is_available():
        torch.distributed.init_process_group('gloo')  # mmengine takes for granted that every rank has a GPU
        atexit.register(_leave_processes)  # gloo's threads must not outlive Python, which would abort the process
        return
    environment = config.get('env_cfg', {})
    set_multi_processing(**environment.get('mp_cfg', {}), distributed=True)  # init_dist would choose another method
    init_dist(config.launcher, **environment.get('dist_cfg', {}))


@contextlib.contextmanager
def held_alone(config: Config, resume: str | None) -> Iterator[Config]:
    """Hold the work directory against other trainings, and yield the config with the checkpoint to go on from.

    Of several processes the first holds the directory, and then looks for the checkpoint; it tells the others.

    Args:
        config: as ``prepare_training`` returns it.
        resume: a checkpoint, 'auto' for the newest that is whole in the work directory, None for what the config says.

    Raises:
        ValueError: another training writes there, or the checkpoint cannot be gone on from.
    """
    with contextlib.ExitStack() as held:
        answer: list[Any] = [None]
        if is_main_process():
            try:
                work_dir = Path(config.work_dir)
                work_dir.mkdir(parents=True, exist_ok=True)
                busy = f'another training is writing into {work_dir}; wait for it, or give this one a --work-dir'
                held.enter_context(locks.alone(work_dir / '.training.lock', busy))
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
    """Return the runner that a config asks for with ``runner_type``, mmengine's ``Runner`` where it asks for none."""
    return RUNNERS.build(config)


def _prepare(config: Config, needed: tuple[str, ...]) -> Config:
    missing = [key for key in needed if config.get(key) is None]
    if missing:
        raise ValueError(f'the config has no {", no ".join(missing)}; a whole one is written by `swin-dense config`')
    config = copy.deepcopy(config)
    kind = config.setdefault('runner_type', 'Runner')
    if isinstance(kind, str) and RUNNERS.get(kind) is None:
        raise ValueError(f'there is no runner_type {kind!r}; mmengine has Runner and FlexibleRunner')
    if config.get('strategy') and kind in ('Runner', Runner):
        raise ValueError("strategy is for the FlexibleRunner alone; add runner_type='FlexibleRunner' to the config")
    if config.launcher == 'pytorch' and not torch.cuda.is_available():
        config.model_wrapper_cfg = {'type': 'MMDistributedDataParallel', 'device_ids': None}
        wrapper = _ON_CPU.get((config.get('strategy') or {}).get('type', ''))
        if wrapper is not None:
            config.strategy.model_wrapper = {**wrapper, **(config.strategy.get('model_wrapper') or {})}
            if config.strategy.get('state_dict_cfg') == 'full':
                config.strategy.state_dict_cfg = _FULL_ON_CPU
    return config


def _leave_processes() -> None:
    gc.collect()  # sharded models, which are cycles, hold on to the group
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _resumed(config: Config, asked: str | None) -> dict[str, Any]:
    """Return the entries of a config by which a training that is to be resumed goes on from a whole checkpoint."""
    if asked is None and not config.get('resume'):
        return {}
    named = config.get('load_from') if asked is None else None if asked == 'auto' else asked
    try:
        if named is None:
            checkpoint, passed = newest_checkpoint(Path(config.work_dir))
            for message in passed:
                print(f'--resume: {message}')
            print(f'--resume: going on from {checkpoint}' if checkpoint else '--resume: no checkpoint; starting anew')
            if checkpoint is None:
                return {'resume': False, 'load_from': None}
            named = str(checkpoint)
        elif '://' not in named:
            if not Path(named).exists():
                raise FileNotFoundError(f'there is no checkpoint {named!r} to resume from')
            check_training_checkpoint(Path(named))
        entries: dict[str, Any] = {'resume': True, 'load_from': named}
        # The order of the data comes from the seed: a config that sets none goes on with that of its first run.
        if '://' not in named and config.get('randomness', {}).get('seed') is None:
            entries['randomness.seed'] = seed_of(Path(named))
        return entries
    except CheckpointError as error:
        raise CheckpointError(
            f'{error}; --resume without a file takes the newest whole checkpoint of the work directory'
        ) from error


def _augment(config: Config, is_detector: bool) -> None:
    if 'tta_model' not in config or 'tta_pipeline' not in config:
        if not is_detector:
            raise ValueError('--tta needs tta_model and tta_pipeline in the config')
        config.tta_model = {
            'type': 'DetTTAModel',
            'tta_cfg': {'nms': {'type': 'nms', 'iou_threshold': 0.5}, 'max_per_img': 100},
        }
        config.tta_pipeline = _flipped(config.test_dataloader.dataset.pipeline)
    if is_detector and config.model.get('roi_head', {}).get('mask_head'):
        print('mmdet cannot merge masks in test-time augmentation: testing the boxes only')
        config.model.roi_head.mask_head = None
        config.model.roi_head.mask_roi_extractor = None
        config.test_evaluator.metric = 'bbox'
    config.model = ConfigDict(**config.tta_model, module=config.model)
    config.test_dataloader.dataset.pipeline = config.tta_pipeline


def _flipped(pipeline: list) -> list:
    """Return a test pipeline of mmdet that ends in the image and its mirror image."""
    flips = [{'type': 'RandomFlip', 'prob': 1.0}, {'type': 'RandomFlip', 'prob': 0.0}]
    pack = copy.deepcopy(pipeline[-1])
    pack['meta_keys'] = (*pack.get('meta_keys', ()), 'flip', 'flip_direction')
    return [*copy.deepcopy(pipeline[:-1]), {'type': 'TestTimeAug', 'transforms': [flips, [pack]]}]


def _paint(config: Config, is_detector: bool, folder: str) -> None:
    hook = config.default_hooks.get('visualization')
    if hook is None:
        raise ValueError('--show-dir needs default_hooks.visualization in the config')
    hook.draw = True
    if is_detector:
        hook.test_out_dir = os.path.abspath(folder)  # relative, it would go below the work directory
    else:
        hook.interval = 1
        config.visualizer.save_dir = folder


def _write_predictions(config: Config, is_detector: bool, out: str) -> None:
    if not is_detector:
        config.test_evaluator.output_dir = out
        config.test_evaluator.keep_results = True
        return
    if not out.endswith(('.pkl', '.pickle')):
        raise ValueError(f'--out of a detector must end in .pkl or .pickle, got {out!r}')
    evaluators = config.test_evaluator if isinstance(config.test_evaluator, list) else [config.test_evaluator]
    config.test_evaluator = [*evaluators, {'type': 'DumpDetResults', 'out_file_path': out}]

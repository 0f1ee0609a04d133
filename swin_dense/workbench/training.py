"""Prepare configs for training and testing with mmdet and mmseg."""

from __future__ import annotations

import atexit
import copy
import gc
import os
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config, ConfigDict
from mmengine.registry import RUNNERS, STRATEGIES
from mmengine.runner import Runner
from torch import nn

from swin_dense.utils import private_mm
from swin_dense.workbench.predict import test_dataset


def prepare_training(
    config: Config, *, amp: bool = False, auto_scale_lr: bool = False, resume: str | None = None
) -> Config:
    """Return a config, with ``work_dir`` and ``launcher``, for training with the options of `swin-dense train`.

    ``resume`` is a checkpoint, 'auto' for the last one in the work directory, or None to follow the config.
    """
    config = _prepare(config, ('model', 'train_dataloader', 'train_cfg', 'optim_wrapper'))
    if amp:
        if not torch.cuda.is_available():
            raise ValueError('--amp needs a CUDA device, but none is available')
        config.optim_wrapper.type = 'AmpOptimWrapper'
        config.optim_wrapper.loss_scale = 'dynamic'
    if auto_scale_lr:
        if 'base_batch_size' not in (config.get('auto_scale_lr') or {}):
            raise ValueError('--auto-scale-lr needs auto_scale_lr=dict(base_batch_size=...) in the config')
        config.auto_scale_lr.enable = True
    if resume == 'auto':
        _check_last_checkpoint(Path(config.work_dir))
    if resume is not None:
        config.resume, config.load_from = True, None if resume == 'auto' else resume
    if config.get('resume'):
        hooks = config.get('custom_hooks') or []
        config.custom_hooks = [*hooks, {'type': 'ResumeOptimizer'}]
    sharded = private_mm.fsdp_strategy()
    if sharded and config.get('strategy') and STRATEGIES.get(config.strategy.get('type', '')) is sharded:
        config.strategy.type = 'ResumableFSDPStrategy'
    return config


def _check_last_checkpoint(work_dir: Path) -> None:
    """Raise FileNotFoundError if there is nothing to resume from, where mmengine starts anew."""
    advice = 'Leave --resume out to start anew, or give a checkpoint: --resume CHECKPOINT'
    pointer = work_dir / 'last_checkpoint'  # which mmengine writes after each checkpoint
    if not pointer.is_file():
        raise FileNotFoundError(
            f'--resume: {work_dir} has no file last_checkpoint, so there is no training to resume. {advice}'
        )
    last = Path(pointer.read_text(encoding='utf-8').strip())
    if not last.exists():
        raise FileNotFoundError(f'--resume: there is no checkpoint {last}, which {pointer} names. {advice}')


def prepare_test(
    config: Config, checkpoint: str, *, out: str | None = None, show_dir: str | None = None, tta: bool = False
) -> Config:
    """Return a config, with ``work_dir`` and ``launcher``, for testing with the options of `swin-dense test`."""
    config = _prepare(config, ('model', 'test_dataloader', 'test_cfg', 'test_evaluator'))
    config.load_from, config.resume = checkpoint, False
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


def build_test_runner(config: Config, model: nn.Module, checkpoint: dict[str, Any]) -> Any:
    """Build the runner of a config of :func:`prepare_test` around a model that has its weights already.

    mmengine's own runner would build the model and read the checkpoint a second time. Hooks receive the content of the
    checkpoint, such as EMAHook, which takes the average of the weights from it; then it is cleared, to free memory.
    """
    if config.get('runner_type', 'Runner') != 'Runner':  # such as FlexibleRunner, whose strategy builds and loads
        return RUNNERS.build(config)

    class LoadedRunner(Runner):
        def build_model(self, options: Any) -> nn.Module:
            return super().build_model({**options, 'module': model} if 'module' in options else model)

        def load_checkpoint(self, filename: str) -> None:
            self.call_hook('after_load_checkpoint', checkpoint=checkpoint)
            checkpoint.clear()
            self.logger.info(f'Load checkpoint from {filename}')

    return LoadedRunner.from_cfg(config)


def join_processes(config: Config) -> None:
    """Initialise the process group of torchrun on machines without GPUs."""
    is_on_cpu = config.launcher == 'pytorch' and not torch.cuda.is_available()
    if is_on_cpu and not torch.distributed.is_initialized():
        torch.distributed.init_process_group('gloo')  # mmengine assumes that every rank has a GPU
        atexit.register(_leave_processes)


def _leave_processes() -> None:
    """End the process group and its threads: one that frees a tensor while Python ends would abort the process."""
    torch.distributed.destroy_process_group()
    gc.collect()  # DDP keeps the group too, and reference cycles of the runner keep DDP


def _prepare(config: Config, needed: tuple[str, ...]) -> Config:
    missing = [key for key in needed if config.get(key) is None]
    if missing:
        raise ValueError(f'the config has no {", no ".join(missing)}; `swin-dense config` writes a complete one')
    config = copy.deepcopy(config)
    if config.launcher == 'pytorch' and not torch.cuda.is_available():
        config.model_wrapper_cfg = {'type': 'MMDistributedDataParallel', 'device_ids': None}
    return config


def _augment(config: Config, is_detector: bool) -> None:
    if is_detector:
        _test_boxes_only(config)
        _set_default_augmentation(config)
    if 'tta_model' not in config or 'tta_pipeline' not in config:
        raise ValueError(
            '--tta needs tta_model and tta_pipeline in the config; every recipe of `swin-dense zoo semantic` has them'
        )
    config.model = ConfigDict(**config.tta_model, module=config.model)
    config.test_dataloader.dataset.pipeline = config.tta_pipeline


def _test_boxes_only(config: Config) -> None:
    """Remove the mask head of a detector, whose masks mmdet cannot merge; raise ValueError for other masks."""
    model = config.model
    evaluators = _evaluators(config)
    has_masks = any(key in model for key in ('panoptic_head', 'panoptic_fusion_head', 'mask_head'))
    has_head = bool((model.get('roi_head') or {}).get('mask_head')) and not has_masks
    if has_head:
        print('mmdet cannot merge masks in test-time augmentation; testing boxes only')
        model.roi_head.mask_head = model.roi_head.mask_roi_extractor = None
    elif has_masks or any('segm' in str(evaluator.get('metric')) for evaluator in evaluators):
        raise ValueError(
            f'mmdet cannot merge masks in test-time augmentation, and a {model.get("type")} has no mask head that '
            'could be left out to test boxes only; leave --tta out'
        )
    for evaluator in evaluators if has_head else []:
        if 'metric' in evaluator:
            evaluator.metric = 'bbox'


def _set_default_augmentation(config: Config) -> None:
    """Predict images and their mirror images, as mmdet's own tool does for a config that says nothing else."""
    if 'tta_model' not in config:
        merged = {'nms': {'type': 'nms', 'iou_threshold': 0.5}, 'max_per_img': 100}
        config.tta_model = {'type': 'DetTTAModel', 'tta_cfg': merged}
    if 'tta_pipeline' not in config:
        keys = ('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor', 'flip', 'flip_direction')
        flips = [{'type': 'RandomFlip', 'prob': prob} for prob in (1.0, 0.0)]
        packed = [{'type': 'PackDetInputs', 'meta_keys': keys}]
        steps = test_dataset(config).pipeline[:-1]
        config.tta_pipeline = [*steps, {'type': 'TestTimeAug', 'transforms': [flips, packed]}]


def _evaluators(config: Config) -> list[Any]:
    return config.test_evaluator if isinstance(config.test_evaluator, list) else [config.test_evaluator]

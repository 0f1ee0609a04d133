"""A training of a few seconds with mmengine alone: the config, and the classes that it uses."""

import os
import signal
from pathlib import Path

import torch
from mmengine.evaluator import BaseMetric
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.registry import DATASETS, HOOKS, METRICS, MODELS
from mmengine.runner import CheckpointLoader
from torch import nn
from torch.utils.data import Dataset

import swin_dense  # noqa: F401  lets mmengine read its checkpoints
from tests.conftest import TINY

CONFIG = f"""
custom_imports = dict(imports=['tests.workbench.tiny_training'], allow_failed_imports=False)
default_scope = 'mmengine'
model = dict(type='TinyRegressor', backbone=dict(type='SwinDense', drop_path_rate=0.0, **{TINY}))
train_dataloader = dict(
    batch_size=2, dataset=dict(type='RandomImages'), num_workers=0,
    sampler=dict(type='InfiniteSampler', shuffle=True), collate_fn=dict(type='default_collate'))
train_cfg = dict(type='IterBasedTrainLoop', max_iters=12)
optim_wrapper = dict(type='OptimWrapper', optimizer=dict(type='AdamW', lr=1e-3))
param_scheduler = [dict(type='LinearLR', start_factor=0.1, by_epoch=False, begin=0, end=20)]
default_hooks = dict(
    checkpoint=dict(type='CheckpointHook', by_epoch=False, interval=2),
    logger=dict(type='LoggerHook', interval=1))
log_processor = dict(by_epoch=False)
randomness = dict(seed=0, deterministic=True)
env_cfg = dict(dist_cfg=dict(backend='gloo'))
"""

TESTED = """
test_dataloader = dict(
    batch_size=2, dataset=dict(type='RandomImages'), num_workers=0,
    sampler=dict(type='DefaultSampler', shuffle=False), collate_fn=dict(type='default_collate'))
test_cfg = dict()
test_evaluator = dict(type='MeanGuess')
custom_hooks = [dict(type='EMAHook'), dict(type='SeesCheckpoint')]
"""


@DATASETS.register_module()
class RandomImages(Dataset):
    """Fixed noise images, each with a number to predict."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return {'inputs': torch.randn(3, 32, 32, generator=generator), 'numbers': torch.tensor(index / 16)}


@DATASETS.register_module()
class BrokenImages(RandomImages):
    def __getitem__(self, index):
        raise ValueError('an image that cannot be read')


@MODELS.register_module()
class TinyRegressor(BaseModel):
    def __init__(self, backbone):
        super().__init__()
        print('a model was built')
        self.backbone = MODELS.build(backbone)
        self.head = nn.Linear(self.backbone.num_features[-1], 1)

    def forward(self, inputs, numbers, mode='loss'):
        features = self.backbone(inputs)[-1].mean((2, 3))
        guesses = self.head(features)[:, 0]
        if mode == 'predict':
            return list(guesses)
        return {'loss': (guesses - numbers).square().mean()}


@METRICS.register_module()
class MeanGuess(BaseMetric):
    def process(self, data_batch, data_samples):
        self.results.extend(map(float, data_samples))

    def compute_metrics(self, results):
        return {'guess': sum(results) / len(results)}


@HOOKS.register_module()
class SeesCheckpoint(Hook):
    def after_load_checkpoint(self, runner, checkpoint):
        print('a hook sees iteration', checkpoint['meta']['iter'])


@HOOKS.register_module()
class Killed(Hook):
    """A hook that kills its process with SIGKILL after an iteration, counted from 0."""

    def __init__(self, at):
        self.at = at

    def after_train_iter(self, runner, *_, **__):
        if runner.iter == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


def saved(work_dir):
    """Return the name of the last checkpoint, and its weights, optimiser and schedulers without tensors."""
    path = Path((work_dir / 'last_checkpoint').read_text())
    checkpoint = CheckpointLoader.load_checkpoint(str(path), map_location='cpu')
    return path.name, [in_lists(checkpoint[name]) for name in ('state_dict', 'optimizer', 'param_schedulers')]


def in_lists(value):
    """Return nested dictionaries and lists with their tensors as lists of numbers, which can be compared."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: in_lists(child) for key, child in value.items()}
    return list(map(in_lists, value)) if isinstance(value, list | tuple) else value


def write_config(folder, extra=''):
    path = folder / 'tiny.py'
    path.write_text(CONFIG + extra)
    return path

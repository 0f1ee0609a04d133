"""A training of a few seconds with mmengine alone: the config, and the classes that it uses."""

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mmengine.evaluator import BaseMetric
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.registry import DATASETS, HOOKS, METRICS, MODELS
from torch import nn
from torch.utils.data import Dataset

import swin_dense  # noqa: F401  lets torch.load read the checkpoints of mmengine
from swin_dense.workbench import checkpoints
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

# All sources of randomness: drop path, augmentations with three generators, and a validation that uses them too.
RANDOM = """
model['backbone']['drop_path_rate'] = 0.3
train_dataloader['dataset'] = dict(type='AugmentedImages')
val_dataloader = dict(
    batch_size=4, dataset=dict(type='AugmentedImages'), num_workers=0,
    sampler=dict(type='DefaultSampler', shuffle=False), collate_fn=dict(type='default_collate'))
val_evaluator = dict(type='MeanGuess')
val_cfg = dict()
train_cfg['val_interval'] = 3
default_hooks['checkpoint'].update(interval=1, max_keep_ckpts=2, save_best='guess', rule='greater')
"""
EPOCHS = """
train_cfg = dict(type='EpochBasedTrainLoop', max_epochs=6, val_interval=1)
train_dataloader['sampler'] = dict(type='DefaultSampler', shuffle=True)
default_hooks['checkpoint']['by_epoch'] = True
log_processor['by_epoch'] = True
"""
# Config lines of each kind of loop and data loading.
CASES = {
    'iterations, read by the process itself': RANDOM,
    'iterations, read by two workers': RANDOM + 'train_dataloader.update(num_workers=2, persistent_workers=True)\n',
    'epochs, read by two workers': RANDOM + EPOCHS + "train_dataloader['num_workers'] = 2\n",
}


@DATASETS.register_module()
class RandomImages(Dataset):
    """Fixed noise images, each with a number to predict."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {'inputs': torch.randn(3, 32, 32, generator=generator), 'numbers': torch.tensor(index / 16)}


@DATASETS.register_module()
class AugmentedImages(RandomImages):
    """The same images, with random contrast, brightness and noise."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        item = super().__getitem__(index)
        item['inputs'] = item['inputs'] * random.uniform(0.5, 2) + np.random.rand() + 0.1 * torch.randn(3, 32, 32)
        return item


@DATASETS.register_module()
class BrokenImages(RandomImages):
    """A data set whose images raise a ValueError."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        raise ValueError('an image that cannot be read')


@METRICS.register_module()
class MeanGuess(BaseMetric):
    """The mean of all predictions."""

    def process(self, data_batch: dict, data_samples: list[dict]) -> None:
        """Collect the predictions of a batch."""
        self.results.extend(sample['guess'] for sample in data_samples)

    def compute_metrics(self, results: list[float]) -> dict[str, float]:
        """Return their mean."""
        return {'guess': sum(results) / len(results)}


@MODELS.register_module()
class TinyRegressor(BaseModel):
    """A Swin and a linear head."""

    def __init__(self, backbone: dict) -> None:
        super().__init__()
        self.backbone = MODELS.build(backbone)
        self.head = nn.Linear(self.backbone.out_channels[-1], 1)

    def forward(self, inputs: torch.Tensor, numbers: torch.Tensor, mode: str = 'loss') -> dict | list[dict]:
        """Return the loss, or the predictions if ``mode`` is 'predict'."""
        guesses = self.head(self.backbone(inputs)[-1].mean((2, 3)))[:, 0]
        if mode == 'predict':
            return [{'guess': guess} for guess in guesses.tolist()]
        return {'loss': (guesses - numbers).square().mean()}


@HOOKS.register_module()
class Killed(Hook):
    """A hook that kills its process with SIGKILL at a chosen moment of the training.

    The moments are each iteration, each validation, and three of each save: the temporary file is half written, it is
    complete but not yet renamed, and it is renamed while the previous checkpoint still exists.

    Args:
        at: index of the moment, from 0.
        where: count only moments of this name; '' counts all.
    """

    def __init__(self, at: int, where: str = '') -> None:
        self.left, self.where = at, where

    def before_train(self, runner: Any) -> None:
        """Wrap the function that renames checkpoints, to add the moments of a save."""
        put_in_place = checkpoints.put_in_place

        def watched(finished: Path, destination: Path) -> None:
            content = finished.read_bytes()
            finished.write_bytes(content[: len(content) // 2])
            self.moment('half')
            finished.write_bytes(content)
            self.moment('unnamed')
            put_in_place(finished, destination)
            self.moment('named')

        checkpoints.put_in_place = watched

    def after_train_iter(self, runner: Any, *_: Any, **__: Any) -> None:
        """Count an iteration."""
        self.moment('iteration')

    def after_val(self, runner: Any) -> None:
        """Count a validation."""
        self.moment('validation')

    def moment(self, name: str) -> None:
        """Count a moment, and kill the process at the chosen one."""
        if self.where in ('', name):
            self.left -= 1
            if self.left < 0:
                os.kill(os.getpid(), signal.SIGKILL)


def differences(expected: Path, found: Path) -> list[str]:
    """Return the differing entries of the newest checkpoints: weights, optimiser, schedulers and random states."""
    (theirs, _), (ours, _) = checkpoints.newest_checkpoint(expected), checkpoints.newest_checkpoint(found)
    if theirs.name != ours.name:
        return [f'{theirs.name} and {ours.name}']
    states = (dict(_flat(_compared(torch.load(path, weights_only=True)))) for path in (theirs, ours))
    a, b = states
    return [name for name in a.keys() | b.keys() if not _is_equal(a.get(name), b.get(name))]


def _compared(checkpoint: dict) -> list:
    parts = [checkpoint[name] for name in ('state_dict', 'optimizer', 'param_schedulers')]
    return [*parts, checkpoint['meta']['random_states']]


def _flat(value: Any, name: str = '') -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested dictionaries and lists with their dotted names."""
    if isinstance(value, dict | list | tuple):
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _flat(child, f'{name}.{key}')
    else:
        yield name, value


def _is_equal(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a == b


def write_config(folder: Path, extra: str = '') -> Path:
    """Write the config into a folder, with additional lines at the end."""
    path = folder / 'tiny.py'
    path.write_text(CONFIG + extra)
    return path

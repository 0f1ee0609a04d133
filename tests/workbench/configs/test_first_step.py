"""One step of training before the training: what would end it in a traceback is one error that names the setting."""

import copy
import random

import numpy as np
import pytest
import torch
from mmengine.hooks import Hook
from mmengine.registry import MODELS
from mmengine.runner import Runner
from torch import nn

from swin_dense.workbench.checking import first_step
from swin_dense.workbench.checking.data import check_data
from swin_dense.workbench.configs.experiment import Experiment


@MODELS.register_module()
class RootOfNothing(nn.Module):
    """A loss whose value is finite, but whose gradient is not."""

    loss_name = 'loss_root'

    def __init__(self, **_):
        super().__init__()

    def forward(self, logits, labels, **_):
        return torch.sqrt((logits * 0).sum())


def setting(place, **values):
    """Return a change of an entry of a config."""

    def change(config):
        entry = config
        for key in place.split('.'):
            entry = entry[int(key)] if isinstance(entry, list) else entry[key]
        entry.update(values)

    return change


def without_masks(config):
    (load,) = [step for step in config.train_dataloader.dataset.pipeline if step.type == 'LoadAnnotations']
    load.with_mask = False


OF_DETECTORS = {
    'channels of a head': (
        setting('model.roi_head.bbox_head', in_channels=32),
        r'model.roi_head.bbox_head \(Shared2FCBBoxHead, .*in_channels=32.*\) raises RuntimeError: mat1 and mat2',
    ),
    'channels of a convolution': (
        setting('model.rpn_head', in_channels=32),
        r'model.rpn_head .*in_channels=32.* raises RuntimeError: Given groups=1.*: in_channels must be those of the',
    ),
    'no masks': (without_masks, "has no attribute 'masks'.*: LoadAnnotations needs with_mask=True"),
    'images that are not finite': (
        setting('model.data_preprocessor', std=[0.0, 0.0, 0.0]),
        'not finite; the values of the images are not finite',
    ),
    'bands': (
        setting('model.data_preprocessor', mean=[1.0] * 5, std=[1.0] * 5),
        'the model cannot be built: AssertionError: `mean` should have 1 or 3 values',
    ),
    'classes of one head': (
        setting('model.roi_head.mask_head', num_classes=1),
        r'model.roi_head.mask_head.loss_mask .* raises IndexError.*num_classes of each head must be',
    ),
}
OF_SEGMENTORS = {
    'bands of the preprocessor': (
        setting('model.data_preprocessor', mean=[1.0] * 5, std=[1.0] * 5),
        r'model.data_preprocessor .* raises RuntimeError: The size of tensor a.*: mean and std of model.data_prepro',
    ),
    'weights of classes': (
        setting('model.decode_head.loss_decode', class_weight=[1.0]),
        r'model.decode_head.loss_decode \(CrossEntropyLoss\) raises RuntimeError: weight tensor',
    ),
    'one image': (
        setting('train_dataloader', batch_size=1),
        r'on 1 image of .*model.decode_head .* raises ValueError: Expected more than 1 value.*batch_size=2',
    ),
    'a gradient that is not finite': (
        setting('model.auxiliary_head', loss_decode={'type': 'RootOfNothing'}),
        r'the gradients of \d+ parameters are not finite, such as of model.auxiliary_head \(FCNHead',
    ),
    'a loss that is not finite': (
        setting('model.auxiliary_head.loss_decode', loss_weight=float('inf')),
        r'loss, aux.loss_ce not finite; the first are outputs of model.auxiliary_head.loss_decode .* values from -2',
    ),
}


def error_of(config):
    return '\n'.join(check_data(Experiment(config), ('train',), take_step=True).errors)


@pytest.mark.parametrize(('data', 'table'), [('fruit', OF_DETECTORS), ('roads', OF_SEGMENTORS)])
def test_what_would_end_the_training_is_one_error(request, data, table):
    config = request.getfixturevalue(data).write()
    assert error_of(config) == ''
    for name, (change, message) in table.items():
        changed = copy.deepcopy(config)
        change(changed)
        with pytest.raises(ValueError, match=message):
            raise ValueError(error_of(changed) or f'{name}: no error')


@pytest.mark.parametrize('data', ['fruit', 'roads'])
def test_a_preprocessor_outside_of_the_model_completes_it_as_in_mmengines_runner(request, data):
    config = request.getfixturevalue(data).write()
    config.data_preprocessor = config.model.pop('data_preprocessor')
    assert error_of(config) == ''


def test_a_step_that_takes_long_is_not_taken(roads, monkeypatch):
    config = roads.write()
    change, _ = OF_SEGMENTORS['weights of classes']
    change(config)
    monkeypatch.setattr(first_step, '_SECONDS', 0)
    assert error_of(config) == ''


class Losses(Hook):
    """A hook that keeps the losses of a training."""

    def __init__(self):
        self.seen = []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.seen.append({name: float(loss) for name, loss in outputs.items()})


@pytest.mark.parametrize('data', ['fruit', 'roads'])
def test_the_training_is_the_same_to_the_bit(request, data, tmp_path):
    """As are the running means of normalisations, and the seed that mmengine draws."""
    config = request.getfixturevalue(data).write()
    config.update(work_dir=str(tmp_path / 'run'), val_dataloader=None, val_cfg=None, val_evaluator=None)
    config.randomness = {'seed': None}
    config.train_cfg.pop('val_interval', None)
    config.train_cfg.update({'max_epochs': 1} if data == 'fruit' else {'max_iters': 2})

    def losses(take_step):
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(3)
        assert not check_data(Experiment(config), ('train',), take_step=take_step).errors
        runner, kept = Runner.from_cfg(copy.deepcopy(config)), Losses()
        runner.register_hook(kept)
        runner.train()
        buffers = {name: value.tolist() for name, value in runner.model.named_buffers()}
        return kept.seen, buffers

    assert losses(take_step=True) == losses(take_step=False)

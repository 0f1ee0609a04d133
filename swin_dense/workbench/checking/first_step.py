"""One step of training on a few loaded images before the training begins, so that errors name a setting.

The step is taken by a second model, on the CPU and with random weights. Nothing has to be restored afterwards, and the
losses of the training are the same with and without it.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from mmengine.model import revert_sync_batchnorm
from mmengine.optim import OptimWrapper
from mmengine.registry import MODELS
from mmengine.runner import Runner
from torch import nn

from swin_dense.utils.checks import described
from swin_dense.workbench.building import model_entry
from swin_dense.workbench.checking import hints
from swin_dense.workbench.configs.experiment import Experiment, dicts
from swin_dense.workbench.configs.quietly import random_state_kept, silent

_IMAGES = 2
_SECONDS = 60.0  # more are not spent
_SPEED = 2e10  # operations in a second, of one thread; of a slow processor
_OPERATIONS = 6 / 16**2  # for a parameter and a pixel: forward and backward, of most parameters at a stride of 16
_LARGEST = 1e4  # of weights: larger ones were not initialised
_ANOTHER_DEVICE = ('cpu', 'cuda', 'gpu')  # in errors of operations that have no implementation for the CPU


def check_step(experiment: Experiment, samples: Sequence[Sequence[Any]]) -> None:
    """Take one step of training with loaded images; the default scope of mmengine must be that of the config.

    Nothing is done where the step would take more than about a minute, or where the model cannot be built without its
    weights or this device cannot run it.

    Args:
        experiment: the config.
        samples: for each data set, images as its pipeline returns them.

    Raises:
        ValueError: the step fails, or losses or gradients are not finite; it names the part of the model.
    """
    loader = experiment.config.train_dataloader
    chosen = _chosen(samples, min(_IMAGES, loader.get('batch_size') or _IMAGES))
    with random_state_kept(), silent():
        torch.manual_seed(0)
        try:
            model = _built(model_entry(experiment.config))
        except (OSError, ImportError):  # a part that must be downloaded or installed: mmengine's Runner tells
            return
        except Exception as error:  # of any model
            raise ValueError(f'the model cannot be built: {described(error)}') from error
        if not chosen or _seconds(model, chosen) > _SECONDS:
            return
        in_order = {'type': 'DefaultSampler', 'shuffle': False}
        options = {'dataset': chosen, 'sampler': in_order, 'batch_size': len(chosen), 'num_workers': 0}
        if 'collate_fn' in loader:
            options['collate_fn'] = loader['collate_fn']
        batch = next(iter(Runner.build_dataloader(options)))
        problem = _step(model, batch, experiment.model)
    if problem:
        images = f'{len(chosen)} image{"s" * (len(chosen) > 1)}'
        raise ValueError(f'the first step of training fails on {images} of the training data: {problem}')


def _chosen(samples: Sequence[Sequence[Any]], count: int) -> list[Any]:
    """Return images of all data sets in turn, at least ``count`` where there are so many."""
    turns = [sample[turn] for turn in range(count) for sample in samples if turn < len(sample)]
    return turns[: max(count, len(samples))]


def _built(entry: Any) -> Any:
    """Return a model to train on a CPU, initialised by the framework without files of weights."""
    for part in dicts(entry):
        if 'Pretrained' in str(part.get('init_cfg')):
            part.pop('init_cfg')
        part.pop('pretrained', None)
    model = MODELS.build(entry)
    model.init_weights()
    return revert_sync_batchnorm(model).train()


def _seconds(model: nn.Module, samples: Sequence[Any]) -> float:
    """Return about how long a step takes at most."""
    pixels = sum(image.shape[-2] * image.shape[-1] for image in _tensors([sample['inputs'] for sample in samples]))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return _OPERATIONS * parameters * pixels / (_SPEED * torch.get_num_threads())


def _step(model: Any, batch: Any, entry: Any) -> str:
    """Return why a step of training fails, or ''."""
    is_initialised = all(bool((parameter.abs() < _LARGEST).all()) for parameter in model.parameters())
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    waiting = OptimWrapper(torch.optim.SGD(trained.values(), lr=0.0), accumulative_counts=2)  # keeps the gradients
    try:
        with torch.enable_grad():
            losses = model.train_step(copy.deepcopy(batch), waiting)
    except Exception as error:  # of any model
        return '' if _needs_another_device(error) else _described(error, model, entry)
    infinite = [name for name, loss in losses.items() if not all(map(_is_finite, _tensors(loss)))]
    if infinite and is_initialised:
        return f'{", ".join(infinite)} not finite; {_first_infinite(model, batch, entry)}'
    names = [
        name for name, parameter in trained.items() if parameter.grad is not None and not _is_finite(parameter.grad)
    ]
    if names and is_initialised:
        return f'the gradients of {len(names)} parameters are not finite, such as of {_address(names[-1], entry)}'
    return ''


def _needs_another_device(error: Exception) -> bool:
    words = str(error).lower()
    is_missing = isinstance(error, (ImportError, NotImplementedError, MemoryError))
    return is_missing or (isinstance(error, RuntimeError) and any(device in words for device in _ANOTHER_DEVICE))


def _described(error: Exception, model: nn.Module, entry: Any) -> str:
    """Return an exception, with the innermost part of the model that it passed and the settings of this part."""
    names = {id(module): name for name, module in model.named_modules()}
    passed = [names.get(id(frame.f_locals.get('self'))) for frame, _ in traceback.walk_tb(error.__traceback__)]
    place = next((name for name in reversed(passed) if name), '')
    return f'{_address(place, entry)} raises {described(error)}{hints.hint_on(error, hints.HINTS_ON_STEPS)}'


def _first_infinite(model: nn.Module, batch: Any, entry: Any) -> str:
    """Return the first part of the model with an output that is not finite, of a second step."""
    found: list[str] = []

    def note(name: str) -> Any:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            if not all(map(_is_finite, _tensors(output))):
                found.append(name)

        return look

    handles = [module.register_forward_hook(note(name)) for name, module in model.named_modules() if name]
    with torch.no_grad():
        data = model.data_preprocessor(copy.deepcopy(batch), True)  # type: ignore[operator]
        images = [*_tensors(data.get('inputs') if isinstance(data, dict) else data)]
        if not all(map(_is_finite, images)):
            return 'the values of the images are not finite'
        model(**data, mode='loss') if isinstance(data, dict) else model(*data, mode='loss')
    for handle in handles:
        handle.remove()
    low, high = min(float(image.min()) for image in images), max(float(image.max()) for image in images)
    first = f'the first are outputs of {_address(found[0], entry)}' if found else 'all outputs of its parts are finite'
    return f'{first}; the images have values from {low:.3g} to {high:.3g}'


def _address(name: str, entry: Any) -> str:
    """Return the address of a part of the model in the config, by the name of its module, with its own settings."""
    address = 'model'
    for key in name.split('.'):
        if isinstance(entry, dict) and isinstance(entry.get(key), (dict, list)):
            entry = entry[key]
        elif isinstance(entry, (list, tuple)) and key.isdigit() and int(key) < len(entry):
            entry = entry[int(key)]
        else:
            break
        address += f'.{key}'
    if not isinstance(entry, dict):
        return address
    settings = [f'{key}={value}' for key, value in entry.items() if _is_number(value)]
    return f'{address} ({", ".join([str(entry.get("type")), *settings])})'


def _is_number(value: Any) -> bool:
    values = value if isinstance(value, (list, tuple)) else [value]
    return bool(values) and all(type(item) is int for item in values)


def _is_finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of nested dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)

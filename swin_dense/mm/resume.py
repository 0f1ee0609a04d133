"""Fit the state of the optimiser in a training checkpoint to a model with other frozen parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mmengine.hooks import Hook
from mmengine.logging import print_log
from torch import Tensor, nn

from swin_dense.checkpoint import CheckpointError
from swin_dense.models.swin import SwinBackbone
from swin_dense.utils import private_mm
from swin_dense.utils.names import unwrapped_module


class ResumeError(CheckpointError):
    """A training cannot be resumed with another model or optimiser."""


class ResumeOptimizer(Hook):
    """Fit the state of the optimiser in a checkpoint to a model with other frozen parameters, when it is resumed.

    mmengine's constructors give the optimiser no frozen parameters. A SwinTransformer freezes its stages after that,
    ``SwinDense`` before, so their optimisers have different groups; so do those of runs with other ``frozen_stages``.
    The state of parameters that are trained in both runs is kept; that of others is left out or begins anew.
    `swin-dense train --resume` adds this hook; with the tools of mmdet and mmseg, add it to the config::

        custom_hooks = [dict(type='ResumeOptimizer')]

    Raises:
        ResumeError: the checkpoint has the state of another optimiser or of another model.
    """

    def after_load_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        optimizer = getattr(runner.optim_wrapper, 'optimizer', None)
        saved = checkpoint.get('optimizer') or {}
        indices = [index for group in saved.get('param_groups', ()) for index in group['params']]
        # Several optimisers have no groups of parameters here, and sharded ones no indices.
        has_indices = all(isinstance(index, int) for index in indices or [None])
        if not private_mm.is_resuming(runner) or optimizer is None or not has_indices:
            return
        model = unwrapped_module(runner.model)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        groups = [[names.get(id(parameter), '') for parameter in group['params']] for group in optimizer.param_groups]
        before = _saved_names(saved, model, [name for group in groups for name in group])
        _check_shapes(saved, before, dict(model.named_parameters()))
        if [[before[index] for index in group['params']] for group in saved['param_groups']] == groups:
            return
        _fit(checkpoint, before, groups, optimizer.state_dict()['param_groups'])
        added = [name for group in groups for name in group if name not in before.values()]
        print_log(
            f'The optimiser of the checkpoint has {len(before)} parameters, that of this training '
            f'{sum(map(len, groups))}, because others are frozen. {len(added)} have no state in the checkpoint and '
            'begin anew',
            'current',
        )


def _saved_names(saved: dict[str, Any], model: nn.Module, current: list[str]) -> dict[int, str]:
    """Return the names of the parameters of a saved optimiser, by their indices in it."""
    groups = saved['param_groups']
    indices = [index for group in groups for index in group['params']]
    if all('param_names' in group for group in groups):
        named = [name for group in groups for name in group['param_names']]
        return dict(zip(indices, named, strict=True))
    # mmengine orders them as the model does, without those that were frozen.
    parameters = dict(model.named_parameters())
    same_number = [names for names in (current, *_trained_sets(model)) if len(names) == len(indices)]
    for names in same_number:
        shapes = (_shape(saved, index) for index in indices)
        if all(shape in (None, parameters[name].shape) for shape, name in zip(shapes, names, strict=True)):
            return dict(zip(indices, names, strict=True))
    if same_number:
        return dict(zip(indices, same_number[0], strict=True))
    raise ResumeError(
        f'The optimiser of the checkpoint has {len(indices)} parameters in {len(groups)} groups, that of the config '
        f'{len(current)}, which no other frozen_stages explains: it is of another model or optim_wrapper. {_INSTEAD}'
    )


_INSTEAD = (
    'To go on with its weights and a new optimiser and schedule, leave --resume out and give the checkpoint as '
    'load_from: --set load_from=CHECKPOINT; or resume with the settings of the run that wrote it'
)


def _trained_sets(model: nn.Module) -> Iterator[list[str]]:
    """Yield the names of the parameters that are trained if a Swin freezes nothing, its embedding, one stage, ..."""
    backbones = {name: module for name, module in model.named_modules() if isinstance(module, SwinBackbone)}
    owned = {
        f'{prefix}.{name}' if prefix else name: name
        for prefix, backbone in backbones.items()
        for name, _ in backbone.named_parameters()
    }
    others = {name for name, parameter in model.named_parameters() if name not in owned and not parameter.requires_grad}
    for frozen in range(-1, 1 + max((len(backbone.stages) for backbone in backbones.values()), default=-1)):
        starts: Sequence[str] = ('patch_embed.', 'absolute_pos_embed') if frozen >= 0 else ()
        starts = (*starts, *(f'{part}{stage}.' for stage in range(frozen) for part in ('stages.', 'norm')))
        yield [
            name
            for name, _ in model.named_parameters()
            if name not in others and not owned.get(name, '').startswith(tuple(starts))
        ]


def _shape(saved: dict[str, Any], index: int) -> Any:
    """Return the shape of the momentum of a parameter, or None if it has no momentum, as if it was frozen."""
    tensors = [value for value in saved['state'].get(index, {}).values() if isinstance(value, Tensor) and value.dim()]
    return tensors[0].shape if tensors else None


def _check_shapes(saved: dict[str, Any], names: dict[int, str], parameters: dict[str, nn.Parameter]) -> None:
    for index, name in names.items():
        shape = _shape(saved, index)
        if name in parameters and shape not in (None, parameters[name].shape):
            raise ResumeError(
                f'The optimiser of the checkpoint has a momentum of the shape {tuple(shape)} for {name}, which has '
                f'{tuple(parameters[name].shape)} in the model of the config, as with another window_size. {_INSTEAD}'
            )


def _fit(checkpoint: dict[str, Any], before: dict[int, str], groups: list[list[str]], current: list[Any]) -> None:
    """Change the state of the optimiser and the schedules in a checkpoint in place, to those of the current groups."""
    saved = checkpoint['optimizer']
    index_of = {name: index for index, name in before.items()}
    group_of = {
        before[index]: number for number, group in enumerate(saved['param_groups']) for index in group['params']
    }
    first = saved['param_groups'][0]
    progress = first['lr'] / first['initial_lr'] if first.get('initial_lr') else 1.0
    sources: list[int | None] = []
    state, fitted = {}, []
    for names, own in zip(groups, current, strict=True):
        source = next((group_of[name] for name in names if name in group_of), None)
        sources.append(source)
        if source is None:  # trained for the first time, at the rate to which the schedule has come
            settings = {**own, 'lr': own.get('initial_lr', own['lr']) * progress}
        else:
            settings = {key: saved['param_groups'][source].get(key, value) for key, value in own.items()}
        described = {key: own[key] for key in ('params', 'param_names') if key in own}
        fitted.append({**settings, **described})
        for index, name in zip(own['params'], names, strict=True):
            if index_of.get(name) in saved['state']:
                state[index] = saved['state'][index_of[name]]
    count = len(saved['param_groups'])
    saved['state'], saved['param_groups'] = state, fitted
    by_group = list(zip(sources, fitted, strict=True))
    schedules = checkpoint.get('param_schedulers') or []
    for schedule in schedules if isinstance(schedules, list) else []:
        for key, fallback in (('base_values', 'initial_lr'), ('_last_value', 'lr')):
            values = schedule.get(key)
            if isinstance(values, list) and len(values) >= count:
                kept = [group[fallback] if source is None else values[source] for source, group in by_group]
                schedule[key] = kept + values[count:]  # mmengine adds the settings of no group, which it logs

"""The length of a training and the schedules of its learning rate, which must end together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

from mmengine.optim.scheduler.param_scheduler import INF

from swin_dense.workbench.configs.experiment import Experiment

_UNITS = {'max_epochs': ('epochs', '--epochs'), 'max_iters': ('iterations', '--iters')}
# Schedules that follow from their options alone, without the ending LR or Momentum of their names.
_PLANNED = (
    *('Constant', 'CosineAnnealing', 'CosineRestart', 'Exponential', 'Linear', 'MultiStep', 'OneCycle', 'Poly'),
    *('QuadraticWarmup', 'Step'),
)
# Those that reach their last value in their last step, so that a single step would keep the first value for good.
_NEED_TWO_STEPS = ('Constant', 'Linear')
# Those that end at the learning rate of the optimiser, which a training may keep afterwards.
_WARM_UPS = ('Constant', 'Linear', 'QuadraticWarmup')
# Options that count epochs or iterations.
_OF_LOOP = ('val_begin', 'val_interval')
_OF_CHECKPOINT = ('interval', 'save_begin')
_OF_HOOKS = ('begin_epoch', 'begin_iter', 'num_last_epochs', 'switch_epoch')


def set_length(experiment: Experiment, epochs: int | None, iters: int | None) -> None:
    """Change the length of the training in place, with all that the config counts in epochs or iterations.

    These are the schedules of ``param_scheduler``, warm-up included, the intervals of validation and checkpoints, and
    the epochs at which hooks begin. Counts are rounded; a warm-up of less than two steps is left out.

    Raises:
        ValueError: the length is less than 1 or in the unit that the config does not use, or a schedule has no plan
            that could be scaled.
    """
    given = {'max_epochs': epochs, 'max_iters': iters}
    key, new = next((key, value) for key, value in given.items() if value is not None)
    if None not in given.values():
        raise ValueError('--epochs and --iters are two lengths of one training; give one')
    length = _length(experiment)
    if length is None:
        raise ValueError(f'{_UNITS[key][1]} needs train_cfg with max_epochs or max_iters in the config')
    if length[0] != key:
        unit, option = _UNITS[length[0]]
        raise ValueError(f'the config trains for {length[1]} {unit}; give {option} instead of {_UNITS[key][1]}')
    if new < 1:
        raise ValueError(f'{_UNITS[key][1]} must be at least 1, got {new}')
    ratio = Fraction(new, length[1])

    def scaled(count: int) -> int:
        return round(count * ratio)

    config = experiment.config
    checkpoint = (config.get('default_hooks') or {}).get('checkpoint') or {}
    counted: list[tuple[Any, tuple[str, ...]]] = [(config.train_cfg, _OF_LOOP), (checkpoint, _OF_CHECKPOINT)]
    counted += [(hook, _OF_HOOKS) for hook in config.get('custom_hooks') or []]
    for part, names in counted:
        for name in names:
            if part.get(name, -1) > 0:  # CheckpointHook counts -1 as never
                part[name] = max(1, scaled(part[name]))
    intervals = config.train_cfg.get('dynamic_intervals')
    if intervals:
        config.train_cfg.dynamic_intervals = [(scaled(start), max(1, scaled(every))) for start, every in intervals]
    config.train_cfg[key] = new
    for place, schedules in _lists(experiment):
        place[schedules] = [
            schedule for schedule in _listed(place[schedules]) if _scale(schedule, length[1], ratio, scaled)
        ]


def notes_on_schedule(experiment: Experiment) -> list[str]:
    """Return a note if the schedules of the learning rate do not end where the training ends."""
    length = _length(experiment)
    if length is None:
        return []
    key, total = length
    unit, option = _UNITS[key]
    schedules = [one for place, name in _lists(experiment) for one in _listed(place[name])]
    # The length of an epoch is not known, so only schedules in the unit of the training are compared.
    same = [one for one in schedules if one.get('by_epoch', True) == (key == 'max_epochs')]
    last, name = max(((_end(one, total), _name(one)) for one in same), default=(total, ''))
    if last == total or (last < total and name in _WARM_UPS):
        return []
    if last > total:
        what = f'so that it follows {100 * total / last:.2g} % of its schedule only'
    else:
        what = f'so that it stays at its last value for {total - last} {unit}'
    return [
        f'the schedule of the learning rate ends after {last} {unit}, but the training after {total}, {what}; '
        f'`swin-dense config CONFIG {option} {total}` scales the schedule of a recipe with its training'
    ]


def _length(experiment: Experiment) -> tuple[str, int] | None:
    """Return the key of the length of the training, 'max_epochs' or 'max_iters', and the length."""
    train = experiment.config.get('train_cfg') or {}
    return next(((key, train[key]) for key in _UNITS if isinstance(train.get(key), int)), None)


def _lists(experiment: Experiment) -> Iterator[tuple[Any, str]]:
    """Yield the places of lists of schedules: one, or one for each of several optimisers."""
    schedules = experiment.config.get('param_scheduler')
    if isinstance(schedules, dict) and 'type' not in schedules:
        yield from ((schedules, name) for name in schedules)
    elif schedules:
        yield experiment.config, 'param_scheduler'


def _listed(schedules: Any) -> list[Any]:
    return [schedules] if isinstance(schedules, dict) else list(schedules)


def _name(schedule: Any) -> str:
    return str(schedule['type']).rpartition('.')[2].removesuffix('LR').removesuffix('Momentum')


def _end(schedule: Any, total: int) -> int:
    """Return the step after which a schedule changes nothing: its end, or that of the training if it has none."""
    end = schedule.get('end') or INF
    return end if end < INF else max(total, *schedule.get('milestones', [0]))


def _scale(schedule: Any, total: int, ratio: Fraction, scaled: Callable[[int], int]) -> bool:
    """Scale a schedule in place, and return whether it has enough steps to be kept."""
    name = _name(schedule)
    if name not in _PLANNED:
        raise ValueError(
            f'the schedule {schedule["type"]} of param_scheduler cannot be scaled, because it does not follow from its '
            'options alone; set the length with --set train_cfg.max_epochs=N (or max_iters=N) and write the schedule '
            'into the config'
        )
    begin = schedule.get('begin', 0)
    end = min(schedule.get('end') or INF, INF)
    length = (total if end == INF else end) - begin
    for key in ('begin', 'end', 'T_max', 'total_steps'):
        if (schedule.get(key) or INF) < INF:
            schedule[key] = scaled(schedule[key])
    if name == 'Exponential':
        schedule.gamma = schedule.gamma ** float(1 / ratio)
    if name == 'MultiStep':
        schedule.milestones = [scaled(milestone) for milestone in schedule.milestones]
    if name == 'Step':
        # Each step is rounded, instead of a step size whose error would add up.
        steps = range(schedule.step_size, length, schedule.pop('step_size'))
        schedule.type = str(schedule.type).replace('Step', 'MultiStep')
        schedule.milestones = [scaled(step) for step in steps]
    if name == 'CosineRestart':
        ends = [0, *(scaled(step) for step in itertools.accumulate(schedule.periods))]
        schedule.periods = [after - before for before, after in itertools.pairwise(ends)]
        if min(schedule.periods) < 1:
            raise ValueError(f'the training is too short for the periods of {schedule["type"]}; remove some')
    left = scaled(begin + length) - scaled(begin)
    return left >= (2 if name in _NEED_TWO_STEPS else 1)

"""The length of a training and the schedules of its learning rate, which must end together."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any

from mmengine.dist import get_world_size
from mmengine.optim.scheduler.param_scheduler import INF

from swin_dense.workbench.configs.experiment import Experiment

_UNITS = {'max_epochs': ('epochs', '--epochs'), 'max_iters': ('iterations', '--iters')}
_VAL_INTERVALS = {'max_epochs': 1, 'max_iters': 1000}  # the defaults of mmengine's loops
# Schedules that follow from their options, without the ending LR or Momentum of their names.
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
    if epochs is not None and iters is not None:
        raise ValueError('--epochs and --iters are two lengths of one training; give one')
    key, new = ('max_epochs', epochs) if iters is None else ('max_iters', iters)
    assert new is not None, 'one of both is given'
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
        config.train_cfg.dynamic_intervals = []
        for start, every in intervals:
            interval = max(1, scaled(every))
            config.train_cfg.dynamic_intervals.append((scaled(start), interval))
    config.train_cfg[key] = new
    for place, schedules in _lists(experiment):
        kept = []
        for schedule in _listed(place[schedules]):
            if _scale(schedule, length[1], ratio, scaled):
                kept.append(schedule)
        place[schedules] = kept


def described_schedule(experiment: Experiment) -> str:
    """Return the length of the training, its validation and its learning rate in a line; '' if it has no length."""
    length = _length(experiment)
    if length is None:
        return ''
    config = experiment.config
    key, total = length
    unit = _UNITS[key][0]
    parts = [f'{total} {unit}']
    if config.get('val_dataloader'):
        interval = config.train_cfg.get('val_interval', _VAL_INTERVALS[key])
        how_often = f'every {interval:.0f} {unit}' if interval > 1 else f'after each {unit[:-1]}'
        parts.append(f'validation {how_often}')
    optimizer = (config.get('optim_wrapper') or {}).get('optimizer') or {}
    if 'lr' in optimizer:
        parts.append(f'learning rate {optimizer["lr"]:g} ({optimizer.get("type")})')
    for _, schedule in _addressed(experiment):
        counted = 'epochs' if schedule.get('by_epoch', True) else 'iterations'
        begin = schedule.get('begin') or 0
        end = schedule.get('end') or INF
        if _is_warm_up(schedule):
            parts.append(f'warm-up of {end} {counted}')
        elif 'milestones' in schedule:
            milestones = ', '.join(map(str, schedule['milestones']))
            parts.append(f'multiplied by {schedule.get("gamma", 0.1):g} after {milestones} {counted}')
        else:
            until = 'the end' if end >= INF else end
            parts.append(f'{_name(schedule)} from {begin} to {until} {counted}')
    return ', '.join(parts)


def notes_on_schedule(experiment: Experiment, used_images: Mapping[str, int] = {}) -> list[str]:
    """Return notes on schedules of the learning rate that do not end with the training, and on too long warm-ups.

    And on a learning rate that is scaled for other batches than those of the training. A warm-up in iterations can be
    compared with a length in epochs only with ``used_images``, of a check of the data.
    """
    notes = _notes_on_scaling(experiment)
    length = _length(experiment)
    if length is None:
        return notes
    iterations = _iterations(experiment, used_images)
    warm_ups = _too_long(experiment, iterations)
    for address, warm_up in warm_ups.items():
        notes.append(
            f'the warm-up of the learning rate ends after {warm_up.end} iterations, but the training after '
            f'{iterations}, so that it never reaches the full learning rate; --set {address}.end={_tenth(iterations)} '
            'shortens the warm-up to a tenth of the training'
        )
    key, total = length
    unit, option = _UNITS[key]
    ends = []
    for address, schedule in _addressed(experiment):
        if address in warm_ups or schedule.get('by_epoch', True) != (key == 'max_epochs'):
            continue
        # The step after which it changes nothing.
        end = schedule.get('end') or INF
        if end >= INF:
            end = max(total, *schedule.get('milestones', [0]))
        ends.append((end, _name(schedule), address))
    last, name, address = max(ends, default=(total, '', ''))
    if last == total or (last < total and name in _WARM_UPS):
        return notes
    if last > total:
        what = f'so that it follows {100 * total / last:.2g} % of its schedule only'
    else:
        what = f'so that it stays at its last value for {total - last} {unit}'
    notes.append(
        f'the schedule of the learning rate ends after {last} {unit}, but the training after {total}, {what}; '
        f'change {address} in the config, or write a recipe anew with `swin-dense config RECIPE {option} {total}`, '
        'which scales its schedule with its training'
    )
    return notes


def _notes_on_scaling(experiment: Experiment) -> list[str]:
    """Return a note if mmengine scales the learning rate without the iterations whose gradients are accumulated."""
    config = experiment.config
    scaling = config.get('auto_scale_lr') or {}
    iterations = (config.get('optim_wrapper') or {}).get('accumulative_counts', 1)
    batch_size = (config.get('train_dataloader') or {}).get('batch_size')
    if not scaling.get('enable') or iterations == 1 or not isinstance(batch_size, int):
        return []
    images = batch_size * get_world_size()
    base = scaling['base_batch_size']
    return [
        f'the learning rate is scaled by {images} / {base}, the images of an iteration and '
        f'auto_scale_lr.base_batch_size, but with optim_wrapper.accumulative_counts={iterations} a step has '
        f'{iterations * images} images; if the rate in the config is for steps of {base} images, --set '
        f'auto_scale_lr.base_batch_size={base / iterations:g}'
    ]


def shorten_warm_up(experiment: Experiment, used_images: Mapping[str, int]) -> None:
    """Shorten a warm-up that is longer than the training to a tenth of the training; see :func:`notes_on_schedule`."""
    iterations = _iterations(experiment, used_images)
    for warm_up in _too_long(experiment, iterations).values():
        warm_up.end = _tenth(iterations)


def _tenth(iterations: int) -> int:
    return max(2, iterations // 10)


def _too_long(experiment: Experiment, iterations: int) -> dict[str, Any]:
    """Return the warm-ups, counted in iterations, that are longer than a training, by their addresses for `--set`."""
    found = {}
    for address, schedule in _addressed(experiment):
        is_by_epoch = schedule.get('by_epoch', True)
        if _is_warm_up(schedule) and not is_by_epoch and iterations < schedule.end:
            found[address] = schedule
    return found


def _is_warm_up(schedule: Any) -> bool:
    """Return whether a schedule begins with the training and ends at the learning rate of the optimiser."""
    ends_at_full_rate = _name(schedule) in _WARM_UPS and schedule.get('end_factor', 1) == 1
    return ends_at_full_rate and not schedule.get('begin') and (schedule.get('end') or INF) < INF


def _iterations(experiment: Experiment, used_images: Mapping[str, int]) -> int:
    """Return the iterations of a training by the processes that run now; ``INF`` if they are not known.

    The length of an epoch is known with ``used_images``.
    """
    length = _length(experiment)
    if length is None:
        return INF
    key, count = length
    if key == 'max_iters':
        return count
    loader = experiment.config.get('train_dataloader') or {}
    images = _images(experiment, loader.get('dataset'), used_images)
    batch_size = loader.get('batch_size')
    if images is None or not isinstance(batch_size, int):
        return INF
    of_process = math.ceil(images / get_world_size())
    batches = of_process // batch_size if loader.get('drop_last') else math.ceil(of_process / batch_size)
    return count * batches


def _images(experiment: Experiment, entry: Any, used_images: Mapping[str, int]) -> int | None:
    """Return the number of images that a data set, or a wrapper of data sets, has in an epoch; None if not known."""
    for data in experiment.datasets_of(['train']):
        if data.entry is entry:
            return used_images.get(data.address)
    kind = entry.get('type') if isinstance(entry, dict) else None
    if kind in ('RepeatDataset', 'MultiImageMixDataset'):
        inside = _images(experiment, entry.dataset, used_images)
        times = entry.get('times', 1)
        return None if inside is None else inside * times
    if kind == 'ConcatDataset':
        counts = [_images(experiment, part, used_images) for part in entry.datasets]
        known = [count for count in counts if count is not None]
        return sum(known) if len(known) == len(counts) else None
    return None


def _length(experiment: Experiment) -> tuple[str, int] | None:
    """Return the key of the length of the training, 'max_epochs' or 'max_iters', and the length."""
    train = experiment.config.get('train_cfg') or {}
    for key in _UNITS:
        if isinstance(train.get(key), int):
            return key, train[key]
    return None


def _lists(experiment: Experiment) -> Iterator[tuple[Any, str]]:
    """Yield the places of lists of schedules: one, or one for each of several optimisers."""
    schedules = experiment.config.get('param_scheduler')
    if isinstance(schedules, dict) and 'type' not in schedules:
        yield from ((schedules, name) for name in schedules)
    elif schedules:
        yield experiment.config, 'param_scheduler'


def _addressed(experiment: Experiment) -> Iterator[tuple[str, Any]]:
    """Yield the schedules with their addresses for `--set`."""
    for place, name in _lists(experiment):
        address = name if place is experiment.config else f'param_scheduler.{name}'
        is_alone = isinstance(place[name], dict)
        for index, schedule in enumerate(_listed(place[name])):
            yield address if is_alone else f'{address}.{index}', schedule


def _listed(schedules: Any) -> list[Any]:
    return [schedules] if isinstance(schedules, dict) else list(schedules)


def _name(schedule: Any) -> str:
    name = str(schedule['type']).rpartition('.')[2]
    return name.removesuffix('LR').removesuffix('Momentum')


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

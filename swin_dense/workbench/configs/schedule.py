"""The length of a training and the schedules of its learning rate, which must end together."""

from __future__ import annotations

import copy
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from mmengine.config import Config
from mmengine.dataset import BaseDataset
from mmengine.optim.scheduler.param_scheduler import INF
from mmengine.registry import PARAM_SCHEDULERS
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop, Runner

from swin_dense.utils.checks import described
from swin_dense.workbench.configs.entries import walk
from swin_dense.workbench.configs.experiment import Experiment
from swin_dense.workbench.configs.quietly import quiet

_UNITS = {'max_epochs': ('epochs', '--epochs'), 'max_iters': ('iterations', '--iters')}
# Schedules that follow from their options, without the ending LR or Momentum of their names.
_PLANNED = (
    *('Constant', 'CosineAnnealing', 'CosineRestart', 'Exponential', 'Linear', 'MultiStep', 'OneCycle', 'Poly'),
    *('QuadraticWarmup', 'Step'),
)
# Those that reach their last value in their last step, so that a single step would keep the first value for good.
_NEED_TWO_STEPS = ('Constant', 'Linear')
# Options that count epochs or iterations.
_OF_LOOP = ('val_begin', 'val_interval')
_OF_CHECKPOINT = ('interval', 'save_begin')
_OF_HOOKS = ('begin_epoch', 'begin_iter', 'num_last_epochs', 'switch_epoch')
_TOLERANCE = 0.01  # share of a learning rate, and of a training
_EPOCH_LENGTH = 100  # iterations, to step schedules that mmengine converts to iterations


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
    too_short = [
        id(schedule) for _, schedule in _schedules(experiment) if not _scale(schedule, length[1], ratio, scaled)
    ]
    for _, part in walk(config.get('param_scheduler')):
        if isinstance(part, list):
            part[:] = [schedule for schedule in part if id(schedule) not in too_short]


class Stepped(NamedTuple):
    """A schedule that mmengine has built and stepped to its end.

    Attributes:
        address: its place for `--set`.
        entry: its config.
        unit: 'epochs' or 'iterations', the steps that it counts.
        rates: before its first step and after each, relative to the rate of the optimizer.
        total: the number of steps that the training gives it; ``INF`` if it is not known.
    """

    address: str
    entry: Any
    unit: str
    rates: list[float]
    total: int

    @property
    def end(self) -> int:
        """The step after which nothing changes; without an end of its own, a schedule ends with the training."""
        if self.entry.get('end', INF) < INF:
            return len(self.rates) - 1
        return max(self.total, *self.entry.get('milestones', [0]))

    @property
    def is_full(self) -> bool:
        """Whether it ends at the rate of the optimizer."""
        return math.isclose(self.rates[-1], 1, rel_tol=_TOLERANCE)

    @property
    def is_warm_up(self) -> bool:
        """Whether it rises to the rate of the optimizer from the start of the training."""
        return not self.entry.get('begin') and self.rates[0] < self.rates[-1] and self.is_full


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
        loop = EpochBasedTrainLoop if key == 'max_epochs' else IterBasedTrainLoop
        default = inspect.signature(loop).parameters['val_interval'].default
        interval = config.train_cfg.get('val_interval', default)
        how_often = f'every {interval:.0f} {unit}' if interval > 1 else f'after each {unit[:-1]}'
        parts.append(f'validation {how_often}')
    optimizer = (config.get('optim_wrapper') or {}).get('optimizer') or {}
    if 'lr' in optimizer:
        parts.append(f'learning rate {optimizer["lr"]:g} ({optimizer.get("type")})')
    for schedule in _stepped(experiment):
        if schedule.is_warm_up:
            parts.append(f'warm-up of {schedule.end} {schedule.unit}')
        elif 'milestones' in schedule.entry:
            # Those at the end of a short training change nothing.
            milestones = [str(step) for step in schedule.entry['milestones'] if step < schedule.total]
            if milestones:
                after = f'{" and ".join(milestones)} {schedule.unit}'
                parts.append(f'multiplied by {schedule.entry.get("gamma", 0.1):g} after {after}')
        else:
            until = schedule.entry.get('end') or 'the end'
            parts.append(f'{_name(schedule.entry)} from {schedule.entry.get("begin", 0)} to {until} {schedule.unit}')
    return ', '.join(parts)


def notes_on_schedule(experiment: Experiment, used_images: Mapping[str, int] = {}, processes: int = 1) -> list[str]:
    """Return notes on schedules of the learning rate that do not fit the length of the training.

    And on a learning rate that is scaled for other batches than those of the training. Iterations can be compared with
    a length in epochs only with ``used_images``, of a check of the data. ``processes`` train together.

    Raises:
        ValueError: a schedule cannot be built, or fails at a step.
    """
    notes = _notes_on_scaling(experiment, processes)
    length = _length(experiment)
    if length is None:
        return notes
    others = []
    for schedule in _stepped(experiment, used_images, processes):
        if schedule.is_warm_up and schedule.end > schedule.total > 0:
            notes.append(
                f'the warm-up of the learning rate ends after {schedule.end} {schedule.unit}, but the training after '
                f'{schedule.total}, so that it never reaches the full learning rate; --set '
                f'{schedule.address}.end={_tenth(schedule.total)} shortens the warm-up to a tenth of the training'
            )
        elif schedule.total == 0:
            notes.append(
                f'{schedule.address} ({schedule.entry.type}) counts epochs, but the training counts iterations, so '
                f'that the learning rate keeps its first value; --set {schedule.address}.by_epoch=False, and give its '
                'numbers in iterations'
            )
        elif schedule.total < INF:
            others.append(schedule)
    last = max(others, key=lambda schedule: Fraction(schedule.end, schedule.total), default=None)
    if last is None or math.isclose(last.end, last.total, rel_tol=_TOLERANCE):
        return notes
    if last.end > last.total:
        what = f'so that it follows {100 * last.total / last.end:.2g} % of its schedule only'
    elif last.is_full:
        return notes
    else:
        what = f'so that it stays at its last value for {last.total - last.end} {last.unit}'
    key, count = length
    notes.append(
        f'the schedule of the learning rate ends after {last.end} {last.unit}, but the training after {last.total}, '
        f'{what}; change {last.address} in the config, or write a recipe anew with `swin-dense config RECIPE '
        f'{_UNITS[key][1]} {count}`, which scales its schedule with its training'
    )
    return notes


def _notes_on_scaling(experiment: Experiment, processes: int) -> list[str]:
    """Return a note if mmengine scales the learning rate without the iterations whose gradients are accumulated."""
    config = experiment.config
    scaling = config.get('auto_scale_lr') or {}
    iterations = (config.get('optim_wrapper') or {}).get('accumulative_counts', 1)
    batch_size = (config.get('train_dataloader') or {}).get('batch_size')
    if not scaling.get('enable') or iterations == 1 or not isinstance(batch_size, int):
        return []
    images = batch_size * processes
    base = scaling['base_batch_size']
    return [
        f'the learning rate is scaled by {images} / {base}, the images of an iteration and '
        f'auto_scale_lr.base_batch_size, but with optim_wrapper.accumulative_counts={iterations} a step has '
        f'{iterations * images} images; if the rate in the config is for steps of {base} images, --set '
        f'auto_scale_lr.base_batch_size={base / iterations:g}'
    ]


def shorten_warm_up(experiment: Experiment, used_images: Mapping[str, int]) -> None:
    """Shorten a warm-up that is longer than the training to a tenth of the training; see :func:`notes_on_schedule`."""
    for schedule in _stepped(experiment, used_images):
        if schedule.is_warm_up and schedule.end > schedule.total > 0:
            schedule.entry.end = _tenth(schedule.total)


def _tenth(count: int) -> int:
    return max(2, count // 10)


def _stepped(experiment: Experiment, used_images: Mapping[str, int] = {}, processes: int = 1) -> Iterator[Stepped]:
    """Yield the schedules, each stepped on an optimizer of its own."""
    length = _length(experiment)
    epochs = length[1] if length and length[0] == 'max_epochs' else 0
    iterations = _iterations(experiment, used_images, processes)
    for address, entry in _schedules(experiment):
        by_epoch = entry.get('by_epoch', True)
        every = _EPOCH_LENGTH if entry.get('convert_to_iter_based') else 1
        total = epochs if by_epoch else iterations
        if not epochs and every > 1:  # epochs of a length that is not known
            total = INF
        rates: list[float] = []
        try:
            with experiment.in_scope(), quiet():
                optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
                options = {'optimizer': optimizer, 'epoch_length': every, 'end': total or 1}
                built = PARAM_SCHEDULERS.build(copy.deepcopy(entry), default_args=options)
                last = built.end if built.end < INF else 0
                for _ in range(last + 1):
                    rates.append(built.get_last_value()[0] / built.base_values[0])
                    built.step()
        except Exception as error:  # of any schedule
            if len(rates) <= total * every:  # else the training ends before
                where = f'fails after {len(rates) // every} of {total} steps' if rates else 'cannot be built'
                raise ValueError(f'{address} ({entry.get("type")}) {where} ({described(error)})') from error
        yield Stepped(address, entry, 'epochs' if by_epoch else 'iterations', rates[::every], total)


def _iterations(experiment: Experiment, used_images: Mapping[str, int], processes: int) -> int:
    """Return the iterations of a training by some processes; ``INF`` if they are not known.

    mmengine's own data loader says how many batches an epoch has, around data sets of as many images as are used.
    """
    length = _length(experiment)
    if length is None or length[0] == 'max_iters':
        return length[1] if length else INF
    training = Experiment(Config(copy.deepcopy(experiment.config.to_dict())))
    for data in training.datasets_of(['train']):
        if data.address not in used_images:
            return INF
        data.entry.clear()
        data.entry.update(type=StandIn, count=used_images[data.address])
    loader = training.config.train_dataloader
    loader.update(num_workers=0, persistent_workers=False)
    try:
        with experiment.in_scope(), quiet():
            return length[1] * math.ceil(len(Runner.build_dataloader(loader)) / processes)
    except Exception:  # of any sampler or wrapper of data sets, which may need more than a number of images
        return INF


class StandIn(BaseDataset):
    """A data set of a number of images, without any file."""

    def __init__(self, count: int) -> None:
        self.count = count
        super().__init__()

    def load_data_list(self) -> list[dict[str, Any]]:
        return [{} for _ in range(self.count)]


def _length(experiment: Experiment) -> tuple[str, int] | None:
    """Return the key of the length of the training, 'max_epochs' or 'max_iters', and the length."""
    train = experiment.config.get('train_cfg') or {}
    for key in _UNITS:
        if isinstance(train.get(key), int):
            return key, train[key]
    return None


def _schedules(experiment: Experiment) -> list[tuple[str, Any]]:
    """Return the schedules, of one optimizer or of several, with their addresses for `--set`."""
    parts = walk(experiment.config.get('param_scheduler'), 'param_scheduler')
    return [(address, part) for address, part in parts if isinstance(part, dict) and 'type' in part]


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

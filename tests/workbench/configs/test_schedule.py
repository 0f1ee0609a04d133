"""`swin-dense config --epochs N` and `--iters N`: the learning rate of the written config, as mmengine computes it."""

import copy
import logging
import re
from types import SimpleNamespace

import pytest
import torch
from mmengine.config import Config
from mmengine.optim import OptimWrapper
from mmengine.registry import PARAM_SCHEDULERS, init_default_scope
from mmengine.runner import Runner

from swin_dense.commands._main import main
from swin_dense.workbench.configs.experiment import Experiment
from swin_dense.workbench.configs.schedule import notes_on_schedule, set_length
from swin_dense.workbench.configs.settings import merge_settings
from swin_dense.workbench.recipes.files import load_recipe, recipe_names
from tests.conftest import some
from tests.workbench.configs.data import written

DETECTOR = 'mask-rcnn_swin-t-p4-w7_fpn_1x_coco'
SEGMENTOR = 'swin-tiny-patch4-window7-in1k-pre_upernet_8xb2-160k_ade20k-512x512'
PER_EPOCH = 40  # iterations


def rates(config, per_epoch=PER_EPOCH):
    """Return the learning rate in each iteration, by mmengine's schedulers."""
    init_default_scope(config.get('default_scope', 'mmengine'))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedules = config.get('param_scheduler')
    built = []
    for schedule in [schedules] if isinstance(schedules, dict) else schedules:
        options = dict(schedule)
        if options.pop('convert_to_iter_based', False):
            kind = PARAM_SCHEDULERS.get(options.pop('type'))
            built.append(kind.build_iter_from_epoch(optimizer=optimizer, epoch_length=per_epoch, **options))
        else:
            built.append(PARAM_SCHEDULERS.build(options, default_args={'optimizer': optimizer}))
    epochs = config.train_cfg.get('max_epochs')
    found = []
    for step in range(1, (epochs * per_epoch if epochs else config.train_cfg.max_iters) + 1):
        found.append(optimizer.param_groups[0]['lr'])
        optimizer.step()
        for one in built:
            if not one.by_epoch or (epochs and step % per_epoch == 0):
                one.step()
    return torch.tensor(found, dtype=torch.float64)


def of_training(train_cfg, *schedules):
    return Config({'default_scope': 'mmdet', 'model': {}, 'train_cfg': train_cfg, 'param_scheduler': list(schedules)})


def by_iterations(kind, **options):
    return {'type': kind, 'by_epoch': False, 'begin': 0, 'end': 400, **options}


WARM_UP = {'type': 'LinearLR', 'start_factor': 0.001, 'by_epoch': False, 'begin': 0, 'end': 40}
SCHEDULES = {
    'poly': [WARM_UP, by_iterations('PolyLR', begin=40, eta_min=0.0, power=1.0)],
    'poly during warm-up': [WARM_UP, by_iterations('PolyLR', eta_min=0.01, power=0.9)],
    'cosine': [WARM_UP, by_iterations('CosineAnnealingLR', begin=40, T_max=360, eta_min=0.1)],
    'steps': [by_iterations('MultiStepLR', milestones=[120, 240], gamma=0.1)],
    'equal steps': [by_iterations('StepLR', step_size=50, gamma=0.5)],
    'exponential': [by_iterations('ExponentialLR', gamma=0.99)],
    'restarts': [by_iterations('CosineRestartLR', periods=[100, 300], restart_weights=[1, 0.5], eta_min=0.0)],
    'one cycle': [by_iterations('OneCycleLR', eta_max=1.0, total_steps=400)],
    'quadratic, then constant': [
        by_iterations('QuadraticWarmupLR', end=60),
        by_iterations('CosineAnnealingLR', begin=60, end=300, T_max=240, eta_min=0.05),
        by_iterations('ConstantLR', begin=300, factor=1.0),
    ],
    'without an end': [{'type': 'MultiStepLR', 'by_epoch': False, 'milestones': [100], 'gamma': 0.1}],
}


@pytest.mark.parametrize(
    ('recipe', 'options', 'line'),
    [
        (
            DETECTOR,
            [],
            '12 epochs, validation after each epoch, learning rate 0.0001 (AdamW), warm-up of 1000 iterations, '
            'multiplied by 0.1 after 8 and 11 epochs',
        ),
        (
            DETECTOR,
            ['--epochs', '36', '--set', 'optim_wrapper.optimizer.lr=0.0002', 'train_cfg.val_interval=4'],
            '36 epochs, validation every 4 epochs, learning rate 0.0002 (AdamW), warm-up of 3000 iterations, '
            'multiplied by 0.1 after 24 and 33 epochs',
        ),
        (
            SEGMENTOR,
            ['--iters', '80000'],
            '80000 iterations, validation every 8000 iterations, learning rate 6e-05 (AdamW), warm-up of 750 '
            'iterations, Poly from 750 to 80000 iterations',
        ),
    ],
)
def test_config_prints_the_schedule_that_it_writes(tmp_path, capsys, recipe, options, line):
    written(tmp_path, *options, name=recipe)
    assert capsys.readouterr().out.splitlines()[1:] == [f'schedule: {line}']


@pytest.mark.parametrize('iterations', [200, 1000, 1200])
@pytest.mark.parametrize('name', SCHEDULES)
def test_the_learning_rate_is_that_of_the_recipe_in_scaled_time(name, iterations):
    """Counts are rounded, so that the time of a value may be off by a step of the shorter training."""
    config = of_training({'max_iters': 400}, *SCHEDULES[name])
    before = rates(config)
    set_length(Experiment(config), None, iterations)
    after = rates(config)
    assert len(after) == iterations
    assert notes_on_schedule(Experiment(config)) == []
    times = (torch.arange(iterations) + 0.5) * 400 / iterations
    slack = 1 + 400 / iterations
    for found, time in zip(after.tolist(), times.tolist(), strict=True):
        near = before[max(0, int(time - slack)) : int(time + slack) + 1]
        assert 0.98 * near.min() - 2e-3 <= found <= 1.02 * near.max() + 2e-3, time


@pytest.mark.parametrize(
    ('epochs', 'milestones', 'warm_up', 'interval'),
    [(36, [24, 33], 3000, 3), (6, [4, 6], 500, 1), (100, [67, 92], 8333, 8), (12, [8, 11], 1000, 1)],
)
def test_a_detector_for_more_or_fewer_epochs(tmp_path, epochs, milestones, warm_up, interval):
    config = written(tmp_path, '--epochs', epochs, name=DETECTOR)
    linear, steps = config.param_scheduler
    assert (linear.begin, linear.end) == (0, warm_up)
    assert (steps.begin, steps.end, list(steps.milestones)) == (0, epochs, milestones)
    assert config.train_cfg.max_epochs == epochs
    assert config.train_cfg.val_interval == config.default_hooks.checkpoint.interval == interval


def test_a_segmentor_for_fewer_iterations(tmp_path):
    config = written(tmp_path, '--iters', 4000, name=SEGMENTOR)
    assert config.train_cfg.max_iters == 4000
    assert config.train_cfg.val_interval == config.default_hooks.checkpoint.interval == 400
    linear, poly = config.param_scheduler
    assert (linear.end, poly.begin, poly.end) == (38, 38, 4000)
    found = rates(config)
    assert found[-1] < 1e-3
    assert found.max() > 0.99


def test_the_demo_converts_epochs_to_iterations(tmp_path):
    config = load_recipe('mask-rcnn_swin-demo_fpn')
    before = rates(config)
    set_length(Experiment(config), 16, None)
    after = rates(config)
    torch.testing.assert_close(after[120::80], before[60::40], rtol=0, atol=0.01)


def test_a_setting_wins(tmp_path):
    config = written(tmp_path, '--epochs', 36, '--set', 'train_cfg.val_interval=1', name=DETECTOR)
    assert config.train_cfg.val_interval == 1


def test_the_smallest_trainings_keep_the_learning_rate():
    """A warm-up of one step would keep its first value, a thousandth, for good."""
    config = load_recipe('mask-rcnn_swin-demo_fpn')
    set_length(Experiment(config), 1, None)
    assert rates(config).max() > 0.95
    config = of_training({'max_iters': 400}, *SCHEDULES['poly'])
    set_length(Experiment(config), None, 10)
    assert rates(config)[0] == 1.0


def test_intervals_and_hooks():
    config = of_training({'max_epochs': 300, 'val_interval': 10, 'dynamic_intervals': [(280, 1)], 'val_begin': 1})
    config.default_hooks = {'checkpoint': {'interval': -1, 'save_begin': 100}, 'logger': {'interval': 50}}
    config.custom_hooks = [
        {'type': 'PipelineSwitchHook', 'switch_epoch': 280},
        {'type': 'EMAHook', 'interval': 1, 'begin_epoch': 30},
    ]
    set_length(Experiment(config), 150, None)
    assert config.train_cfg == {'max_epochs': 150, 'val_interval': 5, 'dynamic_intervals': [(140, 1)], 'val_begin': 1}
    assert config.default_hooks == {'checkpoint': {'interval': -1, 'save_begin': 50}, 'logger': {'interval': 50}}
    assert config.custom_hooks[0].switch_epoch == 140
    assert config.custom_hooks[1] == {'type': 'EMAHook', 'interval': 1, 'begin_epoch': 15}


def test_a_single_schedule_and_one_of_each_optimiser():
    poly = by_iterations('PolyLR', power=1.0)
    for schedules in (poly, {'generator': [dict(poly)], 'other': dict(poly)}):
        config = Config({'model': {}, 'train_cfg': {'max_iters': 400}, 'param_scheduler': schedules})
        set_length(Experiment(config), None, 100)
        assert str(config.param_scheduler).count("'end': 100") == (1 if schedules is poly else 2)


@pytest.mark.parametrize(
    ('words', 'name', 'message'),
    [
        (['--epochs', 5], SEGMENTOR, 'trains for 160000 iterations; give --iters instead of --epochs'),
        (['--iters', 5], DETECTOR, 'trains for 12 epochs; give --epochs instead of --iters'),
        (['--epochs', 5, '--iters', 5], DETECTOR, 'give one'),
        (['--epochs', 0], DETECTOR, '--epochs must be at least 1, got 0'),
    ],
)
def test_a_length_that_does_not_fit_is_one_error(tmp_path, capsys, words, name, message):
    written(tmp_path, *words, name=name, status=2)
    assert message in capsys.readouterr().err


def test_a_schedule_without_a_plan_is_one_error():
    config = of_training({'max_epochs': 12}, {'type': 'ReduceOnPlateauLR', 'monitor': 'loss', 'rule': 'less'})
    with pytest.raises(ValueError, match='ReduceOnPlateauLR of param_scheduler cannot be scaled'):
        set_length(Experiment(config), 36, None)
    with pytest.raises(ValueError, match='--epochs needs train_cfg with max_epochs or max_iters'):
        set_length(Experiment(Config({'model': {}})), 36, None)


def test_a_schedule_that_does_not_end_with_the_training_is_noted(fruit, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr('mmengine.registry.RUNNERS.build', lambda config: pytest.skip)
    fruit.write('--set', 'train_cfg.max_epochs=36', name=DETECTOR)
    message = 'ends after 12 epochs, but the training after 36, so that it stays at its last value for 24 epochs'
    said = capsys.readouterr().err
    assert message in said
    assert 'change param_scheduler.1 in the config' in said
    changes = ['param_scheduler.1.end=36', 'param_scheduler.1.milestones=24,33']
    fruit.write('--set', 'train_cfg.max_epochs=36', *changes, name=DETECTOR)
    assert 'the schedule' not in capsys.readouterr().err
    written(tmp_path, '--set', 'train_cfg.max_iters=4000', name=SEGMENTOR)
    message = 'ends after 160000 iterations, but the training after 4000, so that it follows 2.5 % of its schedule only'
    assert message in capsys.readouterr().err


@pytest.mark.parametrize('name', some(recipe_names(), 10))
def test_no_recipe_is_noted_at_any_length(name):
    config = load_recipe(name)
    assert notes_on_schedule(Experiment(config)) == []
    is_by_epochs = 'max_epochs' in config.train_cfg
    set_length(Experiment(config), 37 if is_by_epochs else None, None if is_by_epochs else 12345)
    assert notes_on_schedule(Experiment(config)) == []


def test_train_notes_the_schedule_and_says_how_to_go_on(fruit, tmp_path, capsys, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    fruit.write(name=DETECTOR)
    monkeypatch.setattr('mmengine.registry.RUNNERS.build', lambda config: SimpleNamespace(train=interrupted))
    capsys.readouterr()
    path, work = str(tmp_path / 'mine.py'), str(tmp_path / 'work')
    assert main(['train', path, '--work-dir', work, '--set', 'train_cfg.max_epochs=24']) == 130
    said = capsys.readouterr().err
    assert 'swin-dense train: note: the schedule of the learning rate ends after 12 epochs' in said
    *_, advice, end = said.splitlines()
    assert advice == 'swin-dense train: --resume continues from the last checkpoint'
    assert end == 'swin-dense train: interrupted'


WARM_UP_NOTE = 'the warm-up of the learning rate ends after {} iterations, but the training after {}, so that it never'
WRAPPERS = {
    'none': {},
    'repeated': {'type': 'RepeatDataset', 'times': 3},
    'joined': {'type': 'ConcatDataset'},
    'mixed': {'type': 'MultiImageMixDataset'},
    'repeated and joined': {'type': 'ConcatDataset'},
}


def batches_of(config):
    """Return the number of batches of an epoch, by mmengine's own data loader."""
    init_default_scope(config.default_scope)
    return len(Runner.build_dataloader(copy.deepcopy(config.train_dataloader)))


@pytest.mark.parametrize('kind', WRAPPERS)
def test_a_warm_up_longer_than_the_training_is_noted_with_its_cure(ten_fruits, tmp_path, capsys, kind):
    """The recipe warms up for 1000 iterations, as for COCO; its length in iterations is that of mmengine's loader."""
    config = ten_fruits.write('--set', 'train_cfg.max_epochs=6', name=DETECTOR)
    inside = config.train_dataloader.dataset
    wrapper = WRAPPERS[kind]
    if 'joined' in kind:
        repeated = {'type': 'RepeatDataset', 'times': 2, 'dataset': inside} if 'repeated' in kind else inside
        config.train_dataloader.dataset = {**wrapper, 'datasets': [repeated, {**inside, 'indices': 3}]}
    elif wrapper:
        config.train_dataloader.dataset = {**wrapper, 'dataset': inside}
        if kind == 'mixed':
            config.train_dataloader.dataset.pipeline = []
    config.train_dataloader.num_workers = 0
    config.train_dataloader.persistent_workers = False
    path = tmp_path / 'wrapped.py'
    config.dump(path)
    capsys.readouterr()
    config = written(tmp_path, name=path)
    per_epoch = batches_of(config)
    total = 6 * per_epoch
    notes = capsys.readouterr().err
    assert WARM_UP_NOTE.format(1000, total) in notes
    assert rates(config, per_epoch).max() < 0.2
    setting = re.search(r'--set (param_scheduler.0.end=\d+)', notes)[1]
    config = written(tmp_path, '--set', setting, name=path)
    assert 'warm-up' not in capsys.readouterr().err
    assert rates(config, per_epoch).max() == pytest.approx(1)


def test_a_length_shortens_a_warm_up_that_is_longer_than_it(ten_fruits, capsys):
    config = ten_fruits.write('--epochs', 12, name=DETECTOR)
    per_epoch = batches_of(config)
    found = rates(config, per_epoch)
    assert config.param_scheduler[0].end == 12 * per_epoch // 10
    assert found.max() == pytest.approx(1)
    assert found[-1] == pytest.approx(0.01)
    assert 'warm-up' not in capsys.readouterr().err
    config = ten_fruits.write('--epochs', 12, '--set', 'param_scheduler.0.end=700', name=DETECTOR)
    assert config.param_scheduler[0].end == 700
    assert WARM_UP_NOTE.format(700, 12 * per_epoch) in capsys.readouterr().err
    config = ten_fruits.write('--epochs', 12, '--set', 'train_dataloader.batch_size=100000', name=DETECTOR)
    assert config.param_scheduler[0].end == 2
    poly = "param_scheduler=[{'type': 'PolyLR', 'by_epoch': False, 'end': 90}]"
    ten_fruits.write('--set', 'train_cfg.max_epochs=6', poly, name=DETECTOR)
    total = 6 * per_epoch
    assert f'ends after 90 iterations, but the training after {total}, so that' in capsys.readouterr().err


def test_a_warm_up_in_a_training_of_fewer_iterations_is_noted():
    config = of_training({'max_iters': 30}, *SCHEDULES['poly'])
    notes = notes_on_schedule(Experiment(config))
    assert WARM_UP_NOTE.format(40, 30) in notes[0]
    assert '--set param_scheduler.0.end=3 ' in notes[0]
    assert rates(config).max() < 1
    config.param_scheduler[0].end = 3
    assert not any('warm-up' in note for note in notes_on_schedule(Experiment(config)))
    generator = {'generator': [WARM_UP], 'other': WARM_UP}
    config = Config({'model': {}, 'train_cfg': {'max_iters': 30}, 'param_scheduler': generator})
    notes = ' '.join(notes_on_schedule(Experiment(config)))
    assert '--set param_scheduler.generator.0.end=3 ' in notes
    assert '--set param_scheduler.other.end=3 ' in notes
    assert 'of its schedule only' not in notes
    decay = by_iterations('LinearLR', start_factor=1.0, end_factor=0.1)
    notes = notes_on_schedule(Experiment(of_training({'max_iters': 30}, decay)))
    assert 'warm-up' not in ' '.join(notes)


def test_schedules_that_count_epochs_in_a_training_by_iterations_never_change_the_rate():
    config = of_training({'max_iters': 400}, {'type': 'MultiStepLR', 'milestones': [80, 110], 'gamma': 0.1})
    assert set(rates(config).tolist()) == {1.0}
    (note,) = notes_on_schedule(Experiment(config))
    assert 'param_scheduler.0 (MultiStepLR) counts epochs, but the training counts iterations' in note
    merge_settings(config, re.findall(r'--set ([^\s,]+)', note))
    assert len(set(rates(config).tolist())) == 3
    assert notes_on_schedule(Experiment(config)) == []
    converted = {'type': 'PolyLR', 'convert_to_iter_based': True, 'end': 10}
    endless = {'type': 'ExponentialLR', 'by_epoch': False, 'gamma': 0.99, 'end': 10**9}
    config = of_training({'max_iters': 400}, converted, endless)
    assert len(set(rates(config).tolist())) == 400
    assert notes_on_schedule(Experiment(config)) == []


def test_a_schedule_that_fails_within_the_training_is_an_error():
    """mmengine stops after the number of steps that a cycle has."""
    config = of_training({'max_iters': 400}, {**by_iterations('OneCycleLR', eta_max=1.0, total_steps=300)})
    with pytest.raises(ValueError, match='Tried to step 302 times'):
        rates(config)
    with pytest.raises(ValueError, match=r'param_scheduler.0 \(OneCycleLR\) fails after 301 of 400 steps'):
        notes_on_schedule(Experiment(config))
    config.train_cfg.max_iters = 200
    (note,) = notes_on_schedule(Experiment(config))
    assert 'but the training after 200, so that it follows' in note
    config.param_scheduler[0].pop('total_steps')
    config.param_scheduler[0].type = 'LinearLR'
    with pytest.raises(ValueError, match=r'param_scheduler.0 \(LinearLR\) cannot be built \(TypeError'):
        notes_on_schedule(Experiment(config))


def scaled_rate(config):
    """Return the learning rate that mmengine's Runner sets for the batch size, at a rate of 1 in the config."""
    weight = torch.nn.Parameter(torch.zeros(1))
    wrapper = OptimWrapper(torch.optim.SGD([weight], lr=1.0))
    runner = SimpleNamespace(
        _train_dataloader=config.train_dataloader, world_size=1, param_schedulers=None, logger=logging.getLogger()
    )
    Runner.scale_lr(runner, wrapper, config.auto_scale_lr)
    return wrapper.param_groups[0]['lr']


def test_a_rate_that_is_scaled_without_the_accumulated_gradients_is_said():
    config = of_training({'max_epochs': 1})
    config.train_dataloader = {'batch_size': 2}
    config.auto_scale_lr = {'base_batch_size': 16, 'enable': True}
    assert notes_on_schedule(Experiment(config)) == []
    config.optim_wrapper = {'accumulative_counts': 4}
    assert scaled_rate(config) == 2 / 16
    (note,) = notes_on_schedule(Experiment(config))
    assert 'is scaled by 2 / 16' in note
    assert 'with optim_wrapper.accumulative_counts=4 a step has 8 images' in note
    merge_settings(config, re.findall(r'--set (\S+)', note))
    assert scaled_rate(config) == 8 / 16
    config.auto_scale_lr.enable = False
    assert notes_on_schedule(Experiment(config)) == []

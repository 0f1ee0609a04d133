"""Pretraining by `swin-dense config` and `train`: what is logged and drawn, refused, resumed, and where it goes on."""

import signal
from types import SimpleNamespace

import pytest
import torch
from mmengine.config import Config
from mmengine.logging import MessageHub
from mmengine.optim import build_optim_wrapper
from mmengine.registry import DATASETS, MODELS

from swin_dense import SimMIM
from swin_dense.mm import HeldOutLoss, ImageNormalizer, PretrainingHook
from swin_dense.recipes.files import load_recipe
from tests.conftest import TINY, equal_weights
from tests.mm.tiny_pretraining import KILLED, last_picture, write_config
from tests.processes import cli
from tests.workbench.tiny_training import differences

RECIPE = 'simmim_swin-t-p4-w6_100e_192x192'


@pytest.fixture(scope='module')
def config(photos):
    """Return the file that `swin-dense config` wrote for the photos, with a tiny model."""
    out = photos.parent / f'{photos.name} config' / 'mine.py'
    out.parent.mkdir()
    write_config(out, RECIPE, photos)
    return out


@pytest.fixture(scope='module')
def trained(config):
    done = cli('train', config, '--work-dir', config.parent / 'run')
    return config.parent / 'run', done.stdout


def test_the_config_names_the_photos_everywhere(config, photos):
    written = Config.fromfile(config)
    for split, part in (('train', 'train'), ('val', 'held_out')):
        dataset = written[f'{split}_dataloader'].dataset
        assert (dataset.data_root.rstrip('/'), dataset.split) == (str(photos), part)
    assert written.default_hooks.checkpoint.type == 'swin_dense.workbench.checkpoints.WholeCheckpointHook'
    assert written.auto_scale_lr.enable


def test_held_out_loss_pictures_and_checkpoints(trained):
    original, (reconstruction,), is_grey = last_picture(*trained, 'loss_pixels', parts=3)
    assert (reconstruction == original)[~is_grey].all()
    assert (reconstruction != original)[is_grey].any()


def test_killed_and_resumed_it_ends_as_if_undisturbed(config, trained, tmp_path):
    for at, where in ((3, 'iteration'), (1, 'validation')):
        (tmp_path / 'mine.py').write_text(config.read_text() + KILLED.format(at=at, where=where))
        done = cli('train', tmp_path / 'mine.py', '--work-dir', tmp_path / 'run', '--resume', check=False)
        assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
    cli('train', config, '--work-dir', tmp_path / 'run', '--resume')
    assert differences(trained[0], tmp_path / 'run') == []


def model_with(**options):
    backbone = {'type': 'SwinDense', **TINY, 'window_size': 2, 'out_indices': (3,), 'clamp_window': True}
    return MODELS.build({'type': 'SimMIMPretrainer', 'backbone': backbone, 'mask_patch': 8, **options})


@pytest.mark.parametrize('norm_target', [None, 5])
def test_the_held_out_loss_is_that_of_each_image_with_its_own_mask(norm_target):
    """Also in other batches; a reconstruction is in the scale of the images."""
    model = model_with(norm_target=norm_target).eval()
    data = {'inputs': torch.rand(5, 3, 40, 40), 'index': torch.tensor([7, 3, 0, 11, 5])}
    with torch.no_grad():
        together = model.val_step(data)
        metric = HeldOutLoss()
        metric.process(data, together)
        for i, output in enumerate(together):
            img = model.data_preprocessor({'inputs': data['inputs'][i : i + 1]})['inputs']
            mask = model.draw_mask(img, torch.Generator().manual_seed(int(data['index'][i])))
            (loss,) = SimMIM.forward(model, img, mask).values()
            torch.testing.assert_close(output['loss_pixels'], loss, atol=1e-5, rtol=1e-5)
            if norm_target is None:
                raw = model.reconstruct(img, mask)[0]
                std = torch.tensor(model.data_preprocessor.std)[:, None, None]
                mean = torch.tensor(model.data_preprocessor.mean)[:, None, None]
                torch.testing.assert_close(output['reconstruction'], raw * std + mean, atol=1e-5, rtol=1e-5)
        mean = sum(output['loss_pixels'] for output in together) / 5
        assert metric.compute_metrics(metric.results)['error'] == pytest.approx(mean.item())
    assert len({tuple(output['hidden'].flatten().tolist()) for output in together}) == 5


def test_the_output_of_the_network_is_an_image_for_each_image():
    output = model_with().eval()(torch.rand(2, 3, 40, 40), mode='tensor')
    assert output.shape == (2, 3, 40, 40)


def test_normalising_can_be_undone():
    normalizer, img = ImageNormalizer([0.1, 0.2, 0.3, 0.4], [0.5, 0.6, 0.7, 0.8]), torch.rand(2, 4, 5, 6)
    done = normalizer({'inputs': img})['inputs']
    torch.testing.assert_close(done[:, 3], (img[:, 3] - 0.4) / 0.8)
    torch.testing.assert_close(normalizer.undo(done), img)
    torch.testing.assert_close(ImageNormalizer(None, None)({'inputs': img})['inputs'], img)


def test_the_teacher_is_loaded_and_not_saved(tmp_path):
    teacher = {'type': 'SwinDense', **TINY, 'window_size': 2, 'clamp_window': True}
    weights = MODELS.build(teacher).state_dict()
    torch.save(weights, tmp_path / 'teacher.pth')
    init_cfg = {'type': 'Pretrained', 'checkpoint': str(tmp_path / 'teacher.pth')}
    model = model_with(teacher={**teacher, 'init_cfg': init_cfg})
    model.init_weights()
    assert equal_weights(model.teacher, weights)
    assert not [name for name in model.state_dict() if 'teacher' in name]
    losses = model({'inputs': torch.rand(2, 3, 40, 40)}['inputs'], mode='loss')
    assert list(losses) == ['loss_pixels', 'loss_teacher']
    with pytest.raises(ValueError, match=r'set model\.teacher\.init_cfg'):
        model_with(teacher=teacher)


# Errors on held-out images and on training images at four validations, and whether the last one must warn.
COURSES = {
    'both fall': ([4, 3, 2, 1], [4, 3, 2, 1], False),
    'the held-out loss rises twice': ([4, 2, 3, 3.5], [4, 3, 2, 1], True),
    'once only': ([4, 3, 2, 3], [4, 3, 2, 1], False),
    'both rise': ([4, 2, 3, 3.5], [4, 2, 3, 4], False),
}


@pytest.mark.parametrize('course', COURSES)
def test_overfitting_is_reported_also_after_resuming(course):
    held_out, training, must_warn = COURSES[course]
    warnings = []
    hub = MessageHub.get_instance(f'pretraining {course}')
    for step, (error, loss) in enumerate(zip(held_out, training, strict=True), 1):
        for _ in range(3):
            hub.update_scalar('train/loss_pixels', loss)
        runner = SimpleNamespace(iter=3 * step, message_hub=hub, logger=SimpleNamespace(warning=warnings.append))
        PretrainingHook().after_val_epoch(runner, {'held_out/error': error})  # what it knows is in the hub
    assert len(warnings) == must_warn
    if must_warn:
        assert 'from 2 after 6 iterations to 3.5' in warnings[0]
        assert 'from 3 to 1' in warnings[0]


WRONG = {
    'no images': ({'data_root': 'empty'}, 'there is no image in'),
    'no folder': ({'data_root': 'nowhere'}, 'does not exist'),
    'small images': (
        {'train_dataloader.dataset.crop_size': 300, 'val_dataloader.dataset.crop_size': 300},
        'images are smaller than the crops of 300 pixels',
    ),
    'bands': (
        {'model.backbone.in_channels': 4, 'model.data_preprocessor.mean': 0.5, 'model.data_preprocessor.std': 0.5},
        'in_channels=3, the backbone 4',
    ),
    'mean': ({'model.data_preprocessor.mean': [0.5, 0.5]}, 'mean must be one value per channel'),
    'teacher': (
        {
            'model.teacher': {
                'type': 'SwinDense',
                'clamp_window': True,
                'init_cfg': {'type': 'Pretrained', 'checkpoint': 'x'},
            }
        },
        'the teacher has 768 channels of the last stage, the backbone 128',
    ),
}


@pytest.mark.parametrize('case', WRONG)
def test_wrong_input_is_one_clear_error_before_training(case, config, tmp_path):
    settings, words = WRONG[case]
    (tmp_path / 'empty').mkdir()
    changed = Config.fromfile(config)
    for key, value in settings.items():
        if key == 'data_root':
            for split in ('train', 'val'):
                changed[f'{split}_dataloader'].dataset.data_root = str(tmp_path / value)
        else:
            changed.merge_from_dict({key: value})
    changed.dump(tmp_path / 'wrong.py')
    done = cli('train', tmp_path / 'wrong.py', '--work-dir', tmp_path / 'run', check=False)
    assert done.returncode == 2, done.stdout + done.stderr
    assert words in done.stderr
    assert 'Traceback' not in done.stderr
    assert not (tmp_path / 'run').exists()


def test_labels_are_refused(photos, tmp_path):
    for option, value in (('--classes', 'apple,pear'), ('--train-masks', 'masks'), ('--ignore', '11')):
        done = cli('config', RECIPE, '--data-root', photos, option, value, check=False)
        assert done.returncode == 2
        assert 'pretraining reads images alone' in done.stderr


# Of the authors' configs: https://github.com/microsoft/SimMIM, configs/swin_base__100ep; models and optimizer.py.
@pytest.mark.parametrize('name', ['simmim_swin-b-p4-w6_100e_192x192', 'simmim_swin-b-p4-w6_22k-teacher_100e_192x192'])
def test_the_recipe_is_the_authors(name):
    config = load_recipe(name)
    optimizer = config.optim_wrapper.optimizer
    assert (optimizer.lr, optimizer.betas, optimizer.weight_decay) == (2e-4, (0.9, 0.999), 0.05)
    assert config.optim_wrapper.clip_grad == {'max_norm': 5.0}
    assert config.train_cfg.max_epochs == 100
    warm_up, cosine = config.param_scheduler
    assert (warm_up.start_factor * optimizer.lr, warm_up.end) == (pytest.approx(1e-6), 10)
    assert cosine.eta_min_ratio * optimizer.lr == pytest.approx(1e-5)
    assert (config.model.mask_patch, config.model.mask_ratio) == (32, 0.6)
    dataset = DATASETS.get('UnlabelledImages')
    assert dataset.__init__.__kwdefaults__['area'] == (0.67, 1.0)
    backbone = config.model.backbone
    assert (backbone.window_size, backbone.drop_path_rate, backbone.clamp_window) == (6, 0.0, True)
    backbone.update(TINY)
    config.model.pop('teacher', None)
    model = MODELS.build(config.model)
    wrapper = build_optim_wrapper(model, config.optim_wrapper)
    decay = {id(p): group['weight_decay'] for group in wrapper.param_groups for p in group['params']}
    for key, parameter in model.named_parameters():
        exempt = parameter.ndim == 1 or 'relative_position_bias_table' in key
        assert decay[id(parameter)] == (0 if exempt else 0.05), key

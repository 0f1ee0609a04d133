"""A tiny pretraining: its settings, and its config by `swin-dense config`."""

import re

import numpy as np
from mmengine.config import Config
from PIL import Image

from tests.conftest import TINY
from tests.processes import cli

KILLED = """
custom_imports['imports'].append('tests.workbench.tiny_training')
custom_hooks.append(dict(type='Killed', at={at}, where='{where}'))
"""
# Ten steps: nine images and one that is held out, five epochs of two steps.
TINY_SETTINGS = {
    **{f'model.backbone.{name}': list(value) if isinstance(value, tuple) else value for name, value in TINY.items()},
    'model.backbone.window_size': 2,
    'model.backbone.drop_path_rate': 0.2,
    **{f'{split}_dataloader.dataset.crop_size': 64 for split in ('train', 'val')},
    **{f'{split}_dataloader.num_workers': 0 for split in ('train', 'val')},
    **{f'{split}_dataloader.persistent_workers': False for split in ('train', 'val')},
    'train_dataloader.batch_size': 5,
    'train_cfg.max_epochs': 5,
    'train_cfg.val_interval': 1,
    'default_hooks.checkpoint.interval': 1,
    'param_scheduler.0.end': 1,
    'param_scheduler.1.begin': 1,
    'param_scheduler.1.end': 5,
    'auto_scale_lr.base_batch_size': 1,
}


def write_config(out, recipe, photos, *options, settings=()):
    """Write the config of a recipe for photos, with a tiny model and a seed; return it with what the command said."""
    tiny = [f'{key}={value}'.replace(' ', '') for key, value in TINY_SETTINGS.items()]
    done = cli('config', recipe, '--out', out, '--data-root', f'{photos}/', *options, '--set', *tiny, *settings)
    config = Config.fromfile(out)
    config.randomness = {'seed': 0}
    config.dump(out)
    return config, done.stderr


def last_picture(run, log, loss, parts):
    """Check what a run logged, drew and saved; return the parts of its last picture, and which pixels are grey.

    Each part is (64, 64, 3). The first is the image, the second the image with hidden cells in grey.
    """
    errors = [float(value) for value in re.findall(r'held_out/error: ([\d.]+)', log)]
    assert len(errors) == 5
    assert len(set(errors)) > 1
    assert len(re.findall(rf'{loss}: [\d.]+', log)) >= 5
    best = min(range(5), key=lambda epoch: errors[epoch]) + 1
    assert [path.name for path in run.glob('best*.pth')] == [f'best_held_out_error_epoch_{best}.pth']
    pictures = sorted(run.glob('*/vis_data/vis_image/reconstruction_*.png'))
    assert [path.stem for path in pictures] == [f'reconstruction_{step}' for step in (10, 2, 4, 6, 8)]
    original, hidden, *shown = np.asarray(Image.open(pictures[0])).reshape(64, parts, 64, 3).swapaxes(0, 1)
    is_grey = (hidden == 128).all(2)
    assert is_grey.sum() == 3 * 32 * 32  # three of four cells
    assert (hidden == original)[~is_grey].all()
    return original, shown, is_grey

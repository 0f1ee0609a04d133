"""Sliding windows: what mmseg can predict with, and what is refused before a training."""

import copy

import numpy as np
import pytest
import torch
from mmengine.config import Config, ConfigDict
from PIL import Image

from swin_dense.commands._main import main
from swin_dense.workbench.checking.settings import check_prediction
from swin_dense.workbench.configs.experiment import Experiment
from tests.workbench.export.query_models import config_of, random_model

SLIDE = {'mode': 'slide', 'crop_size': (64, 64), 'stride': (32, 34)}
HEIGHT, WIDTH = 96, 132
PIXELS = np.random.default_rng(0).integers(0, 255, (HEIGHT, WIDTH, 3), dtype=np.uint8)


def sliding(name, data, **changes):
    config = config_of(name, data)
    config.model.test_cfg = ConfigDict(SLIDE)
    config.merge_from_dict(changes)
    return config


@torch.no_grad()
def logits(model, pixels):
    from mmseg.structures import SegDataSample

    height, width = pixels.shape[:2]
    sample = SegDataSample(metainfo={'ori_shape': (height, width), 'img_shape': (height, width)})
    image = torch.from_numpy(np.ascontiguousarray(pixels)).permute(2, 0, 1)
    return model.test_step({'inputs': [image], 'data_samples': [sample]})[0].seg_logits.data


def test_mask2former_by_windows_is_refused_where_mmseg_fails(demo_data):
    config = sliding('mmseg_mask2former', demo_data)
    wrapped = copy.deepcopy(config)
    wrapped.model = ConfigDict(type='SegTTAModel', module=config.model)
    with pytest.raises(ValueError, match="mode='slide' does not work"):
        check_prediction(Experiment(wrapped))
    model = random_model(config_of('mmseg_mask2former', demo_data), PIXELS)
    model.test_cfg = config.model.test_cfg
    with pytest.raises(RuntimeError, match='must match the size'):
        logits(model, PIXELS)
    with pytest.raises(ValueError, match=r"add --set model\.data_preprocessor\.test_cfg=None, which is \{'size_div"):
        check_prediction(Experiment(config))


def test_mask2former_by_windows_with_the_setting_that_the_error_gives(demo_data):
    config = sliding('mmseg_mask2former', demo_data, **{'model.data_preprocessor.test_cfg': None})
    check_prediction(Experiment(config))
    whole = copy.deepcopy(config)
    whole.model.test_cfg = ConfigDict(mode='whole')
    model = random_model(whole, PIXELS)
    total, count = torch.zeros(model.out_channels, HEIGHT, WIDTH), torch.zeros(HEIGHT, WIDTH)
    for top in (0, 32):
        for left in (0, 34, 68):
            rows, columns = slice(top, top + 64), slice(left, left + 64)
            total[:, rows, columns] += logits(model, PIXELS[rows, columns])
            count[rows, columns] += 1
    model.test_cfg = config.model.test_cfg
    found = logits(model, PIXELS)
    torch.testing.assert_close(found, total / count)
    assert len(found.argmax(0).unique()) > 1


@pytest.mark.parametrize('name', ['mmseg_mask2former', 'mmseg_maskformer'])
def test_other_models_and_whole_images_are_not_refused(demo_data, name):
    check_prediction(Experiment(config_of(name, demo_data)))
    check_prediction(Experiment(sliding('mmseg_maskformer', demo_data)))


def test_a_step_that_pads_is_named(demo_data):
    config = sliding('mmseg_mask2former', demo_data, **{'model.data_preprocessor.test_cfg': None})
    config.val_dataloader.dataset.pipeline.insert(1, ConfigDict(type='ResizeToMultiple', size_divisor=32))
    with pytest.raises(ValueError, match=r'remove val_dataloader\.dataset\.pipeline\.1 \(ResizeToMultiple\)'):
        check_prediction(Experiment(config))


@pytest.mark.parametrize('changes', [{'stride': (65, 32)}, {'stride': None}, {'crop_size': 64}, {'stride': (0, 9)}])
def test_windows_that_leave_pixels_out(changes):
    model = {'test_cfg': {**SLIDE, **changes}, 'decode_head': {'type': 'UPerHead'}}
    with pytest.raises(ValueError, match='needs the height and width of its windows'):
        check_prediction(Experiment(Config({'default_scope': 'mmseg', 'model': model})))


def test_the_commands_refuse_it(capsys, tmp_path):
    out = tmp_path / 'mine.py'
    words = ['--set', *(f'model.test_cfg.{key}={value}' for key, value in SLIDE.items())]
    words = [word.replace(' ', '').replace('(', '').replace(')', '') for word in words]
    recipe = 'mask2former_swin-t_8xb2-160k_ade20k-512x512'
    assert main(['config', recipe, '--out', str(out), *words]) == 2
    error = capsys.readouterr().err
    assert 'model.data_preprocessor.test_cfg=None' in error
    assert main(['config', recipe, '--out', str(out), *words, 'model.data_preprocessor.test_cfg=None']) == 0
    assert Config.fromfile(out).model.data_preprocessor.test_cfg is None
    out.write_text(out.read_text() + "\nmodel['data_preprocessor']['test_cfg'] = dict(size_divisor=32)\n")
    (tmp_path / 'a.pth').touch()
    Image.fromarray(PIXELS).save(tmp_path / 'a.png')
    work_dir = ['--work-dir', tmp_path / 'work']
    for command in (
        ['train', out, *work_dir],
        ['predict', out, tmp_path / 'a.pth', tmp_path / 'a.png', '--out', tmp_path / 'found'],
    ):
        capsys.readouterr()
        assert main([*map(str, command)]) == 2, command
        assert 'model.data_preprocessor.test_cfg=None' in capsys.readouterr().err

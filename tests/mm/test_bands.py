"""Detectors and segmentors for images of nine bands: read, trained, tested and run by the commands."""

import json
import shutil

import numpy as np
import pytest
import tifffile
from mmengine.runner import Runner
from PIL import Image

from swin_dense.mm import LoadBands
from tests.mm.demo import demo_config

SCALE, BANDS = (255.0, 255.0, 255.0, 8160.0, 8160.0), (2, 1, 0, 3, 4)


def stored_bands(path):
    """Return a picture as counts of five bands: its colours, and two more that are made of them, in uint16."""
    rgb = np.asarray(Image.open(path).convert('RGB')).astype(np.uint16)
    return np.concatenate([rgb[:, :, ::-1], 8160 - 32 * rgb[:, :, :2]], 2)


def with_bands(framework, data):
    """Return the demo config for GeoTIFFs of five bands, which are written beside the pictures of the data."""
    for path in [*data.rglob('*.jpg'), *data.rglob('images/**/*.png')]:
        tifffile.imwrite(path.with_suffix('.tif'), stored_bands(path), photometric='minisblack', planarconfig='contig')
    cfg = demo_config(framework, data)
    load = {'type': 'swin_dense.mm.LoadBands', 'scale': SCALE, 'bands': BANDS, 'clamp': True}
    for loader in (cfg.train_dataloader, cfg.val_dataloader, cfg.test_dataloader):
        loader.dataset.pipeline[0] = load
        if framework == 'mmseg':
            loader.dataset.img_suffix = '.tif'
    for file in data.glob('coco/annotations/*.json'):
        file.write_text(file.read_text().replace('.jpg"', '.tif"'))
    cfg.model.backbone.in_channels = 5
    cfg.model.data_preprocessor.update(mean=None, std=None, bgr_to_rgb=False)
    return cfg


def test_bands_are_read_as_stored(tmp_path):
    values = np.random.default_rng(0).integers(0, 9000, (20, 30, 5), dtype=np.uint16)
    tifffile.imwrite(tmp_path / 'a.tif', values, photometric='minisblack', planarconfig='contig')
    load = LoadBands(scale=SCALE, bands=BANDS, clamp=True)
    expected = np.clip(values[:, :, BANDS] / SCALE, 0, 1)
    for given in ({'img_path': str(tmp_path / 'a.tif')}, {'img': values}):
        results = load({**given, 'img_id': 3})
        np.testing.assert_allclose(results['img'], expected, rtol=1e-6)
        assert results['img'].dtype == np.float32
        assert results['img_shape'] == results['ori_shape'] == (20, 30)
        assert results['img_id'] == 3


@pytest.mark.slow
@pytest.mark.parametrize('framework', ['mmdet', 'mmseg'])
def test_a_model_of_five_bands_trains_and_is_tested(demo_data, tmp_path, framework, monkeypatch):
    data = shutil.copytree(demo_data, tmp_path / 'data')
    cfg = with_bands(framework, data)
    cfg.work_dir = str(tmp_path / 'work')
    if framework == 'mmdet':
        cfg.train_cfg = {'type': 'EpochBasedTrainLoop', 'max_epochs': 1, 'val_interval': 1}
        cfg.default_hooks.checkpoint.interval = 1
    else:
        cfg.train_cfg = {'type': 'IterBasedTrainLoop', 'max_iters': 2, 'val_interval': 2}
        cfg.default_hooks.checkpoint.interval = 2
    cfg.default_hooks.logger.interval = 1
    runner = Runner.from_cfg(cfg)
    before = runner.model.backbone.patch_embed.projection.weight.clone()
    runner.train()
    after = runner.model.backbone.patch_embed.projection.weight
    assert after.shape[1] == 5
    assert ((after - before).abs().amax((0, 2, 3)) > 0).all()  # every band is learned from
    (log,) = (tmp_path / 'work').rglob('scalars.json')
    losses = [json.loads(line).get('loss', 0) for line in log.read_text().splitlines()]
    assert np.isfinite(losses).all()

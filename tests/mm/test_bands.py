"""Detectors and segmentors for images of nine bands: read, trained, tested and run by the commands."""

import json
import shutil

import numpy as np
import pytest
import tifffile
import torch
from mmengine.registry import MODELS, init_default_scope
from mmengine.runner import Runner
from PIL import Image

from swin_dense.commands._main import main
from swin_dense.features.tiling import exact_overlap
from swin_dense.images.pixels import ImageError
from swin_dense.mm import LoadBands
from tests.conftest import randomize
from tests.examples import load_example
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


def test_a_fourth_band_that_gdal_declares_as_opacity_is_read_or_named(tmp_path):
    values = np.random.default_rng(0).integers(0, 255, (20, 30, 4), dtype=np.uint8)
    tifffile.imwrite(tmp_path / 'rgbn.tif', values, photometric='rgb', extrasamples=['unassalpha'])
    given = {'img_path': str(tmp_path / 'rgbn.tif')}
    for options in ({'mean': (0.0,) * 4, 'std': 1.0}, {'scale': (255.0,) * 4}, {'bands': (0, 1, 2, 3)}):
        np.testing.assert_allclose(LoadBands(**options)(given)['img'], values / 255, rtol=1e-6)
    three = LoadBands(mean=(0.0,) * 3, std=(1.0,) * 3)(given)['img']
    np.testing.assert_allclose(three, values[..., :3] / 255, rtol=1e-6)
    with pytest.raises(ImageError, match=r'rgbn\.tif.*bands=\(0, 1, 2\) .*2, 3\)'):
        LoadBands()(given)
    with pytest.raises(ImageError, match='4 channels but the backbone takes 5'):
        LoadBands(scale=(255.0,) * 5)(given)


@pytest.mark.parametrize('framework', ['mmdet', 'mmseg'])
def test_a_model_learns_from_every_one_of_five_bands(demo_data, tmp_path, framework):
    cfg = with_bands(framework, shutil.copytree(demo_data, tmp_path / 'data'))
    init_default_scope(framework)
    model = MODELS.build(cfg.model).train()
    batch = next(iter(Runner.build_dataloader(cfg.train_dataloader, seed=0)))
    loss, _ = model.parse_losses(model(**model.data_preprocessor(batch, training=True), mode='loss'))
    loss.backward()
    gradient = model.backbone.patch_embed.projection.weight.grad
    assert gradient.shape[1] == 5
    assert (gradient.abs().amax((0, 2, 3)) > 0).all()


@pytest.fixture
def segmentor(tmp_path):
    """A segmentor of five bands whose head looks at single cells, with a config and weights, and a scene."""
    cfg = demo_config('mmseg', tmp_path)
    cfg.model.backbone.update(in_channels=5, depths=(2, 2), num_heads=(1, 2), out_indices=(0, 1))
    cfg.model.data_preprocessor.update(mean=None, std=None, bgr_to_rgb=False)
    cfg.model.decode_head = {
        **{'type': 'FCNHead', 'num_convs': 0, 'concat_input': False, 'in_channels': 64, 'channels': 64, 'in_index': 1},
        **{'num_classes': 6, 'dropout_ratio': 0.0, 'norm_cfg': {'type': 'BN'}},
    }
    cfg.model.auxiliary_head = None
    cfg.test_dataloader.dataset.pipeline[0] = {'type': 'swin_dense.mm.LoadBands', 'scale': SCALE, 'bands': BANDS}
    init_default_scope('mmseg')
    model = randomize(MODELS.build(cfg.model))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith('bias'):  # with them, one class would win everywhere
                parameter.zero_()
    torch.save({'state_dict': model.state_dict(), 'meta': {}}, tmp_path / 'weights.pth')
    cfg.dump(tmp_path / 'config.py')
    blocks = np.random.default_rng(0).integers(0, 8000, (36, 32, 5), dtype=np.uint16)
    values = blocks.repeat(9, 0).repeat(9, 1)[:320, :280]  # multiples of the stride: mmseg resizes maps to the image
    tifffile.imwrite(
        tmp_path / 'scene.tif', values, photometric='minisblack', planarconfig='contig', tile=(64, 64), extratags=GEO
    )
    return tmp_path, model.eval(), values


GEO = [(33550, 'd', 3, (10.0, 10.0, 0.0), True), (33922, 'd', 6, (0.0, 0.0, 0.0, 6e5, 5e6, 0.0), True)]


def test_a_segmentor_of_bands(segmentor):
    folder, model, values = segmentor
    given = ['predict', str(folder / 'config.py'), str(folder / 'weights.pth'), str(folder / 'scene.tif')]
    assert main([*given, '--out', str(folder / 'whole')]) == 0
    assert sorted(path.name for path in (folder / 'whole').glob('[!.]*')) == ['scene.json', 'scene.labels.png']
    expected = classes(model, values)
    assert len(np.unique(expected)) > 1
    assert (np.array(Image.open(folder / 'whole' / 'scene.labels.png')) == expected).mean() > 0.9999
    for one in json.loads((folder / 'whole' / 'scene.json').read_text())['segments']:
        assert one['share'] == pytest.approx((expected == one['label']).mean(), abs=1e-4)


def test_the_example_predicts_in_tiles_what_the_whole_image_gives(segmentor, monkeypatch):
    rasterio = pytest.importorskip('rasterio')
    folder, model, values = segmentor
    example = load_example('predict_large')
    monkeypatch.setattr(example, 'TILE', 56)
    monkeypatch.setattr(example, 'OVERLAP', exact_overlap(model.backbone, [8])[0])
    predictor = example.load([str(folder / 'config.py'), str(folder / 'weights.pth')])
    example.map_classes(predictor, str(folder / 'scene.tif'), str(folder / 'map.tif'))
    with rasterio.open(folder / 'map.tif') as written, rasterio.open(folder / 'scene.tif') as scene:
        assert (written.read(1) == classes(model, values)).mean() > 0.9999
        assert written.transform == scene.transform


@torch.no_grad()
def classes(model, values):
    img = torch.from_numpy((values[:, :, BANDS] / SCALE).transpose(2, 0, 1)).float()
    logits = model.encode_decode(img[None], [{'img_shape': img.shape[1:], 'ori_shape': img.shape[1:]}])
    return logits[0].argmax(0).numpy()

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
from swin_dense.images.pixels import ImageError
from swin_dense.mm import LoadBands
from tests.conftest import randomize
from tests.images.mutations import counts
from tests.mm.demo import demo_config

SCALE, BANDS = (255.0, 255.0, 255.0, 8160.0, 8160.0), (2, 1, 0, 3, 4)


def write_tiff(path, values, **options):
    tifffile.imwrite(path, values, **{'photometric': 'minisblack', 'planarconfig': 'contig', **options})
    return str(path)


def of_five_bands(cfg, load):
    """Make a config one of models for five bands, which are read by a step of the pipelines."""
    for loader in (cfg.train_dataloader, cfg.val_dataloader, cfg.test_dataloader):
        loader.dataset.pipeline[0] = {
            'type': 'swin_dense.mm.LoadBands',
            'normalization': {'mean': 0, 'std': 1, 'scale': SCALE, 'bands': BANDS, **load},
        }
    cfg.model.backbone.in_channels = 5
    cfg.model.data_preprocessor.update(mean=None, std=None, bgr_to_rgb=False)


def with_bands(framework, data):
    """Return the demo config for GeoTIFFs of five bands, which are written beside the pictures of the data."""
    for path in [*data.rglob('*.jpg'), *data.rglob('images/**/*.png')]:
        rgb = np.asarray(Image.open(path).convert('RGB')).astype(np.uint16)
        made_of_colours = 8160 - 32 * rgb[:, :, :2]
        bands = np.concatenate([rgb[:, :, ::-1], made_of_colours], 2)
        write_tiff(path.with_suffix('.tif'), bands)
    cfg = demo_config(framework, data)
    of_five_bands(cfg, {'clamp': True})
    if framework == 'mmseg':
        cfg.train_dataloader.dataset.img_suffix = '.tif'
    for file in data.glob('coco/annotations/*.json'):
        file.write_text(file.read_text().replace('.jpg"', '.tif"'))
    return cfg


def test_bands_are_read_as_stored_also_one_that_gdal_declares_as_opacity(tmp_path):
    values = counts(20, 30, 5)
    load = LoadBands({'mean': None, 'std': None, 'scale': SCALE, 'bands': BANDS, 'clamp': True})
    expected = np.clip(values[:, :, BANDS] / SCALE, 0, 1)
    for given in ({'img_path': write_tiff(tmp_path / 'a.tif', values)}, {'img': values}):
        results = load({**given, 'img_id': 3})
        np.testing.assert_allclose(results['img'], expected, rtol=1e-6)
        assert results['img'].dtype == np.float32
        assert results['img_shape'] == results['ori_shape'] == (20, 30)
        assert results['img_id'] == 3
    values = counts(20, 30, 4, most=255, dtype=np.uint8)
    given = {'img_path': write_tiff(tmp_path / 'rgbn.tif', values, photometric='rgb', extrasamples=['unassalpha'])}
    as_stored = {'mean': None, 'std': None}
    of_four_bands = [
        LoadBands({'mean': (0.0,) * 4, 'std': 1.0}),
        LoadBands({**as_stored, 'scale': (255.0,) * 4}),
        LoadBands({**as_stored, 'bands': (0, 1, 2, 3)}),
    ]
    for load in of_four_bands:
        np.testing.assert_allclose(
            load(given)['img'],
            values / 255,
            rtol=1e-6,
        )
    three = LoadBands({'mean': (0.0,) * 3, 'std': (1.0,) * 3})(given)['img']
    np.testing.assert_allclose(three, values[..., :3] / 255, rtol=1e-6)
    with pytest.raises(ImageError, match=r'rgbn\.tif.*bands=\(0, 1, 2\) .*2, 3\)'):
        LoadBands(as_stored)(given)
    with pytest.raises(ImageError, match='4 channels but the backbone takes 5'):
        LoadBands({**as_stored, 'scale': (255.0,) * 5})(given)


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
    of_five_bands(cfg, {})
    cfg.model.backbone.update(
        depths=(2, 2),
        num_heads=(1, 2),
        out_indices=(0, 1),
    )
    cfg.model.decode_head = {
        'type': 'FCNHead',
        'num_convs': 0,
        'concat_input': False,
        'in_channels': 64,
        'channels': 64,
        'in_index': 1,
        'num_classes': 6,
        'dropout_ratio': 0.0,
        'norm_cfg': {'type': 'BN'},
    }
    cfg.model.auxiliary_head = None
    init_default_scope('mmseg')
    model = randomize(MODELS.build(cfg.model))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith('bias'):  # with them, one class would win everywhere
                parameter.zero_()
    torch.save({'state_dict': model.state_dict(), 'meta': {}}, tmp_path / 'weights.pth')
    cfg.dump(tmp_path / 'config.py')
    blocks = counts(36, 32, 5, most=8000)
    values = blocks.repeat(9, 0).repeat(9, 1)[:320, :280]  # multiples of the stride: mmseg resizes maps to the image
    write_tiff(tmp_path / 'scene.tif', values)
    return tmp_path, model.eval(), values


def test_a_segmentor_of_bands(segmentor):
    folder, model, values = segmentor
    given = [str(folder / name) for name in ('config.py', 'weights.pth', 'scene.tif')]
    out = folder / 'whole'
    assert main(['predict', *given, '--out', str(out)]) == 0
    assert sorted(path.name for path in out.glob('[!.]*')) == ['scene.json', 'scene.labels.png']
    expected = classes(model, values)
    assert len(np.unique(expected)) > 1
    assert (np.array(Image.open(out / 'scene.labels.png')) == expected).mean() > 0.9999
    for one in json.loads((out / 'scene.json').read_text())['segments']:
        assert one['share'] == pytest.approx((expected == one['label']).mean(), abs=1e-4)


@torch.no_grad()
def classes(model, values):
    scaled = values[:, :, BANDS] / SCALE
    img = torch.from_numpy(scaled.transpose(2, 0, 1)).float()
    size = img.shape[1:]
    logits = model.encode_decode(img[None], [{'img_shape': size, 'ori_shape': size}])
    return logits[0].argmax(0).numpy()

"""`swin-dense predict` writes the predictions of the frameworks' own functions."""

import json
import os
import re

import mmdet.apis
import mmseg.apis
import numpy as np
import pytest
import tifffile
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from PIL import Image
from pycocotools import mask as coco_mask

from swin_dense.commands._main import main
from swin_dense.workbench.predict import Predictor
from swin_dense.workbench.recipes.files import load_recipe
from tests.conftest import photograph, randomize
from tests.processes import python

RECIPES = {'mmdet': 'mask-rcnn_swin-demo_fpn', 'mmseg': 'upernet_swin-demo'}


def make_weights(framework, path, **meta):
    """Save random weights of a demo model, without class names unless ``meta`` has some, to a file."""
    init_default_scope(framework)
    model = MODELS.build(load_recipe(RECIPES[framework]).model)
    model.init_weights()
    torch.save({'state_dict': model.state_dict(), 'meta': meta}, path)


@pytest.fixture
def pictures(tmp_path):
    folder = tmp_path / 'my pictures'
    folder.mkdir()
    for name in ('a b.png', 'c.jpg'):
        Image.fromarray(photograph(60, 90)).save(folder / name)
    return [folder / 'a b.png', folder / 'c.jpg']


def predict(framework, tmp_path, *images, options=()):
    weights = tmp_path / 'weights.pth'
    make_weights(framework, weights)
    out = tmp_path / 'out'
    status = main(
        [
            'predict',
            RECIPES[framework],
            str(weights),
            *map(str, images),
            '--out',
            str(out),
            *options,
        ]
    )
    return status, out, str(weights)


def names_in(out):
    """Return the paths of the results in a folder, without the record and the lock."""
    return sorted(path.relative_to(out).as_posix() for path in out.rglob('[!.]*') if path.is_file())


def test_a_detector(tmp_path, pictures):
    status, out, weights = predict(
        'mmdet',
        tmp_path,
        *pictures,
        options=('--score', '0'),
    )
    assert status == 0
    assert names_in(out) == ['a b.json', 'a b.painted.jpg', 'c.json', 'c.painted.jpg']
    model = mmdet.apis.init_detector(load_recipe(RECIPES['mmdet']), weights, device='cpu')
    for path in pictures:
        expected = mmdet.apis.inference_detector(model, str(path)).pred_instances
        record = json.loads((out / f'{path.stem}.json').read_text())
        found = record.pop('instances')
        assert len(found) == len(expected) > 0
        assert record == {'format': 1, 'image': str(path), 'height': 60, 'width': 90}
        for field, tensor in (('box', expected.bboxes), ('score', expected.scores), ('label', expected.labels)):
            torch.testing.assert_close(torch.tensor([one[field] for one in found]), tensor)
        assert {one['class'] for one in found} <= {'ball', 'clock', 'box', 'flag', 'light'}
        masks = [coco_mask.decode(one['mask']).astype(bool) for one in found]
        np.testing.assert_array_equal(masks, expected.masks.numpy())
        with Image.open(out / f'{path.stem}.painted.jpg') as painted:
            assert painted.size == (90, 60)
    predict('mmdet', tmp_path, pictures[0], options=('--score', '0.9999', '--force'))
    assert json.loads((out / 'a b.json').read_text())['instances'] == []


def test_a_segmentor_and_a_file_that_is_no_image(tmp_path, pictures, capsys):
    (tmp_path / 'broken.jpg').write_text('no picture')
    status, out, weights = predict('mmseg', tmp_path, tmp_path / 'broken.jpg', pictures[1])
    assert status == 1
    assert 'broken.jpg: ' in capsys.readouterr().err
    assert names_in(out) == ['c.json', 'c.labels.png', 'c.painted.jpg']
    model = mmseg.apis.init_model(load_recipe(RECIPES['mmseg']), weights, device='cpu')
    expected = mmseg.apis.inference_model(model, str(pictures[1])).pred_sem_seg.data[0].numpy()
    np.testing.assert_array_equal(np.array(Image.open(out / 'c.labels.png')), expected)
    names = ('wall', 'ball', 'clock', 'box', 'flag', 'light')
    segments = json.loads((out / 'c.json').read_text())['segments']
    assert sum(segment['share'] for segment in segments) == pytest.approx(1)
    for segment in segments:
        assert segment['class'] == names[segment['label']]
        assert segment['share'] == pytest.approx((expected == segment['label']).mean())


@pytest.mark.parametrize(
    ('framework', 'setting'),
    [
        ('mmdet', 'model.test_cfg.rcnn.score_thr=0.2'),
        ('mmseg', 'model.test_cfg={"mode": "slide", "crop_size": (64, 64), "stride": (32, 32)}'),
    ],
)
def test_results_of_another_model_are_not_resumed(tmp_path, pictures, capsys, framework, setting):
    words = [
        'predict',
        RECIPES[framework],
        str(tmp_path / 'weights.pth'),
        str(pictures[0]),
        '--out',
        str(tmp_path / 'out'),
    ]
    make_weights(framework, tmp_path / 'weights.pth')
    assert main(words) == 0
    before = (tmp_path / 'out' / 'a b.json').read_bytes()
    assert main([*words, '--resume']) == 0
    assert main([*words, '--resume', '--set', 'train_cfg.max_epochs=1']) == 0  # which changes no prediction
    make_weights(framework, tmp_path / 'weights.pth', epoch=2)
    for options, name in (((), 'checkpoint'), (('--set', setting), 'config')):
        capsys.readouterr()
        assert main([*words, '--resume', *options]) == 2
        assert re.search(rf"a b.json was predicted with other settings \(.*{name} '\w+' there", capsys.readouterr().err)
    assert (tmp_path / 'out' / 'a b.json').read_bytes() == before


def test_the_digest_of_a_config_is_the_same_in_each_process(capsys):
    """A pure-Python config has classes and functions, whose representation may contain an address."""
    code = """
from mmengine.config import Config
from mmdet.models import MaskRCNN
from swin_dense.workbench.predict import settings_digest
dataset = {'type': 'CocoDataset', 'pipeline': [{'type': MaskRCNN, 'key': lambda x: x}]}
print(settings_digest(Config({'model': {'type': MaskRCNN}, 'test_dataloader': {'dataset': dataset}})))
"""
    exec(code, {'__name__': '__main__'})
    assert python('-c', code).stdout == capsys.readouterr().out != ''


FIVE, SIX = ('a', 'b', 'c', 'd', 'e'), ('u', 'v', 'w', 'x', 'y', 'z')
COLOURS = [
    (1, 2, 3),
    (4, 5, 6),
    (7, 8, 9),
    (10, 11, 12),
    (13, 14, 15),
]

NAMED = {'classes': FIVE, 'palette': COLOURS}


def predictor_of(framework, meta, dataset, folder):
    """Return a predictor with metadata of the checkpoint, and changes of the test data set."""
    config = load_recipe(RECIPES[framework])
    for key, value in dataset.items():
        config.test_dataloader.dataset[key] = value
    make_weights(framework, folder / 'w.pth', **meta)
    return Predictor(config, str(folder / 'w.pth'), 'cpu')


@pytest.mark.parametrize(
    ('framework', 'meta', 'dataset', 'classes', 'palette'),
    [
        # Names of the checkpoint, also if the test data set is COCO with its 80 names.
        ('mmdet', {'dataset_meta': NAMED}, {'metainfo': {}}, FIVE, COLOURS),
        ('mmdet', {'CLASSES': FIVE, 'PALETTE': COLOURS}, {'metainfo': {}}, FIVE, COLOURS),
        ('mmdet', {'dataset_meta': {'CLASSES': FIVE}}, {}, FIVE, None),
        ('mmdet', {'dataset_meta': [NAMED, {'classes': FIVE}]}, {'metainfo': {}}, FIVE, COLOURS),  # of a ConcatDataset
        ('mmseg', {'dataset_meta': {'classes': SIX, 'palette': COLOURS}}, {'type': 'ADE20KDataset'}, SIX, None),
        # Names of the test data set.
        ('mmdet', {}, {'metainfo': NAMED}, FIVE, COLOURS),
        ('mmdet', {}, {'metainfo': {'classes': 'names.txt'}}, FIVE, None),
        ('mmseg', {'epoch': 3}, {'metainfo': {'classes': SIX}}, SIX, None),
    ],
)
def test_class_names_come_from_the_checkpoint_or_the_data_set(
    tmp_path, monkeypatch, framework, meta, dataset, classes, palette
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'names.txt').write_text('\n'.join(FIVE))
    predictor = predictor_of(framework, meta, dataset, tmp_path)
    assert predictor.classes == classes
    assert predictor.model.dataset_meta == {'classes': classes, 'palette': predictor.palette}
    assert predictor.palette == palette or palette is None
    assert len(set(predictor.palette)) == len(classes)


@pytest.mark.parametrize('bands', [(2, 1, 3), None])
def test_a_predictor_states_the_bands_that_it_reads(tmp_path, bands):
    load = {'type': 'swin_dense.mm.LoadBands', 'normalization': {'mean': 0, 'std': 1, 'bands': bands}}
    pipeline = [load, *load_recipe(RECIPES['mmseg']).test_dataloader.dataset.pipeline[1:]]
    assert predictor_of('mmseg', {}, {'pipeline': pipeline}, tmp_path).bands == bands
    assert predictor_of('mmseg', {}, {}, tmp_path).bands == (0, 1, 2)


@pytest.mark.parametrize(
    ('framework', 'meta', 'dataset', 'message'),
    [
        ('mmdet', {}, {'metainfo': {}}, 'predicts 5 .* 0 class names .* set 80'),
        ('mmdet', {'CLASSES': SIX}, {}, 'predicts 5 .* 6 class names and .* set 5'),
        ('mmseg', {}, {'type': 'BaseSegDataset', 'metainfo': {}}, 'predicts 6 .* 0 class names and .* set 0'),
    ],
)
def test_class_names_must_be_as_many_as_the_head_has(tmp_path, framework, meta, dataset, message):
    with pytest.raises(ValueError, match=message):
        predictor_of(framework, meta, dataset, tmp_path)


@pytest.mark.parametrize(
    ('words', 'message'),
    [
        ('a.png a.png nowhere.jpg', 'there is no file nowhere.jpg'),
        ('a.png nowhere.pth a.png', 'there is no file nowhere.pth'),
        ('upernet_swin-demo nowhere.jpg', 'there is no file nowhere.jpg'),
        ('upernet_swin-demo empty', 'the folder empty contains no images'),
        (
            'upernet_swin-demo',
            'give a model and images: RECIPE IMAGE..., CONFIG CHECKPOINT IMAGE... or MODEL.onnx IMAGE',
        ),
        ('upernet_swin-demo mine.py', 'give a model and images'),
        ('upernet_swin-demo a.png', 'no weights are published for the recipe upernet_swin-demo'),
        ('mask-rcnn_swin-t a.png', "did you mean 'mask-rcnn_swin-t-p4-w7_fpn_1x_coco'"),
        ('mine.py a.png', 'mine.py is a config file, for which no weights are published; give its checkpoint'),
        ('no-such-recipe a.png', "there is no recipe and no config file 'no-such-recipe'"),
        ('upernet_swin-demo mine.py a.png --score 2', '--score must lie between 0 and 1'),
        ('upernet_swin-demo mine.py a.png --runtime openvino', '--runtime needs a file that ends in .onnx or .xml'),
        ('upernet_swin-demo mine.py a.png --precision bfloat16', '--precision needs a file that ends in .onnx or .xml'),
        ('model.onnx a.png --device cpu', '--device, --set and --allow-partial need a config'),
        ('model.onnx a.png --resume --force', '--resume keeps results and --force replaces them'),
    ],
)
def test_wrong_arguments(tmp_path, capsys, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'empty').mkdir()
    (tmp_path / 'mine.py').write_text("default_scope = 'mmdet'")
    for name in ('a.png', 'model.onnx'):
        (tmp_path / name).write_text('')
    assert main(['predict', *words.split()]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / 'predictions').exists()


@pytest.mark.parametrize(
    ('load', 'dtype'),
    [
        ({'color_type': 'unchanged'}, np.uint16),
        ({'color_type': 'unchanged', 'imdecode_backend': 'tifffile'}, np.float32),
        ({'color_type': 'unchanged', 'imdecode_backend': 'pillow'}, np.uint8),
        ({'color_type': 'color', 'to_float32': True}, np.uint8),
    ],
)
def test_images_are_read_with_the_options_of_the_loader(tmp_path, monkeypatch, load, dtype):
    """A model of one channel sees the stored values, which in colours of 8 bits would be other ones."""
    monkeypatch.chdir(tmp_path)
    config, shape, most = load_recipe(RECIPES['mmseg']), (64, 64, 3), 255
    if load['color_type'] == 'unchanged':
        shape, most = (64, 64), 16000 if dtype == np.uint16 else 255
        config.model.backbone.in_channels = 1
        config.model.data_preprocessor.update(
            mean=[0.0],
            std=[most / 5],
            bgr_to_rgb=False,
        )
    pixels = np.random.default_rng(0).integers(0, most, shape).astype(dtype)
    if dtype == np.float32:
        tifffile.imwrite('picture.png', pixels)  # each decoder looks at the content
    else:
        Image.fromarray(pixels).save('picture.png')
    config.test_pipeline = [{'type': 'LoadImageFromFile', **load}, {'type': 'PackSegInputs'}]
    config.test_dataloader.dataset.pipeline = config.test_pipeline  # mmseg's own function reads the other
    config.dump('config.py')
    init_default_scope('mmseg')
    model = randomize(MODELS.build(config.model))
    torch.save({'state_dict': model.state_dict(), 'meta': {}}, 'weights.pth')
    assert main(['predict', 'config.py', 'weights.pth', 'picture.png']) == 0
    reference = mmseg.apis.init_model(config, 'weights.pth', device='cpu')
    expected = mmseg.apis.inference_model(reference, 'picture.png').pred_sem_seg.data[0].numpy()
    assert len(np.unique(expected)) > 1
    with Image.open('predictions/picture.labels.png') as labels:
        np.testing.assert_array_equal(np.asarray(labels), expected)


def test_a_config_needs_a_framework_and_a_pipeline_that_begins_with_a_loader():
    with pytest.raises(ValueError, match=r"default_scope = .* or 'mmseg', got None"):
        Predictor(Config({'model': {}}), 'a.pth', 'cpu')
    config = load_recipe(RECIPES['mmseg'])
    config.test_dataloader.dataset.pipeline = config.test_dataloader.dataset.pipeline[-1:]
    with pytest.raises(ValueError, match="load the image, got 'PackSegInputs'"):
        Predictor(config, 'weights.pth', 'cpu')


def test_nothing_is_written_outside_of_the_output(tmp_path, monkeypatch):
    """Configs of `test --show-dir` and `train` name a folder of their own for pictures."""
    monkeypatch.chdir(tmp_path)
    image, labels = (os.fsdecode(name) for name in (b'\xff.png', b'\xff.labels.png'))  # not UTF-8
    os.mkdir('photos')
    Image.fromarray(photograph(60, 90)).save(f'photos/{image}')
    config = load_recipe(RECIPES['mmseg'])
    config.visualizer.update(vis_backends=[{'type': 'LocalVisBackend'}], save_dir='shown')
    config.dump('config.py')
    make_weights('mmseg', 'weights.pth')
    assert main(['predict', 'config.py', 'weights.pth', 'photos', '--out', 'out']) == 0
    assert os.path.exists(f'out/{labels}')
    assert sorted(os.listdir()) == ['config.py', 'out', 'photos', 'weights.pth']

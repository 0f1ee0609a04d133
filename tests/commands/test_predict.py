"""`swin-dense predict` writes the predictions of the frameworks' own functions."""

import json

import mmdet.apis
import mmseg.apis
import numpy as np
import pytest
import torch
from mmengine.registry import MODELS, init_default_scope
from PIL import Image
from pycocotools import mask as coco_mask

from swin_dense.__main__ import main
from swin_dense.recipes.files import load_recipe

RECIPES = {'mmdet': 'mask-rcnn_swin-demo_fpn', 'mmseg': 'upernet_swin-demo'}


def make_weights(framework, path):
    """Save random weights of a demo model, without class names, to a file."""
    init_default_scope(framework)
    model = MODELS.build(load_recipe(RECIPES[framework]).model)
    model.init_weights()
    torch.save({'state_dict': model.state_dict(), 'meta': {}}, path)


@pytest.fixture
def pictures(tmp_path):
    generator = np.random.default_rng(0)
    folder = tmp_path / 'my pictures'
    folder.mkdir()
    paths = [folder / 'a b.png', folder / 'c.jpg']
    for path in paths:
        Image.fromarray(generator.integers(0, 255, (60, 90, 3), dtype=np.uint8)).save(path)
    return paths


def predict(framework, tmp_path, *images, options=()):
    weights = tmp_path / 'weights.pth'
    make_weights(framework, weights)
    out = tmp_path / 'out'
    status = main(['predict', RECIPES[framework], str(weights), *map(str, images), '--out', str(out), *options])
    return status, out, str(weights)


def test_a_detector(tmp_path, pictures):
    status, out, weights = predict('mmdet', tmp_path, *pictures, options=('--score', '0'))
    assert status == 0
    assert sorted(path.name for path in out.iterdir()) == ['a b.json', 'a b.painted.jpg', 'c.json', 'c.painted.jpg']
    config = load_recipe(RECIPES['mmdet'])
    for path in pictures:
        model = mmdet.apis.init_detector(config, weights, device='cpu')
        expected = mmdet.apis.inference_detector(model, str(path)).pred_instances
        record = json.loads((out / f'{path.stem}.json').read_text())
        found = record['instances']
        assert len(found) == len(expected) > 0
        assert record['image'] == str(path)
        torch.testing.assert_close(torch.tensor([one['box'] for one in found]), expected.bboxes)
        torch.testing.assert_close(torch.tensor([one['score'] for one in found]), expected.scores)
        assert [one['label'] for one in found] == expected.labels.tolist()
        assert {one['class'] for one in found} <= {'disc', 'ring', 'square', 'triangle', 'star'}
        masks = [coco_mask.decode(one['mask']).astype(bool) for one in found]
        np.testing.assert_array_equal(masks, expected.masks.numpy())
        with Image.open(out / f'{path.stem}.painted.jpg') as painted:
            assert painted.size == (90, 60)


def test_instances_below_the_score_are_left_out(tmp_path, pictures):
    status, out, _ = predict('mmdet', tmp_path, pictures[0], options=('--score', '0.9999'))
    assert status == 0
    assert json.loads((out / 'a b.json').read_text())['instances'] == []


def test_a_segmentor_and_a_file_that_is_no_image(tmp_path, pictures, capsys):
    (tmp_path / 'broken.jpg').write_text('no picture')
    status, out, weights = predict('mmseg', tmp_path, tmp_path / 'broken.jpg', pictures[1])
    assert status == 1
    assert 'broken.jpg cannot be read' in capsys.readouterr().err
    assert sorted(path.name for path in out.iterdir()) == ['c.json', 'c.labels.png', 'c.painted.jpg']
    model = mmseg.apis.init_model(load_recipe(RECIPES['mmseg']), weights, device='cpu')
    expected = mmseg.apis.inference_model(model, str(pictures[1])).pred_sem_seg.data[0].numpy()
    np.testing.assert_array_equal(np.array(Image.open(out / 'c.labels.png')), expected)
    segments = json.loads((out / 'c.json').read_text())['segments']
    assert sum(segment['share'] for segment in segments) == pytest.approx(1)
    names = ('wall', 'ball', 'clock', 'box', 'flag', 'light')
    for segment in segments:
        assert segment['class'] == names[segment['label']]
        assert segment['share'] == pytest.approx((expected == segment['label']).mean())


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['{a}', '{a}', 'nowhere.jpg'], 'there is no file nowhere.jpg'),
        (['{a}', 'nowhere.pth', '{a}'], 'there is no file nowhere.pth'),
        (['no-such-recipe', '{a}', '{a}'], 'no recipe and no config file'),
        (['upernet_swin-demo', '{a}', '{a}', '--score', '2'], '--score must lie between 0 and 1'),
        (['upernet_swin-demo', '{a}', '{a}'], 'is not a checkpoint of it (UnpicklingError'),
        (['upernet_swin-demo', '{a}', '{a}', '{a}'], 'several images have the name a b'),
    ],
)
def test_wrong_arguments(tmp_path, pictures, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main(['predict', *(argument.format(a=pictures[0]) for argument in arguments)]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / 'predictions').exists()
